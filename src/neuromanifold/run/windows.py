"""Adaptive passes: the outputs of some batches first, then passes for the samples that are worth them.

for each window of batches
    outputs of its first batch                      captured: if all samples are alike, backward follows as usual
    outputs of the others                           without a graph, for the scores alone
    allocation                                      who is kept, with how many passes (estimators/adaptive.py)
    samples with equal numbers of passes            regrouped into batches: forward, and that many backward passes

All random numbers of a window follow from the seed and the number of its first batch.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from neuromanifold.core import Core
from neuromanifold.core.checks import message
from neuromanifold.estimators.adaptive import (
    Adaptive,
    Allocation,
    Scores,
    allocate,
    chosen,
    groups,
    in_full_groups,
    pays,
    score,
    several,
)
from neuromanifold.persample.accumulate import GradientSums
from neuromanifold.problem.batches import Batch, SomeSamples, gather, same_kind
from neuromanifold.problem.outputs import Outputs
from neuromanifold.problem.suspicions import samples_influence_each_other
from neuromanifold.run.counts import Counts
from neuromanifold.run.methods import Method


class _Scored(NamedTuple):
    """What is kept of the outputs of a batch."""

    batch: Batch
    trace: Tensor  # [B] tr M, over all positions of a sample
    squared_norm: Tensor  # [B] ‖M‖²
    rank: int
    logits: Tensor | None  # [B, C], if a sample has a single output distribution

    @property
    def samples(self) -> int:
        return len(self.trace)


class AdaptiveSteps:
    """Takes the batches of a window together."""

    def __init__(self, method: Method, sums: GradientSums, counts: Counts) -> None:
        assert isinstance(method.settings.estimator, Adaptive)
        self._method, self._problem, self._estimator = method, method.problem, method.settings.estimator
        self._sums, self._counts = sums, counts
        self._compared = False  # whether regrouped samples have the logits that they had before

    def __call__(self, batches: list[Batch]) -> Iterator[Outputs]:
        """Yield the outputs of each batch; at the end, all passes of the window are done."""
        first, outputs = batches[0], self._method.forward(batches[0])
        regroups = self._regroups(batches, outputs.detached())
        if self._estimator.cost < 1 and regroups is False:
            advice = "Use passes=1 or more: then batches are left as they are."
            got = "batches that cannot be split, or samples that influence each other"
            raise ValueError(message("passes", "at least 1 for this model and these data", got, advice))
        scored = self._scored(first, outputs)
        scores = self._scores([scored])
        if regroups and pays(self._estimator, scores):
            yield from self._by_scores(scored, batches, outputs)
            return
        alike = self._estimator.allocation(len(scores.trace))
        self._note_noise(scores, alike, times=len(batches))
        if self._estimator.cost < 1:
            yield from self._at_random(batches, outputs)
            return
        for batch in batches:
            outputs = outputs if batch is first else self._method.forward(batch)
            self._method.complete(batch, outputs, self._sums, self._estimator.alike(batch.number))
            self._sums.synchronize()
            yield outputs.detached()

    def _regroups(self, batches: list[Batch], outputs: Outputs) -> bool | None:
        """Whether samples can be taken out of their batches and joined to others; None if no batch has several.

        Asked for each window, so that it does not depend on where a shard or a resumed run begins.
        """
        for batch in batches:
            if self._problem.samples_of(batch, outputs) > 1:
                found = outputs if batch is batches[0] else self._problem.outputs(batch)
                return samples_influence_each_other(self._problem, batch, found) is False
        return None

    def _by_scores(self, scored: _Scored, batches: list[Batch], outputs: Outputs) -> Iterator[Outputs]:
        """Outputs of all batches first; then passes for the samples that are worth them."""
        yield outputs.detached()
        self._method.release()  # the graph of the first is not needed
        window = [scored]
        for batch in batches[1:]:
            more = self._problem.outputs(batch)
            window.append(self._scored(batch, more))
            yield more
        self._method.seed(batches[0].number)
        scores = self._scores(window)
        allocation = allocate(scores, self._budget(window))
        kinds = [same_kind(one.batch, one.samples, self._problem.batch_dim) for one in window]
        if len(set(kinds)) == 1:
            size, generator = max(one.samples for one in window), self._method.generator
            allocation = allocation._replace(keep=in_full_groups(allocation.keep, size, generator))
        kept = chosen(allocation.keep, self._method.generator)
        self._counts.leave_out(len(scores.trace) - len(kept))
        owner = torch.repeat_interleave(torch.tensor([one.samples for one in window]))  # the batch of each sample
        for kind in dict.fromkeys(kinds):
            numbers = [b for b, other in enumerate(kinds) if other == kind]
            own = kept[torch.isin(owner[kept], torch.tensor(numbers))]
            certain = allocation.keep[own] >= 1  # apart from the others: a group has one constant for its noise
            for some in (own[certain], own[~certain]):
                if len(some):
                    order = (allocation.passes[some] + allocation.keep[some]).argsort(descending=True, stable=True)
                    sizes = groups(allocation.passes[some[order]], max(1, *(window[b].samples for b in numbers)))
                    for group in torch.split(some[order], sizes):
                        self._run_group(group.sort().values, scores, allocation, window)

    def _run_group(self, group: Tensor, scores: Scores, allocation: Allocation, window: list[_Scored]) -> None:
        """Forward and backward passes for some samples of a window, in the order of the data.

        Their number is the one that is best for the group.
        """
        keep = allocation.keep[group]
        noise = (scores.noise[group] / keep[:, None]).sum(0) + allocation.price * len(group) * scores.passes
        passes = int(scores.passes[noise.argmin()])
        bounds = torch.tensor([0, *(one.samples for one in window)]).cumsum(0)
        parts, expected = [], []
        for start, stop, one in zip(bounds, bounds[1:], window, strict=False):
            rows = group[(group >= start) & (group < stop)] - start
            if len(rows):
                parts.append(SomeSamples(one.batch, one.samples, rows))
                expected.append(None if one.logits is None else one.logits[rows.to(one.logits.device)])
        self._run(gather(parts, self._problem.batch_dim), passes, keep, scores.trace[group], expected)
        done = Allocation(keep, torch.full((len(group),), float(passes), dtype=torch.float64), allocation.price)
        self._note_noise(scores.of(group), done)

    def _note_noise(self, scores: Scores, done: Allocation, times: int = 1) -> None:
        """Add the predicted variance of samples that were kept, and the bound that their standard errors are."""
        variance, keep = 2 * scores.at(done.passes), done.keep
        bound = torch.where(done.passes <= 1, 2 * scores.trace.square(), variance)
        missed = (1 - keep) * (scores.fisher + variance)
        noise, bounded = (times * float(((keep * one + missed) / keep.square()).sum()) for one in (variance, bound))
        self._counts.add_noise_shares((noise, bounded))

    def _at_random(self, batches: list[Batch], outputs: Outputs) -> Iterator[Outputs]:
        """Samples of each batch at random, which are as good as any other if all are alike."""
        first = outputs.detached()
        self._method.release()
        for batch in batches:
            self._method.seed(batch.number)
            samples = self._problem.samples_of(batch, first)
            keep = torch.full((samples,), self._estimator.cost, dtype=torch.float64)
            rows = chosen(keep, self._method.generator)
            self._counts.leave_out(samples - len(rows))
            if len(rows):
                part = gather([SomeSamples(batch, samples, rows)], self._problem.batch_dim)
                first = self._run(part, 1, keep[rows], torch.ones(len(rows)), [])
            elif first.logits.ndim > 2:  # the number of positions is not known
                first = self._problem.outputs(batch)
            yield self._problem.outputs_like(first, batch, samples)

    def _run(self, batch: Batch, passes: int, keep: Tensor, sizes: Tensor, expected: list[Tensor | None]) -> Outputs:
        """Forward and backward passes for samples that were kept with these probabilities."""
        outputs = self._method.forward(batch)
        logits = [one for one in expected if one is not None]
        if logits and not self._compared:
            self._compared = True
            if not _nearly_same(outputs.logits.detach(), torch.cat(logits)):
                advice = "Use passes=None, which leaves batches as they are, and see nm.check."
                got = "logits that change with the other samples of a batch"
                raise ValueError(message("model", "one that treats samples alike in every batch", got, advice))
        weights = (sizes / keep).square()
        mean = float((keep * weights).sum() / weights.sum()) if float(weights.sum()) else 1.0
        self._method.backward(outputs, self._sums, several(passes), keep, mean)
        self._method.end_batch(batch)
        self._sums.synchronize()
        return outputs.detached()

    def _budget(self, window: list[_Scored]) -> float:
        """Forward passes of samples that are left when all outputs have been computed."""
        return (3 * self._estimator.cost - 1) * sum(one.samples for one in window)

    def _scored(self, batch: Batch, outputs: Outputs) -> _Scored:
        """Reduce outputs to what scores are made of."""
        core = self._problem.distributions(outputs, self._method.validation, labels=False).core
        single = outputs.logits.ndim == 2
        trace, norm = (outputs.per_sample(values.detach().double()) for values in (core.trace(), core.squared_norm()))
        return _Scored(batch, trace, norm, core.rank, outputs.logits.detach() if single else None)

    def _scores(self, window: list[_Scored]) -> Scores:
        logits = [one.logits for one in window if one.logits is not None]
        trace, norm = (torch.cat([one[i] for one in window]) for i in (1, 2))  # type: ignore[misc]

        def core_of(rows: Tensor) -> Core:
            values = torch.cat(logits)
            return self._problem.likelihood(values[rows.to(values.device)])

        alike = len({one.shape[1:] for one in logits}) == 1
        return score(trace, norm, window[0].rank, core_of if alike else None, self._budget(window))


def _nearly_same(found: Tensor, expected: Tensor) -> bool:
    """Whether these are the same samples' logits; they may be rounded like bfloat16."""
    if found.shape != expected.shape:
        return False
    spread = (expected - expected.mean(0)).double().square().sum()
    return bool((found - expected).double().square().sum() <= 0.01 * spread + 1e-5 * expected.double().square().sum())
