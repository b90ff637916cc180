"""Accumulator for the diagonal: Σ g² of every entry, and Σ g⁴ for its standard error.

Or, for error bars of rows, one number for each row of a weight: Σ R², with R = Σ_k g_k² over a row's entries.  If the
squares of single entries have Var(g²) <= c E[g⁴], whatever the entry, then (1 - c) E[g⁴] <= E[g²]², and

    (1 - c) E[R²] = (1 - c) Σ_kl E[g_k² g_l²] <= (Σ_k √((1 - c) E[g_k⁴]))² <= (Σ_k E[g_k²])² = E[R]²

by Cauchy's inequality.  So Var R <= c E[R²]: the row's sum has the standard error √(c Σ R²), with its entries' own c.
"""

from __future__ import annotations

import functools
import math
import random
from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from neuromanifold.core.checks import promoted
from neuromanifold.persample.accumulate.base import Pass, Reducer, Tally, power_of_two_near, read_back, zero_sums
from neuromanifold.persample.accumulate.small import LIMIT, SmallSums
from neuromanifold.persample.accumulate.whole import add_whole, root_mean_squares
from neuromanifold.persample.gradients import Dense, Form, PowerSums, Product, SquaredProduct

_ALL_OF, _ONE_IN = 128, 4  # samples whose fourth powers are all taken; then those of one batch in so many
_LEAST_AFTER_ONE = 2.0**-20  # the smallest unit that follows after 1
_EVEN = 0.5  # of the samples must contribute to F, or all fourth powers are taken
_UNLIKE, _MANY = 4.0, 0.2  # where n v/F̂² is larger for so many entries of a parameter, all of its are taken
_EARLY = 8  # batches in which gradients may become much larger than before
_NUMBERS = (  # attributes that a checkpoint holds, under these names
    *("_units", "_seen", "_taken", "_batches", "_samples", "_of_batch", "_takes", "_changes", "_carried", "_sparse"),
)


class DiagonalSums:
    """Σ g² for each entry, and Σ c g⁴ for its error bar, in float32 or better whatever the model's precision.

    Fourth powers of small numbers underflow, so they are kept in units of a power of two near the root mean square of
    each parameter's first gradient; `noise` takes the unit out again.

    Beside fourth powers, squares that are not random have sums of their own: intervals are about the rest.
    """

    def __init__(self, parameters: Sequence[Tensor], fourth_powers: bool | Literal["rows"], alike: bool = True) -> None:
        """`fourth_powers`: of each entry, of the norms of a weight's rows, or none.

        `alike`: batches have about the same noise, so that the fourth powers of some of them are enough.
        """
        count = len(parameters)
        self._parameters = parameters
        self.fourth_powers, self._keeps_fourths, self._alike = fourth_powers, bool(fourth_powers), alike
        self._by_row = [fourth_powers == "rows" and parameter.ndim > 1 for parameter in parameters]
        self._squares: list[Tensor | None] = [None] * count  # allocated when first needed, as .grad is
        self._noiseless: list[Tensor | None] = [None] * count
        self._fourths: list[Tensor | None] = [None] * count
        self._units = [0.0] * count
        self._small = SmallSums(apart=self._keeps_fourths)
        self._products: dict[int, SquaredProduct] = {}  # sums over the passes of a batch
        self._sizes: dict[int, Tensor] = {}  # root mean squares, read back between batches
        self._seen, self._taken = [0] * count, [0] * count  # samples; those whose fourth powers have been taken
        self._batches = self._samples = self._of_batch = 0  # how many so far; samples; and those of the last batch
        self._takes = True  # fourth powers of this batch, also where they cost much
        self._elsewhere: set[int] = set()  # parameters whose first fourth powers another process or shard has
        self._comes_later = False  # batches before this one are elsewhere
        self._changes = 0  # of units
        self._sparse = [False] * count  # parameters with many entries to which few samples contribute
        self._carried = [0.0, 0.0, 0.0]  # Σ t, Σ t² and number of samples, t = tr M
        self.may_synchronize = True
        """Whether values on a GPU may be read: not while a CUDA graph is captured."""

    def begin_batch(self, index: int, samples: int) -> None:
        """Decide whether the fourth powers of a batch are taken where they cost much.

        An error bar need not be as exact as the estimate: fourth powers are taken of the first samples, and then of one
        of every four batches, chosen at random so that it does not correlate with the order of the data.  That follows
        from the batch's number and size, so that processes which share a run take those that one process would; only
        where few samples contribute to F (`note_traces`) each of them takes all of its own from then on.
        """
        group, place = divmod(index, _ONE_IN)
        first = index * samples < _ALL_OF
        self._takes = not self._alike or self._is_uneven or first or place == _chosen(group)
        self._comes_later = index > 0 and not self._batches

    @torch.no_grad()
    def add(self, gradients: Sequence[Tensor | None], made_by: Pass) -> None:
        """Add (g/scale)² and its square; None is a parameter that the outputs do not depend on."""
        used = [i for i, g in enumerate(gradients) if g is not None and g.numel()]
        if not used:
            return
        values = [g for i in used if (g := gradients[i]) is not None]
        if not self._keeps_fourths or not made_by.noise:
            add_whole(values, [PowerSums(self._sums_for(i, made_by.noise), scale=made_by.scale) for i in used])
            return
        check = self._unit_check(values[0].device)
        if check == "now" or (self.may_synchronize and not all(self._units[i] for i in used)):
            for i, size in zip(used, read_back(root_mean_squares(values)), strict=True):
                self._raise_unit(i, power_of_two_near(size / made_by.scale))
        elif check == "later":
            self._sizes.update(
                (i, size / made_by.scale) for i, size in zip(used, root_mean_squares(values), strict=True)
            )
        add_whole(values, [self._accumulators(i, made_by.scale, made_by.noise) for i in used])

    def add_samples(self, i: int, form: Form, made_by: Pass) -> None:
        """Add Σ_n (g_n/scale)² and the squares of its terms; small parameters, and several passes, are added later."""
        if not form.samples or not self._parameters[i].numel():
            return
        if isinstance(form, Dense) and form.values.numel() <= LIMIT and not self._by_row[i]:
            noise = made_by.sample_noise if self._keeps_fourths else 0.0
            self._small.add(i, form.values_for(self._parameters[i]), made_by.scale, noise)
            return
        if made_by.more and isinstance(form, Product) and form.single:
            if i in self._products and not self._products[i].goes_on_with(form):
                self._add_product(i, self._products.pop(i))  # x @ w has the cotangent on the right
            if i not in self._products:
                self._products[i] = SquaredProduct.of(form, promoted(self._parameters[i].dtype))
            self._products[i].add_cotangents(form.left[:, 0], made_by.scale, made_by.sample_noise)
            return
        self._of_batch = form.samples
        random = self._keeps_fourths and made_by.sample_noise > 0  # otherwise these samples have no noise to stand for
        self._seen[i] += form.samples if random else 0
        if self._comes_later and not self._taken[i]:
            self._elsewhere.add(i)
        first = not (self._taken[i] or i in self._elsewhere)
        takes = self._takes or not form.fourths_are_costly or first or self._sparse[i]
        if not (takes and random):
            form.add_squares(PowerSums(self._sums_for(i, made_by.sample_noise), scale=made_by.scale))
            return
        self._taken[i] += form.samples
        check = self._unit_check(form.device)
        if check == "now" or (self.may_synchronize and not self._units[i]):
            self._raise_unit(i, power_of_two_near(float(form.magnitude()) / made_by.scale))
        elif check == "later":
            self._sizes[i] = form.magnitude() / made_by.scale
        form.add_squares(self._accumulators(i, made_by.scale, made_by.sample_noise))

    def _accumulators(self, i: int, scale: float, weight: float) -> PowerSums:
        """Return the tensors that the squares and fourth powers of a parameter are added to."""
        kept, by_row = self._fourth_powers(i), self._by_row[i]
        fourths, rows = (None, kept) if by_row else (kept, None)
        return PowerSums(self._sums_for(i), fourths, self._units[i] or 1.0, weight, scale, rows)

    def _unit_check(self, device: torch.device) -> Literal["now", "later", "never"]:
        """Whether to check if gradients have grown: in the first batches, then in number 16, 32, ...

        Reading a value back synchronizes a GPU: there all of them are read together, after the batch.
        """
        early, rare = self._batches < _EARLY, self._batches & (self._batches + 1) == 0
        if not (self.may_synchronize and (early or rare)):
            return "never"
        return "later" if device.type == "cuda" else "now"

    def synchronize(self) -> None:
        """Raise units, count the batch, and decide what is kept of the next one (the loop may know more of it)."""
        for device in {size.device for size in self._sizes.values()}:
            there = {i: size for i, size in self._sizes.items() if size.device == device}
            for i, size in zip(there, read_back(list(there.values())), strict=True):
                self._raise_unit(i, power_of_two_near(size))
        self._sizes = {}
        self._batches += 1
        if self._alike and self._samples < _ALL_OF <= self._samples + self._of_batch:
            self._find_sparse(self._samples + self._of_batch)
        self._samples += self._of_batch
        self.begin_batch(self._batches, self._of_batch)

    def note_traces(self, traces: Tensor) -> None:
        """Take the traces of some samples' metrics, [n]: which share of the samples contributes to F and its noise.

        If it is small, as for confident predictions, most of an entry's variance may be in a batch whose fourth powers
        would not have been taken, so that its error bar would be much too small.
        """
        total, squares = read_back([traces.double().sum(), traces.double().square().sum()])
        self._carried = [a + b for a, b in zip(self._carried, (total, squares, len(traces)), strict=True)]
        self._takes = self._takes or self._is_uneven

    def _find_sparse(self, samples: int) -> None:
        """Find parameters with many entries whose error bars would suffer if fourth powers were left out.

        For n samples that contribute alike to an entry, n v/F̂² is about 2 after one pass, with v = (2/3) Σ g⁴; it is
        twice that if half of them contribute, as after a ReLU.
        """
        shares: list[Tensor | None] = [None] * len(self._sparse)
        for i, (square, fourth) in enumerate(zip(self._squares, self._fourths, strict=True)):
            if square is not None and fourth is not None and self._units[i]:
                scaled = self._of_rows(i, square) / self._units[i] ** 2
                shares[i] = (samples * fourth > _UNLIKE * scaled.square()).sum() / (fourth > 0).sum().clamp(min=1)
        self._sparse = [share > _MANY for share in read_back(shares)]
        self._changes += any(self._sparse)  # a captured CUDA graph has left them out

    @property
    def _is_uneven(self) -> bool:
        """Whether (Σ t)²/Σ t², the number of samples that contribute to F, is a small part of them."""
        total, squares, samples = self._carried
        return total**2 < _EVEN * samples * squares

    @property
    def variant(self) -> tuple[object, ...]:
        """All but the shapes that decides which operations a batch takes: a captured CUDA graph fits one variant."""
        return self._takes and self._keeps_fourths, self._changes, self._small.moves

    def tally(self) -> Tally:
        """Return how many samples have been counted so far."""
        return Tally(list(self._seen), list(self._taken), self._of_batch)

    def set_tally(self, tally: Tally) -> None:
        """Set the numbers of samples counted so far."""
        self._seen, self._taken, self._of_batch = list(tally.seen), list(tally.taken), tally.of_batch

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return all sums and counters, between batches."""
        small, values = self._small.state()
        tensors = {f"small.{name}": value for name, value in small.items()}
        for kind, kept in self._sums.items():
            tensors |= {f"{kind}.{i}": value for i, value in enumerate(kept) if value is not None}
        return tensors, {"small": values, **{name: getattr(self, name) for name in _NUMBERS}}

    def set_state(self, tensors: dict[str, Tensor], values: dict[str, Any]) -> None:
        """Restore the sums and counters that `state` returned."""
        devices = [parameter.device for parameter in self._parameters]
        small = {name.removeprefix("small."): value for name, value in tensors.items() if name.startswith("small.")}
        self._small.set_state(small, values["small"], devices)
        for kind, kept in self._sums.items():
            found = (tensors.get(f"{kind}.{i}") for i in range(len(devices)))
            kept[:] = [None if t is None else t.to(device, copy=True) for t, device in zip(found, devices, strict=True)]
        for name in _NUMBERS:
            setattr(self, name, values[name])

    def merge(self, tensors: dict[str, Tensor], values: dict[str, Any]) -> None:
        """Add the sums that `state` returned for other batches."""
        other = DiagonalSums(self._parameters, self.fourth_powers, self._alike)
        other.set_state(tensors, values)
        for i, unit in enumerate(other._units):
            largest = max(unit, self._units[i])
            for sums in (self, other):
                sums._change_unit(i, largest)
            for squares, noise in ((other._squares[i], 1.0), (other._noiseless[i], 0.0)):
                if squares is not None:
                    self._sums_for(i, noise).add_(squares)
            if (fourths := other._fourths[i]) is not None:
                self._fourth_powers(i).add_(fourths)
        self._small.merge(other._small)
        self.set_tally(self.tally().plus(other.tally()))
        self._batches += other._batches
        self._samples += other._samples
        self._carried = [a + b for a, b in zip(self._carried, other._carried, strict=True)]
        self._sparse = [a or b for a, b in zip(self._sparse, other._sparse, strict=True)]

    def reduce(self, processes: Reducer) -> None:
        """Add up the sums of all processes, one parameter after the other, in place; small ones together."""
        has = {kind: [i for i, value in enumerate(kept) if value is not None] for kind, kept in self._sums.items()}
        numbers = {"seen": self._seen, "taken": self._taken, "units": self._units, "batches": self._batches}
        of_all = processes.gather("sums", {**has, **numbers})
        for i, units in enumerate(zip(*(one["units"] for one in of_all), strict=True)):
            self._change_unit(i, max(units))
        noiseless = functools.partial(self._sums_for, noise=0.0)
        for kind, sums in (("squares", self._sums_for), ("noiseless", noiseless), ("fourths", self._fourth_powers)):
            for i in sorted({i for one in of_all for i in one[kind]}):
                processes.add(sums(i))
        self._small.reduce(processes, self._parameters)
        self._seen, self._taken = (list(map(sum, zip(*(o[k] for o in of_all), strict=True))) for k in ("seen", "taken"))
        self._batches = sum(one["batches"] for one in of_all)

    def copy(self) -> DiagonalSums:
        """Return the same sums, which go on by themselves."""
        copied = DiagonalSums(self._parameters, self.fourth_powers, self._alike)
        copied.set_state(*self.state())
        return copied

    def discard_batch(self) -> None:
        """Drop the gradients of a batch that was interrupted."""
        self._small.forget()
        self._sizes, self._products = {}, {}

    def _raise_unit(self, i: int, unit: float) -> None:
        """Take a larger unit if gradients have grown much, so that fourth powers do not overflow.

        Fourth powers captured before there was a unit are in units of 1, and must stay in float32's range.
        """
        old = self._units[i]
        if unit and not old and self._fourths[i] is not None:
            unit = max(unit, _LEAST_AFTER_ONE)
        if unit > 16 * old:
            kept = self._fourths[i]
            if kept is not None:
                kept.mul_(((old or 1.0) / unit) ** 4)
            self._units[i] = unit
            self._changes += 1

    def _change_unit(self, i: int, unit: float) -> None:
        """Express fourth powers in another unit."""
        kept, old = self._fourths[i], self._units[i]
        if kept is not None and unit != old:
            kept.mul_(((old or 1.0) / (unit or 1.0)) ** 4)
        self._units[i] = unit

    def _fourth_powers(self, i: int) -> Tensor:
        kept = self._fourths[i]
        if kept is None:
            parameter = self._parameters[i]
            kept = self._fourths[i] = zero_sums(parameter.flatten(1)[:, 0] if self._by_row[i] else parameter)
        return kept

    def _of_rows(self, i: int, square: Tensor) -> Tensor:
        """The sums of a weight's rows where these have the error bars."""
        return square.flatten(1).sum(1) if self._by_row[i] else square

    def _sums_for(self, i: int, noise: float = 1.0) -> Tensor:
        """Return the sums for a parameter's squares: apart where nothing is random (c = 0).  They begin as zeros."""
        apart = self._keeps_fourths and not noise and not self._by_row[i]
        sums = self._noiseless if apart else self._squares
        kept = sums[i]
        if kept is None:
            kept = sums[i] = zero_sums(self._parameters[i])
        return kept

    @property
    def _sums(self) -> dict[str, list[Tensor | None]]:
        return {"squares": self._squares, "noiseless": self._noiseless, "fourths": self._fourths}

    def end_pass(self) -> None:
        """Square the gradients of small parameters, all together."""
        self._small.flush()

    def end_batch(self) -> None:
        """Add the products that were summed over the passes of this batch, and square small parameters."""
        products, self._products = self._products, {}
        for i, product in products.items():
            self._add_product(i, product)
        self._small.flush()

    @torch.no_grad()
    def _add_product(self, i: int, product: SquaredProduct) -> None:
        self.add_samples(i, product, Pass(sample_noise=float(product.random)))

    @property
    def squares(self) -> list[Tensor]:
        """Σ g² of each parameter, zero for one without any gradient."""
        small, sums = self._small.squares(), zip(self._squares, self._noiseless, strict=True)
        found = [_added(*parts, small.get(i)) for i, parts in enumerate(sums)]
        return [zero_sums(p) if one is None else one for p, one in zip(self._parameters, found, strict=True)]

    @property
    def noiseless(self) -> list[Tensor]:
        """The part of Σ g² in which nothing is random, of each parameter; none if the rest is not random either."""
        small = self._small.noiseless()
        found = [_added(one, small.get(i)) for i, one in enumerate(self._noiseless)]
        random = self._small.fourths() or any(fourth is not None for fourth in self._fourths)
        if not random or all(part is None for part in found):
            return []
        zeros = (zero_sums(p.new_empty(())).expand(p.shape) for p in self._parameters)
        return [zero if part is None else part for part, zero in zip(found, zeros, strict=True)]

    def relative_error(self) -> float | None:
        """Return Σ stderr / Σ F so far; None while F is zero."""
        total = sum(float(square.double().sum()) for square in self.squares)
        return sum(float(value.double().sum()) for value in self.noise()) / total if total else None

    def noise(self, *, last: bool = False) -> list[Tensor]:
        """Return √(Σ c g⁴), the standard error of each Σ g² (or of each row's); a single zero, expanded, without noise.

        An entry may have no fourth power at all, because only batches contribute to it whose fourth powers were not
        taken.  Then it gets the standard error √(2/3) Σ g² that it would have if Σ g² were a single square.  So do all
        entries of a parameter of which no fourth power was taken.

        `last`: these sums are not used any more, so their memory may be overwritten.
        """
        small, found = self._small.fourths(), []
        for i, (parameter, fourth) in enumerate(zip(self._parameters, self._fourths, strict=True)):
            zeros = zero_sums(parameter.new_empty(()))
            square, shape = self._squares[i], parameter.shape[:1] if self._by_row[i] else parameter.shape
            square = None if square is None else self._of_rows(i, square)
            missed = None if fourth is not None or not self._seen[i] or square is None else square * math.sqrt(2 / 3)
            unit, stands_for = self._units[i] or 1.0, self._seen[i] / self._taken[i] if self._taken[i] else 1.0
            if i in small:
                total = small[i] if fourth is None else small[i] + fourth.double() * (stands_for * unit**4)
                root = total.sqrt().to(zeros.dtype)
                found.append(root if missed is None else root.hypot(missed))
            elif fourth is not None:
                root = fourth.sqrt_() if last else fourth.sqrt()
                root.mul_(math.sqrt(stands_for) * unit**2)
                if stands_for > 1 and square is not None and bool(root.any()):
                    root.add_((root == 0) * square, alpha=math.sqrt(2 / 3))
                found.append(root)
            else:
                found.append(zeros.expand(shape) if missed is None else missed)
        return found


def _added(*parts: Tensor | None) -> Tensor | None:
    """The sum of those that there are."""
    return functools.reduce(lambda a, b: b if a is None else a if b is None else a + b, parts)


@functools.lru_cache(maxsize=16)
def _chosen(group: int) -> int:
    """Return which batch of a group has its fourth powers taken."""
    return random.Random(group).randrange(_ONE_IN)
