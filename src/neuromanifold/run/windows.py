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
from neuromanifold.estimators.adaptive import Adaptive, Plan, chosen, in_full_groups, plan, several
from neuromanifold.estimators.allocation import Allocation, Scores, allocate, among_the_best, best_rows
from neuromanifold.estimators.base import signs
from neuromanifold.estimators.choices import Choices
from neuromanifold.persample.accumulate import GradientSums
from neuromanifold.problem.batches import Batch, SomeSamples, Taken, gather, kind_of
from neuromanifold.problem.cotangents import Cotangent, weighted
from neuromanifold.problem.outputs import Outputs
from neuromanifold.problem.suspicions import samples_influence_each_other
from neuromanifold.run.counts import Counts
from neuromanifold.run.methods import Method

_NOISE = NoiseFactors(batch=Hutchinson.noise_factor)  # of columns: their signs are random, which only a sum shows


class _Seen(NamedTuple):
    """A batch with what scores need of its outputs, on the device."""

    batch: Batch
    trace: Tensor  # [B] tr M, over all positions of a sample
    squared_norm: Tensor  # [B] ‖M‖²
    rank: int
    logits: Tensor | None  # [B, C], if a sample has a single output distribution
    choices: Choices | None  # of the same

    @property
    def samples(self) -> int:
        return len(self.trace)


class _Columns(NamedTuple):
    """Columns ±u_k of some samples of a batch, which have rows of their own."""

    taken: Taken
    kind: object
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
        scores, _ = self._scores([seen])
        how, base = plan(self._estimator, scores) if regroups else Plan("alike")
        if how == "chosen":
            return self._by_scores(seen, [first, *rest], outputs)
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
        return ahead, samples_influence_each_other(self._problem, batch, found) is False

    def _alike(self, scores: Scores, batches: Iterator[Batch], outputs: Outputs) -> Iterator[tuple[Batch, Outputs]]:
        """Equal numbers of passes for all samples; `scores` are those of the first batch, for the others, too."""
        passes = self._estimator.mean_passes
        noise = scores.with_passes(passes)
        for i, batch in enumerate(batches):
            outputs = self._method.forward(batch) if i else outputs
            self._method.complete(batch, outputs, self._sums, self._estimator.alike(batch.number))
            self._sums.synchronize()
            self._note_noise(noise, scores.trace.square() if passes <= 1 else noise)
            yield batch, outputs.detached()

    # --------------------------------------------------------------------------------------------- everyone is kept

    def _everyone(
        self, seen: _Seen, rest: Iterator[Batch], outputs: Outputs, base: int
    ) -> Iterator[tuple[Batch, Outputs]]:
        """`base` passes for each sample of each batch, and rows for eigenvectors of the noisy samples of the window.

        Which these are follows from the outputs of their batch and of those before it.
        """
        before, later, samples, size = list[Tensor](), list[_Columns](), 0, 1
        for batch in chain([seen.batch], rest):
            if batch is not seen.batch:
                outputs = self._method.forward(batch)
                seen = self._see(batch, outputs)
            size, samples = max(size, seen.samples), samples + seen.samples
            scores, choices = self._scores([seen])
            passes = min(base, max(1, scores.gains.shape[1]))
            before.append(scores.gains[:, passes - 1 :].flatten())
            rows = self._estimator.rows(samples, base)
            wanted, left = among_the_best(before, rows), rows - sum(len(one.owner) for one in later)
            own = torch.where(scores.trace > 0, best_rows(scores.gains, min(wanted, left), passes - 1), 0)
            self._method.seed(batch.number)
            self._send(batch, outputs, self._passes(outputs, seen, choices, own, passes, later))
            self._note_allocation(scores, Allocation(torch.ones_like(scores.trace), own))
            outputs = outputs.detached()
            yield batch, outputs
        self._send_columns(later, size)

    def _passes(
        self, outputs: Outputs, seen: _Seen, choices: Choices | None, own: Tensor, passes: int, later: list[_Columns]
    ) -> Iterator[Cotangent]:
        """The passes of a batch: columns, and a probe of what is left; columns beyond these are for later."""
        drawn, rows = self._method.cotangents(outputs, several(1)), own.nonzero()[:, 0]
        if choices is not None and len(rows):
            some = choices.only(rows)
            columns = some.columns()
            for i in range(passes - 1):
                zeros = torch.zeros_like(outputs.logits.detach())
                yield Cotangent(_with_rows(zeros, rows, self._signed(columns[:, i])), _NOISE, passes - i)
            later.extend(self._columns(seen, rows, columns, own[rows], passes - 1))
            drawn = self._without(drawn, rows, some, columns, own[rows])
        yield from drawn

    # ------------------------------------------------------------------------------------------ a choice of samples

    def _by_scores(self, seen: _Seen, batches: list[Batch], outputs: Outputs) -> Iterator[tuple[Batch, Outputs]]:
        """Outputs of all batches first; then rows for the samples that are worth them."""
        yield batches[0], outputs.detached()
        self._method.release()  # the graph of the first is not needed
        window = [seen]
        for batch in batches[1:]:
            more = self._problem.outputs(batch)
            window.append(self._see(batch, more))
            yield batch, more
        self._method.seed(batches[0].number)
        starts = list(accumulate((one.samples for one in window), initial=0))
        budget, size = (self._estimator.cost - 1 / 3) * starts[-1], max(1, *(one.samples for one in window))
        scores, choices = self._scores(window)
        allocation = allocate(scores, budget)
        kinds = [kind_of(one.batch, one.samples, self._problem.batch_dim) for one in window]
        if len(set(kinds)) == 1:
            allocation = allocation._replace(keep=in_full_groups(allocation.keep, size, self._method.generator))
        kept = chosen(allocation.keep, self._method.generator)
        left_out = allocation.own == 0
        left_out[kept] = False
        self._counts.leave_out(int(left_out.sum()))
        self._note_allocation(scores.only(kept), allocation.only(kept))
        later = list[_Columns]()
        for start, stop, one in zip(starts, starts[1:], window, strict=False):
            rows = allocation.own[start:stop].nonzero()[:, 0]
            if choices is not None and len(rows):
                columns = choices.only(start + rows).columns()
                later.extend(self._columns(one, rows, columns, allocation.own[start + rows]))
        owner = torch.repeat_interleave(torch.tensor([one.samples for one in window]))  # the batch of each sample
        for kind in dict.fromkeys(kinds):
            numbers = [b for b, other in enumerate(kinds) if other == kind]
            own = kept[torch.isin(owner[kept], torch.tensor(numbers))]
            certain = allocation.keep[own] >= 1  # apart from the others: a group has one constant for its noise
            for group in (*torch.split(own[certain], size), *torch.split(own[~certain], size)):
                if len(group):
                    self._run_group(group, scores, allocation, window, choices)
        self._send_columns(later, size)

    def _run_group(
        self, group: Tensor, scores: Scores, allocation: Allocation, window: list[_Seen], choices: Choices | None
    ) -> None:
        """A batch of some samples of a window, in the order of the data, with a probe for each."""
        bounds = torch.tensor([0, *(one.samples for one in window)]).cumsum(0)
        parts, expected = list[Taken](), list[Tensor]()
        for start, stop, one in zip(bounds, bounds[1:], window, strict=False):
            rows = group[(group >= start) & (group < stop)] - start
            if len(rows):
                parts.append(SomeSamples(one.batch, one.samples, rows).taken(self._problem.batch_dim))
                expected.extend([] if one.logits is None else [one.logits[rows.to(one.logits.device)]])
        batch, own = gather(parts), allocation.own[group]
        outputs = self._forward(batch, expected)
        drawn, rows = self._method.cotangents(outputs, several(1)), own.nonzero()[:, 0]
        if choices is not None and len(rows):
            some = choices.only(group[rows])
            drawn = self._without(drawn, rows, some, some.columns(), own[rows])
        self._send_weighted(batch, outputs, drawn, allocation.keep[group], allocation.rest(scores)[group])

    def _at_random(self, scores: Scores, batches: Iterator[Batch], outputs: Outputs) -> Iterator[tuple[Batch, Outputs]]:
        """Samples of each batch at random, which are as good as any other if all are alike."""
        first = outputs.detached()
        self._method.release()
        for batch in batches:
            allocation = Allocation.alike(len(scores.trace), self._estimator.cost)
            self._note_noise(allocation.noise(scores), scores.trace.square(), allocation.keep)
            self._method.seed(batch.number)
            samples = self._problem.samples_of(batch, first)
            keep = torch.full((samples,), self._estimator.cost, dtype=torch.float64)
            rows = chosen(keep, self._method.generator)
            self._counts.leave_out(samples - len(rows))
            if len(rows):
                part = SomeSamples(batch, samples, rows).taken(self._problem.batch_dim).batch
                outputs = self._method.forward(part)
                first = outputs.detached()
                drawn = self._method.cotangents(outputs, several(1))
                self._send_weighted(part, outputs, drawn, keep[rows], torch.ones(len(rows)))
            elif first.logits.ndim > 2:  # the number of positions is not known
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
        self, drawn: Iterator[Cotangent], rows: Tensor, choices: Choices, columns: Tensor, own: Tensor
    ) -> Iterator[Cotangent]:
        """Cotangents of single passes in which these samples have probes without their first columns."""
        for one in drawn:
            probes = choices.probe(columns, own, self._method.generator)
            yield one._replace(values=_with_rows(one.values, rows, probes))

    def _columns(self, seen: _Seen, rows: Tensor, columns: Tensor, own: Tensor, sent: int = 0) -> list[_Columns]:
        """The first columns [n, k, C] of samples of a batch that have not been sent, if there are any."""
        index = torch.arange(columns.shape[1])
        owner, k = ((index >= sent) & (index < own[:, None])).nonzero().unbind(1)
        if not len(owner) or seen.logits is None:
            return []
        dim, device = self._problem.batch_dim, columns.device
        taken = SomeSamples(seen.batch, seen.samples, rows).taken(dim)
        kind = kind_of(seen.batch, seen.samples, dim), columns.shape[-1]
        values = self._signed(columns[owner.to(device), k.to(device)])
        return [_Columns(taken, kind, seen.logits[rows.to(device)], owner, values)]

    def _send_columns(self, columns: list[_Columns], size: int) -> None:
        """Rows of columns in full batches of samples of the same kind."""
        for kind in dict.fromkeys(one.kind for one in columns):
            parts = [one for one in columns if one.kind == kind]
            starts = accumulate((len(one.logits) for one in parts), initial=0)
            owner = torch.cat([start + one.owner for start, one in zip(starts, parts, strict=False)])
            together = parts[0].taken._replace(batch=gather([one.taken for one in parts]))
            logits, values = torch.cat([one.logits for one in parts]), torch.cat([one.values for one in parts])
            for group in torch.split(torch.arange(len(owner)), size):
                batch = together.only(owner[group])
                outputs = self._forward(batch, [logits[owner[group].to(logits.device)]])
                cotangent = values[group.to(values.device)].to(outputs.logits.dtype)
                self._send(batch, outputs, iter([Cotangent(cotangent, _NOISE, 1)]))

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
        """Reduce outputs to what scores are made of."""
        core = self._problem.distributions(outputs, self._method.validation, labels=False).core
        trace, norm = (outputs.per_sample(values.detach().double()) for values in (core.trace(), core.squared_norm()))
        if outputs.logits.ndim > 2:  # no number of passes makes a sum over positions exact
            return _Seen(batch, trace, norm, 2**30, None, None)
        return _Seen(batch, trace, norm, core.rank, outputs.logits.detach(), Choices.of(core))

    def _scores(self, window: list[_Seen]) -> tuple[Scores, Choices | None]:
        """The scores of batches, all read back from a GPU at once, and the columns of their samples, if known."""
        trace, norm = torch.cat([one.trace for one in window]), torch.cat([one.squared_norm for one in window])
        choices = Choices.joined([one.choices for one in window])
        if choices is None:
            noise = (trace.square() - norm).clamp(min=0)
            parts = torch.stack([trace, norm, trace, noise]).cpu()
            return Scores(parts[0], parts[1], parts[2][:, None], parts[3][:, None], window[0].rank), None
        rest, noise = (torch.where(trace[:, None] > 0, part, 0.0) for part in choices.left())
        parts = torch.cat([trace[:, None], norm[:, None], rest, noise], 1).cpu()
        known = rest.shape[1]
        return Scores(parts[:, 0], parts[:, 1], parts[:, 2 : 2 + known], parts[:, 2 + known :], window[0].rank), choices

    def _note_allocation(self, scores: Scores, done: Allocation) -> None:
        self._note_noise(done.noise(scores), done.rest(scores).square(), done.keep)

    def _note_noise(self, noise: Tensor, bound: Tensor, keep: Tensor | float = 1.0) -> None:
        """Add the predicted variance 2S² of samples that were kept, and the bound that their standard errors are."""
        variance, pi = 2 * noise, torch.as_tensor(keep, dtype=torch.float64)
        missed = 3 * (1 - pi) * bound
        found, bounded = (float(((pi * one + missed) / pi.square()).sum()) for one in (variance, 2 * bound))
        self._counts.add_noise_shares((found, bounded))


def _with_rows(values: Tensor, rows: Tensor, others: Tensor) -> Tensor:
    """The cotangents [B, C] with others in some rows."""
    return values.index_copy(0, rows.to(values.device), others.to(values.dtype))


def _nearly_same(found: Tensor, expected: Tensor) -> bool:
    """Whether these are the same samples' logits; they may be rounded like bfloat16."""
    if found.shape != expected.shape:
        return False
    spread = (expected - expected.mean(0)).double().square().sum()
    return bool((found - expected).double().square().sum() <= 0.01 * spread + 1e-5 * expected.double().square().sum())
