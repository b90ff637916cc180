"""Adaptive passes: passes for the samples that are worth them, in windows of some batches.

for each window of batches
    outputs of its first batch                      captured; the scores of its samples decide (estimators/adaptive.py)
    alike                                           backward follows for each batch, with equal passes for all samples
    everyone                                        backward follows for each batch; noisy samples send an eigenvector,
                                                    and are regrouped for the passes that are left to them
    chosen                                          outputs of all batches first, without a graph, for scores alone;
                                                    then those that are kept are regrouped by their numbers of passes
Regrouped samples: forward, and as many backward passes as are best for the group.

All random numbers of a window follow from the seed and the numbers of its batches.  No more than one graph is held.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor

from neuromanifold.core import Core
from neuromanifold.core.checks import message
from neuromanifold.estimators import Apart
from neuromanifold.estimators.adaptive import (
    Adaptive,
    AfterFirst,
    chosen,
    groups,
    in_full_groups,
    several,
    strategy,
)
from neuromanifold.estimators.allocation import (
    Allocation,
    Scores,
    allocate,
    allocate_to_everyone,
    score,
    score_everyone,
    several_passes,
)
from neuromanifold.estimators.base import random_signs
from neuromanifold.persample.accumulate import GradientSums
from neuromanifold.problem.batches import Batch, SomeSamples, Taken, gather, kind_of
from neuromanifold.problem.cotangents import weighted, with_eigenvectors
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


class _Noisy(NamedTuple):
    """Samples of a batch whose leading eigenvectors have been sent back, and what their further passes need."""

    taken: Taken
    kind: object
    scores: Scores
    logits: Tensor  # [k, C], from which all their passes are made


class AdaptiveSteps:
    """Takes the batches of a window together."""

    def __init__(self, method: Method, sums: GradientSums, counts: Counts) -> None:
        assert isinstance(method.settings.estimator, Adaptive)
        self._method, self._problem, self._estimator = method, method.problem, method.settings.estimator
        self._sums, self._counts = sums, counts
        self._compared = False  # whether regrouped samples have the logits that they had before

    def __call__(self, batches: Iterator[Batch]) -> Iterator[tuple[Batch, Outputs]]:
        """Return each batch with its outputs; at the end of these, all passes of the window are done."""
        first = next(batches)
        outputs = self._method.forward(first)
        ahead, regroups = self._regroups(first, outputs.detached(), batches)
        rest = chain(ahead, batches)
        if self._estimator.cost < 1 and regroups is False:
            advice = "Use passes=1 or more: then batches are left as they are."
            got = "batches that cannot be split, or samples that influence each other"
            raise ValueError(message("passes", "at least 1 for this model and these data", got, advice))
        scored = self._scored(first, outputs)
        scores = self._scores([scored])
        everyone = self._scores_of_everyone(scored)
        how = strategy(self._estimator, scores, everyone) if regroups else "alike"
        if how == "chosen":
            return self._by_scores(scored, [first, *rest], outputs)
        if how == "everyone":
            return self._everyone(scored, everyone, rest, outputs)
        equal = self._at_random if self._estimator.cost < 1 else self._alike
        return equal(scores, chain([first], rest), outputs)

    def _regroups(self, first: Batch, outputs: Outputs, rest: Iterator[Batch]) -> tuple[list[Batch], bool | None]:
        """Batches that were read, and whether samples can be taken out of them and joined to others.

        None if no batch has several.  Asked for each window, so that it does not depend on where a shard or a resumed
        run begins.
        """
        batch, ahead = first, list[Batch]()
        while self._problem.samples_of(batch, outputs) <= 1:
            following = next(rest, None)
            if following is None:
                return ahead, None
            ahead.append(batch := following)
        found = outputs if batch is first else self._problem.outputs(batch)
        return ahead, samples_influence_each_other(self._problem, batch, found) is False

    def _alike(self, scores: Scores, batches: Iterator[Batch], outputs: Outputs) -> Iterator[tuple[Batch, Outputs]]:
        """Equal numbers of passes for all samples; `scores` are those of the first batch, for the others, too."""
        for i, batch in enumerate(batches):
            outputs = self._method.forward(batch) if i else outputs
            self._method.complete(batch, outputs, self._sums, self._estimator.alike(batch.number))
            self._sums.synchronize()
            self._note_noise(scores, self._estimator.allocation(len(scores.trace)))
            yield batch, outputs.detached()

    # --------------------------------------------------------------------------------------------- everyone is kept

    def _everyone(
        self, scored: _Scored, scores: Scores, rest: Iterator[Batch], outputs: Outputs
    ) -> Iterator[tuple[Batch, Outputs]]:
        """One pass for each sample of each batch, and further ones for the noisy samples of the window.

        Which samples are noisy follows from the outputs of their batch and of those before it.
        """
        noisy, seen, budget, size = list[_Noisy](), list[Scores](), 0.0, 1
        for batch in chain([scored.batch], rest):
            if batch is not scored.batch:
                outputs = self._method.forward(batch)
                scored = self._scored(batch, outputs)
                scores = self._scores_of_everyone(scored)
            size, budget = max(size, scored.samples), budget + self._extra_budget(scored.samples)
            spent = 3 * sum(len(one.logits) for one in noisy)
            rows, passes = _worth_more(scores, seen, budget, budget - spent)
            self._method.seed(batch.number)
            drawn = self._method.cotangents(outputs, several(1))
            if len(rows):
                assert scored.logits is not None
                own, logits = scores.of(rows), scored.logits[rows.to(scored.logits.device)]
                drawn = with_eigenvectors(drawn, *self._eigenvectors(logits, rows, own, passes, scored.samples))
                noisy.append(self._noisy(scored, rows, own, logits))
            self._method.send(outputs, drawn, self._sums)
            self._method.end_batch(batch)
            self._sums.synchronize()
            quiet = _others(rows, scored.samples)
            self._note_noise(scores.of(quiet), several_passes(len(quiet), 1))
            outputs = outputs.detached()
            del drawn  # and with it the graph
            yield batch, outputs
        for kind in dict.fromkeys(one.kind for one in noisy):
            some = [one for one in noisy if one.kind == kind]
            share = sum(len(one.logits) for one in some) / sum(len(one.logits) for one in noisy)
            self._further_passes(some, share * budget, size)

    def _eigenvectors(
        self, logits: Tensor, rows: Tensor, scores: Scores, passes: Tensor, samples: int
    ) -> tuple[Tensor, Apart]:
        """±√λ₁v₁ [k, C] of noisy samples, and how noisy their squares are taken for: as `Hutchinson.pass_noise`."""
        core = self._problem.likelihood(logits)
        columns = core.spectrum(1).factor()[:, 0] * random_signs(core, 1, self._method.generator)
        relative = float(2 * scores.at(passes).sum() / scores.fisher.sum())
        return columns, Apart(rows, _others(rows, samples), relative)

    def _noisy(self, scored: _Scored, rows: Tensor, scores: Scores, logits: Tensor) -> _Noisy:
        """Take noisy samples out of their batch."""
        dim = self._problem.batch_dim
        kind = kind_of(scored.batch, scored.samples, dim), scored.rank
        return _Noisy(SomeSamples(scored.batch, scored.samples, rows).taken(dim), kind, scores, logits)

    def _further_passes(self, noisy: list[_Noisy], budget: float, size: int) -> None:
        """Regroup noisy samples, and make their passes but the first, for so many forward passes altogether."""
        scores, logits = Scores.joined([one.scores for one in noisy]), torch.cat([one.logits for one in noisy])
        together = noisy[0].taken._replace(batch=gather([one.taken for one in noisy]))
        allocation = allocate_to_everyone(scores, budget, least=1)
        order = allocation.passes.argsort(descending=True, stable=True)
        for group in torch.split(order, groups(allocation.passes[order], size)):
            rows = group.sort().values
            noise = scores.noise[rows, 1:].sum(0) + allocation.price * len(rows) * scores.passes[1:]
            passes = int(scores.passes[1:][noise.argmin()])
            expected = logits[rows.to(logits.device)]
            batch = together.only(rows)
            outputs = self._forward(batch, [expected])
            drawn = self._method.cotangents(outputs._replace(logits=expected), AfterFirst(passes))
            self._method.send(outputs, drawn, self._sums)
            self._method.end_batch(batch)
            self._sums.synchronize()
            self._note_noise(scores.of(rows), several_passes(len(rows), passes))

    # ------------------------------------------------------------------------------------------ a choice of samples

    def _by_scores(self, scored: _Scored, batches: list[Batch], outputs: Outputs) -> Iterator[tuple[Batch, Outputs]]:
        """Outputs of all batches first; then passes for the samples that are worth them."""
        yield batches[0], outputs.detached()
        self._method.release()  # the graph of the first is not needed
        window = [scored]
        for batch in batches[1:]:
            more = self._problem.outputs(batch)
            window.append(self._scored(batch, more))
            yield batch, more
        self._method.seed(batches[0].number)
        scores = self._scores(window)
        allocation = allocate(scores, self._budget(window))
        kinds = [kind_of(one.batch, one.samples, self._problem.batch_dim) for one in window]
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
        parts, expected = list[Taken](), list[Tensor | None]()
        for start, stop, one in zip(bounds, bounds[1:], window, strict=False):
            rows = group[(group >= start) & (group < stop)] - start
            if len(rows):
                parts.append(SomeSamples(one.batch, one.samples, rows).taken(self._problem.batch_dim))
                expected.append(None if one.logits is None else one.logits[rows.to(one.logits.device)])
        self._run(gather(parts), passes, keep, scores.trace[group], expected)
        self._note_noise(scores.of(group), several_passes(len(group), passes)._replace(keep=keep))

    def _note_noise(self, scores: Scores, done: Allocation) -> None:
        """Add the predicted variance of samples that were kept, and the bound that their standard errors are."""
        variance, keep = 2 * scores.at(done.passes), done.keep
        bound = torch.where(done.passes <= 1, 2 * scores.trace.square(), variance)
        missed = (1 - keep) * (scores.fisher + variance)
        noise, bounded = (float(((keep * one + missed) / keep.square()).sum()) for one in (variance, bound))
        self._counts.add_noise_shares((noise, bounded))

    def _at_random(self, scores: Scores, batches: Iterator[Batch], outputs: Outputs) -> Iterator[tuple[Batch, Outputs]]:
        """Samples of each batch at random, which are as good as any other if all are alike."""
        first = outputs.detached()
        self._method.release()
        for batch in batches:
            self._note_noise(scores, self._estimator.allocation(len(scores.trace)))
            self._method.seed(batch.number)
            samples = self._problem.samples_of(batch, first)
            keep = torch.full((samples,), self._estimator.cost, dtype=torch.float64)
            rows = chosen(keep, self._method.generator)
            self._counts.leave_out(samples - len(rows))
            if len(rows):
                part = SomeSamples(batch, samples, rows).taken(self._problem.batch_dim).batch
                first = self._run(part, 1, keep[rows], torch.ones(len(rows)), [])
            elif first.logits.ndim > 2:  # the number of positions is not known
                first = self._problem.outputs(batch)
            yield batch, self._problem.outputs_like(first, batch, samples)

    def _run(self, batch: Batch, passes: int, keep: Tensor, sizes: Tensor, expected: list[Tensor | None]) -> Outputs:
        """Forward and backward passes for samples that were kept with these probabilities."""
        outputs = self._forward(batch, [one for one in expected if one is not None])
        weights = (sizes / keep).square()
        mean = float((keep * weights).sum() / weights.sum()) if float(weights.sum()) else 1.0
        self._method.send(outputs, weighted(self._method.cotangents(outputs, several(passes)), keep, mean), self._sums)
        self._method.end_batch(batch)
        self._sums.synchronize()
        return outputs.detached()

    # ------------------------------------------------------------------------------------------------------- scores

    def _forward(self, batch: Batch, expected: list[Tensor]) -> Outputs:
        """Run the model on regrouped samples; the first time, compare with the logits that they had before."""
        outputs = self._method.forward(batch)
        if expected and not self._compared:
            self._compared = True
            if not _nearly_same(outputs.logits.detach(), torch.cat(expected)):
                advice = "Use passes=None, which leaves batches as they are, and see nm.check."
                got = "logits that change with the other samples of a batch"
                raise ValueError(message("model", "one that treats samples alike in every batch", got, advice))
        return outputs

    def _budget(self, window: list[_Scored]) -> float:
        """Forward passes of samples that are left when all outputs have been computed."""
        return (3 * self._estimator.cost - 1) * sum(one.samples for one in window)

    def _scored(self, batch: Batch, outputs: Outputs) -> _Scored:
        """Reduce outputs to what scores are made of."""
        core = self._problem.distributions(outputs, self._method.validation, labels=False).core
        single = outputs.logits.ndim == 2
        trace, norm = (outputs.per_sample(values.detach().double()) for values in (core.trace(), core.squared_norm()))
        return _Scored(batch, trace, norm, core.rank, outputs.logits.detach() if single else None)

    def _extra_budget(self, samples: int) -> float:
        """Forward passes of samples that are left when all samples have had one pass."""
        return 3 * (self._estimator.cost - 1) * samples

    def _scores(self, window: list[_Scored]) -> Scores:
        logits = [one.logits for one in window if one.logits is not None]
        trace, norm = (torch.cat([one[i] for one in window]) for i in (1, 2))  # type: ignore[misc]

        def core_of(rows: Tensor) -> Core:
            values = torch.cat(logits)
            return self._problem.likelihood(values[rows.to(values.device)])

        alike = len({one.shape[1:] for one in logits}) == 1
        return score(trace, norm, window[0].rank, core_of if alike else None, self._budget(window))

    def _scores_of_everyone(self, one: _Scored) -> Scores:
        logits = one.logits

        def core_of(rows: Tensor) -> Core:
            assert logits is not None
            return self._problem.likelihood(logits[rows.to(logits.device)])

        given = None if logits is None else core_of
        return score_everyone(one.trace, one.squared_norm, one.rank, given, self._extra_budget(one.samples))


def _worth_more(scores: Scores, before: list[Scores], budget: float, left: float) -> tuple[Tensor, Tensor]:
    """Samples of a batch that are worth further passes, and how many passes, given the scores of batches before it.

    `budget`: forward passes for further passes in all of these batches, of which so many are left.  The candidates of
    the batch are added to those before it.
    """
    candidates = (scores.noise[:, -1] < scores.noise[:, 0]).nonzero()[:, 0]
    before.append(scores.of(candidates))
    alike = [one for one in before if len(one.passes) == len(scores.passes)]
    passes = allocate_to_everyone(Scores.joined(alike), budget).passes[-len(candidates) :]
    noise = scores.noise[candidates, 0]
    most = torch.where(passes[: len(candidates)] > 1, noise, -1).topk(min(len(candidates), max(0, int(left / 3))))
    best = most.indices[most.values >= 0].sort().values
    return candidates[best], passes[best]


def _others(rows: Tensor, samples: int) -> Tensor:
    """Which samples are not among these rows."""
    return torch.ones(samples, dtype=torch.bool).index_fill_(0, rows, False).nonzero()[:, 0]


def _nearly_same(found: Tensor, expected: Tensor) -> bool:
    """Whether these are the same samples' logits; they may be rounded like bfloat16."""
    if found.shape != expected.shape:
        return False
    spread = (expected - expected.mean(0)).double().square().sum()
    return bool((found - expected).double().square().sum() <= 0.01 * spread + 1e-5 * expected.double().square().sum())
