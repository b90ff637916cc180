"""Adaptive passes: rows for the samples that are worth them, in windows of some batches.

A row is a sample in a batch, with a cotangent of its own (estimators/allocation.py).

for each window of batches
    outputs of its first batch                      captured; the scores of its samples decide (estimators/adaptive.py)
    alike                                           backward follows for each batch, with equal passes for all samples
    everyone                                        backward follows for each batch; columns that probes of noisy
                                                    samples are without have rows of their own, at the end
    chosen                                          outputs of all batches first, without a graph, for scores alone;
                                                    then rows with probes of those that are kept, and rows of columns
Rows are taken from batches of the same kind and make full batches: forward, and a single backward pass.

All random numbers of a window follow from the seed and the numbers of its batches.  No more than one graph is held.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate, chain
from typing import NamedTuple

import torch
from torch import Tensor

from neuromanifold.core.checks import message
from neuromanifold.estimators import Hutchinson, NoiseFactors
from neuromanifold.estimators.adaptive import Adaptive, Strategy, chosen, in_full_groups, several, strategy
from neuromanifold.estimators.allocation import Allocation, RowsSoFar, Scores, allocate
from neuromanifold.estimators.base import signs
from neuromanifold.estimators.choices import Choices
from neuromanifold.persample.accumulate import GradientSums
from neuromanifold.problem.batches import Batch, SomeSamples, Taken, dims_of, gather, kind_of
from neuromanifold.problem.cotangents import Cotangent, weighted
from neuromanifold.problem.outputs import Outputs
from neuromanifold.problem.suspicions import samples_influence_each_other
from neuromanifold.run.counts import Counts
from neuromanifold.run.methods import Method

_NOISE = NoiseFactors(batch=Hutchinson.noise_factor)  # of columns: their signs are random, which only a sum shows


class _Seen(NamedTuple):
    """A batch with what scores need of its outputs, on the device."""

    batch: Batch
    scores: Scores
    logits: Tensor | None  # [B, C], if a sample has a single output distribution
    choices: Choices | None  # of the same

    @property
    def samples(self) -> int:
        return len(self.scores.trace)

    def kind(self, batch_dim: int) -> object:
        """A value that is equal for batches whose samples can be joined, and have as many classes."""
        return kind_of(self.batch, self.samples, batch_dim), None if self.logits is None else self.logits.shape[1:]


class _Columns(NamedTuple):
    """Columns ±u_k of some samples of a batch, which have rows of their own."""

    taken: Taken
    kind: object
    samples: int  # of the whole batch
    logits: Tensor  # [k, C] of these samples
    owner: Tensor  # [r] which of them each column is of
    values: Tensor  # [r, C]


class AdaptiveSteps:
    """Takes the batches of a window together."""

    def __init__(self, method: Method, sums: GradientSums, counts: Counts) -> None:
        assert isinstance(method.settings.estimator, Adaptive)
        self._method, self._problem, self._estimator = method, method.problem, method.settings.estimator
        self._sums, self._counts = sums, counts
        self._compared = False  # whether samples in rows have the logits that they had before
        self._dims = list[int | None]()  # which hold the samples, in the batch that was split to see whether it can be

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
        seen = self._see(first, outputs)
        scores = Scores.joined([seen.scores])
        how, base = strategy(self._estimator, scores) if regroups else Strategy("alike")
        if how == "chosen":
            return self._by_scores(seen, [first, *rest], outputs.detached())
        if how == "everyone":
            return self._everyone(seen, rest, outputs, base)
        equal = self._at_random if self._estimator.cost < 1 else self._alike
        return equal(scores, chain([first], rest), outputs)

    def _regroups(self, first: Batch, outputs: Outputs, rest: Iterator[Batch]) -> tuple[list[Batch], bool | None]:
        """Return batches that were read on the way, and whether samples can be taken out of them and joined to others.

        None instead if no batch has several samples.  Asked for each window, so that it does not depend on where a
        shard or a resumed run begins.
        """
        batch, ahead = first, list[Batch]()
        while self._problem.samples_of(batch, outputs) <= 1:
            following = next(rest, None)
            if following is None:
                return ahead, None
            ahead.append(batch := following)
        found = outputs if batch is first else self._problem.outputs(batch)
        self._dims = dims_of(batch, self._problem.samples_of(batch, found), self._problem.batch_dim)
        return ahead, samples_influence_each_other(self._problem, batch, found) is False

    def _taken(self, batch: Batch, samples: int, rows: Tensor) -> Taken:
        """Cut samples out of a batch; where they seem to lie in other dimensions, it is first split on trial."""
        taken = SomeSamples(batch, samples, rows).taken(self._problem.batch_dim)
        unlike = samples > 1 and taken.dims != self._dims
        if unlike and samples_influence_each_other(self._problem, batch, self._problem.outputs(batch)) is not False:
            advice = "Use passes=None, which leaves batches as they are."
            got = f"batch {batch.number}, whose samples cannot be told from its other dimensions"
            raise ValueError(message("data", "batches that can be split as the first one", got, advice))
        return taken

    def _alike(self, scores: Scores, batches: Iterator[Batch], outputs: Outputs) -> Iterator[tuple[Batch, Outputs]]:
        """Equal numbers of passes for all samples; `scores` are those of the first batch, for the others, too."""
        passes = self._estimator.mean_passes
        variances = 2 * scores.with_passes(passes)
        fourths = 3 * scores.trace.square() if passes <= 1 else 1.5 * variances
        for i, batch in enumerate(batches):
            outputs = self._method.forward(batch) if i else outputs
            self._method.complete(batch, outputs, self._sums, self._estimator.alike(batch.number))
            self._sums.synchronize()
            self._note_noise(variances, fourths)
            yield batch, outputs.detached()

    # --------------------------------------------------------------------------------------------- everyone is kept

    def _everyone(
        self, seen: _Seen, rest: Iterator[Batch], outputs: Outputs, base: int
    ) -> Iterator[tuple[Batch, Outputs]]:
        """`base` passes for each sample of each batch, and rows for columns of the noisy samples of the window.

        Which these are follows from the outputs of their batch and of those before it, and is read back at the end.
        """
        window, spent = list[tuple[_Seen, Tensor, int]](), RowsSoFar()
        for batch in chain([seen.batch], rest):
            if batch is not seen.batch:
                outputs = self._method.forward(batch)
                seen = self._see(batch, outputs)
            passes = 1 if seen.choices is None else min(base, seen.choices.count)
            own = spent.best(seen.scores, self._estimator.rows(spent.samples + seen.samples, base), passes - 1)
            window.append((seen, own, passes - 1))
            self._method.seed(batch.number)
            self._send(batch, outputs, self._passes(outputs, seen, own, passes))
            outputs = outputs.detached()
            yield batch, outputs
        later = list[_Columns]()
        for seen, own, sent in window:
            scores, done = Scores.joined([seen.scores]), own.cpu()
            self._note_allocation(scores, Allocation(torch.ones_like(scores.trace), done))
            later.extend(self._columns(seen, done, sent))
        self._send_columns(later)

    def _passes(self, outputs: Outputs, seen: _Seen, own: Tensor, passes: int) -> Iterator[Cotangent]:
        """The passes of a batch: its first columns, and a probe without those that have rows of their own, too."""
        drawn = self._method.cotangents(outputs, several(1))
        if seen.choices is None:
            yield from drawn
            return
        columns = seen.choices.columns()
        for i in range(passes - 1):
            values = torch.where(own[:, None] > i, self._signed(columns[:, i]), 0.0)
            yield Cotangent(values, _NOISE, passes - i)
        yield from self._without(drawn, seen.choices, columns, own)

    # ------------------------------------------------------------------------------------------ a choice of samples

    def _by_scores(self, seen: _Seen, batches: list[Batch], outputs: Outputs) -> Iterator[tuple[Batch, Outputs]]:
        """Outputs of all batches first; then rows for the samples that are worth them."""
        self._method.release()  # the graph of the first is not needed
        yield batches[0], outputs
        window = [seen]
        for batch in batches[1:]:
            more = self._problem.outputs(batch)
            window.append(self._see(batch, more))
            yield batch, more
        self._method.seed(batches[0].number)
        starts = list(accumulate((one.samples for one in window), initial=0))
        budget = (self._estimator.cost - 1 / 3) * starts[-1]
        scores = Scores.joined([one.scores for one in window])
        allocation = allocate(scores, budget)
        kinds = [one.kind(self._problem.batch_dim) for one in window]
        if len(set(kinds)) == 1:
            keep = in_full_groups(allocation.keep, max(one.samples for one in window), self._method.generator)
            allocation = allocation._replace(keep=keep)
        kept = chosen(allocation.keep, self._method.generator)
        left_out = allocation.own == 0
        left_out[kept] = False
        self._counts.leave_out(int(left_out.sum()))
        self._note_allocation(scores.only(kept), allocation.only(kept))
        later = list[_Columns]()
        for start, stop, one in zip(starts, starts[1:], window, strict=False):
            later.extend(self._columns(one, allocation.own[start:stop], 0))
        owner = torch.repeat_interleave(torch.tensor([one.samples for one in window]))  # the batch of each sample
        for kind in dict.fromkeys(kinds):
            numbers = [b for b, other in enumerate(kinds) if other == kind]
            size = max(1, *(window[b].samples for b in numbers))
            own = kept[torch.isin(owner[kept], torch.tensor(numbers))]
            certain = allocation.keep[own] >= 1  # apart from the others: a group has one constant for its noise
            for group in (*torch.split(own[certain], size), *torch.split(own[~certain], size)):
                if len(group):
                    self._run_group(group, scores, allocation, window)
        self._send_columns(later)

    def _run_group(self, group: Tensor, scores: Scores, allocation: Allocation, window: list[_Seen]) -> None:
        """A batch of some samples of a window, in the order of the data, with a probe for each."""
        bounds = torch.tensor([0, *(one.samples for one in window)]).cumsum(0)
        parts, expected, choices = list[Taken](), list[Tensor](), list[Choices | None]()
        for start, stop, one in zip(bounds, bounds[1:], window, strict=False):
            rows = group[(group >= start) & (group < stop)] - start
            if len(rows):
                parts.append(self._taken(one.batch, one.samples, rows))
                expected.extend([] if one.logits is None else [one.logits[rows.to(one.logits.device)]])
                choices.append(None if one.choices is None else one.choices.only(rows))
        batch, own, joined = gather(parts), allocation.own[group], Choices.joined(choices)
        outputs = self._forward(batch, expected)
        drawn = self._method.cotangents(outputs, several(1))
        if joined is not None and bool(own.any()):
            drawn = self._without(drawn, joined, joined.columns(), own)
        self._send_weighted(batch, outputs, drawn, allocation.keep[group], allocation.of(scores.rest)[group])

    def _at_random(self, scores: Scores, batches: Iterator[Batch], outputs: Outputs) -> Iterator[tuple[Batch, Outputs]]:
        """Samples of each batch at random, which are as good as any other if all are alike."""
        first = outputs = outputs.detached()  # the graph is not needed
        self._method.release()
        for batch in batches:
            self._note_allocation(scores, Allocation.alike(len(scores.trace), self._estimator.cost))
            self._method.seed(batch.number)
            samples = self._problem.samples_of(batch, first)
            keep = torch.full((samples,), self._estimator.cost, dtype=torch.float64)
            rows = chosen(keep, self._method.generator)
            self._counts.leave_out(samples - len(rows))
            if len(rows):
                part = self._taken(batch, samples, rows).batch
                outputs = self._method.forward(part)
                first = outputs.detached()
                drawn = self._method.cotangents(outputs, several(1))
                self._send_weighted(part, outputs, drawn, keep[rows], torch.ones(len(rows)))
            elif first.logits.ndim > 2 or not len(first.logits):  # the number of positions or classes is not known
                first = self._problem.outputs(batch)
            yield batch, self._problem.outputs_like(first, batch, samples)

    def _send_weighted(
        self, batch: Batch, outputs: Outputs, drawn: Iterator[Cotangent], keep: Tensor, sizes: Tensor
    ) -> None:
        """Send the probes of samples that were kept with these probabilities; their squares are about `sizes`."""
        weights = (sizes / keep).square()
        mean = float((keep * weights).sum() / weights.sum()) if float(weights.sum()) else 1.0
        self._send(batch, outputs, weighted(drawn, keep, mean))

    # ----------------------------------------------------------------------------------------------------- columns

    def _signed(self, columns: Tensor) -> Tensor:
        """±u [r, C], with a random sign for each: so that gradients of a whole batch can be squared."""
        return columns * signs((len(columns), 1), columns, self._method.generator)

    def _without(
        self, drawn: Iterator[Cotangent], choices: Choices, columns: Tensor, own: Tensor
    ) -> Iterator[Cotangent]:
        """Cotangents of single passes in which samples have probes without their first columns."""
        for one in drawn:
            on = own.to(one.values.device)
            probes = choices.probe(columns, on, self._method.generator)  # in float16, small ones would be zero
            yield one._replace(values=torch.where(on[:, None] > 0, probes, one.values.to(probes.dtype)))

    def _columns(self, seen: _Seen, own: Tensor, sent: int) -> list[_Columns]:
        """The first columns of samples of a batch that have not been sent, if there are any."""
        rows = (own > sent).nonzero()[:, 0]
        if not len(rows) or seen.choices is None or seen.logits is None:
            return []
        columns, device = seen.choices.only(rows).columns(), seen.logits.device
        index = torch.arange(columns.shape[1])
        owner, k = ((index >= sent) & (index < own[rows, None])).nonzero().unbind(1)
        taken = self._taken(seen.batch, seen.samples, rows)
        values = self._signed(columns[owner.to(device), k.to(device)])
        return [
            _Columns(
                taken, seen.kind(self._problem.batch_dim), seen.samples, seen.logits[rows.to(device)], owner, values
            )
        ]

    def _send_columns(self, columns: list[_Columns]) -> None:
        """Rows of columns in full batches of samples of the same kind, no larger than those that they are from."""
        for kind in dict.fromkeys(one.kind for one in columns):
            parts = [one for one in columns if one.kind == kind]
            starts = accumulate((len(one.logits) for one in parts), initial=0)
            owner = torch.cat([start + one.owner for start, one in zip(starts, parts, strict=False)])
            together = parts[0].taken._replace(batch=gather([one.taken for one in parts]))
            logits, values = torch.cat([one.logits for one in parts]), torch.cat([one.values for one in parts])
            for group in torch.split(torch.arange(len(owner)), max(one.samples for one in parts)):
                batch = together.only(owner[group])
                outputs = self._forward(batch, [logits[owner[group].to(logits.device)]])
                self._send(batch, outputs, iter([Cotangent(values[group.to(values.device)], _NOISE, 1)]))

    # ------------------------------------------------------------------------------------------------------- passes

    def _send(self, batch: Batch, outputs: Outputs, drawn: Iterator[Cotangent]) -> None:
        self._method.send(outputs, drawn, self._sums)
        self._method.end_batch(batch)
        self._sums.synchronize()

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

    # ------------------------------------------------------------------------------------------------------- scores

    def _see(self, batch: Batch, outputs: Outputs) -> _Seen:
        """Reduce outputs to what scores are made of; nothing is read back from a GPU."""
        core = self._problem.distributions(outputs, self._method.validation, labels=False).core
        trace, norm = (outputs.per_sample(values.detach().double()) for values in (core.trace(), core.squared_norm()))
        single = outputs.logits.ndim == 2
        choices = Choices.of(core) if single else None
        if choices is None:  # of a sum over positions, no number of passes is exact
            parts = [part[:, None] for part in (trace, norm, (trace.square() - norm).clamp(min=0))]
        else:
            parts = [torch.where(trace[:, None] > 0, part, 0.0) for part in choices.left()]
        scores = Scores(parts[0], parts[1], parts[2], core.rank if single else 2**30)
        return _Seen(batch, scores, outputs.logits.detach() if single else None, choices)

    def _note_allocation(self, scores: Scores, done: Allocation) -> None:
        self._note_noise(done.of(scores.variances), done.of(scores.fourths), done.keep)

    def _note_noise(self, variances: Tensor, fourths: Tensor, keep: Tensor | float = 1.0) -> None:
        """Add the predicted variance of probes that were kept, and (2/3) E[g⁴], which their standard errors are."""
        pi = torch.as_tensor(keep, dtype=torch.float64)
        found, bound = (
            float(((pi * one + (1 - pi) * fourths) / pi.square()).sum()) for one in (variances, fourths / 1.5)
        )
        self._counts.add_noise_shares((found, bound))


def _nearly_same(found: Tensor, expected: Tensor) -> bool:
    """Whether these are the same samples' logits; they may be rounded like bfloat16.

    Classes that are masked, by -inf or by -1e9, hide nothing: none is taken for less than the largest minus 100.
    """
    if found.shape != expected.shape:
        return False
    found, expected = (x.double().maximum(x.double().amax(-1, keepdim=True) - 100) for x in (found, expected))
    spread = (expected - expected.mean(0)).square().sum()
    return bool((found - expected).square().sum() <= 0.01 * spread + 1e-5 * expected.square().sum())
