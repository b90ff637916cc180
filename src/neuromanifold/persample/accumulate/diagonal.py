"""Accumulator for the diagonal: Σ g² of every entry, and Σ c g⁴ for its standard error.

gradients of one parameter          Dense, small ─► SmallSums               squared with others at the end of the pass
                                    Product, several passes ─► _products    l² summed over passes, times r² once a batch
                                                                            (l: gradient of the output, r: input)
                                    all others ─► squares and FourthPowers  at once
fourth powers                       of which batches: Thinning              in which units: Units
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor
from typing_extensions import override

from neuromanifold.core.checks import promoted
from neuromanifold.kernels.values import PowerSums
from neuromanifold.persample.accumulate.base import Pass, Reducer, SharedSums, named, part_of, read_back, zero_sums
from neuromanifold.persample.accumulate.fourth_powers import UNLIKE, FourthPowers, Tally, Thinning, Units
from neuromanifold.persample.accumulate.small import LIMIT, SmallSums
from neuromanifold.persample.accumulate.whole import add_whole, root_mean_squares
from neuromanifold.persample.gradients import Dense, Form, Product, SquaredProduct


class DiagonalSums(SharedSums):
    """Σ g² for each entry, and Σ c g⁴ for its error bar, in float32 or better whatever the model's precision.

    Squares that are not random (c = 0) have sums of their own beside fourth powers: intervals are about the rest.
    """

    takes_tokens: ClassVar[bool] = True

    def __init__(
        self, parameters: Sequence[Tensor], fourth_powers: bool | Literal["rows"], similar_batches: bool = True
    ) -> None:
        """`fourth_powers`: of each entry, of the norms of a weight's rows, or none.

        `similar_batches`: all have about the same variance, so that the fourth powers of some of them are enough.
        """
        self._parameters, self.fourth_powers, self._similar_batches = parameters, fourth_powers, similar_batches
        self._squares: list[Tensor | None] = [None] * len(parameters)  # Σ g², allocated when first needed, as .grad is
        self._noiseless: list[Tensor | None] = [None] * len(parameters)  # where c = 0
        self._fourths = [FourthPowers(p, by_row=fourth_powers == "rows" and p.ndim > 1) for p in parameters]
        self._small = SmallSums(separate_noiseless=bool(fourth_powers))
        self._products: dict[int, SquaredProduct] = {}  # sums over the passes of a batch
        self._units, self._thinning = Units(self._fourths), Thinning(len(parameters), similar_batches)

    @override
    def empty(self) -> DiagonalSums:
        return DiagonalSums(self._parameters, self.fourth_powers, self._similar_batches)

    # ------------------------------------------------------------------------------------------------ gradients

    @override
    def begin_batch(self, index: int, samples: int) -> None:
        self._thinning.begin_batch(index, samples)

    @torch.no_grad()
    def add(self, gradients: Sequence[Tensor | None], made_by: Pass) -> None:
        """Add (g/scale)² and (g/scale)⁴; None is a parameter that the outputs do not depend on."""
        used = {i: g for i, g in enumerate(gradients) if g is not None and g.numel()}
        if not used:
            return
        values, scale, c = list(used.values()), made_by.scale, made_by.noise_factors.batch
        if takes := bool(self.fourth_powers and c):
            self._units.measure(list(used), lambda: root_mean_squares(values), scale, values[0].device)
        add_whole(values, [self._sums_for(i, scale, c, takes) for i in used])

    def add_samples(self, i: int, form: Form, made_by: Pass) -> None:
        """Add Σ_n (g_n/scale)² and Σ_n (g_n/scale)⁴; small parameters, and several passes, are added later."""
        parameter, c = self._parameters[i], made_by.noise_factors.sample
        if not form.samples or not parameter.numel():
            return
        if isinstance(form, Dense) and form.values.numel() <= LIMIT and not self._fourths[i].by_row:
            self._small.add(i, form.values_for(parameter), made_by.scale, c if self.fourth_powers else 0.0)
        elif made_by.more and isinstance(form, Product) and form.single:
            self._add_cotangents(i, form, made_by.scale, c)
        else:
            self._add_form(i, form, made_by.scale, c)

    def _add_cotangents(self, i: int, product: Product, scale: float, c: float) -> None:
        """Add l² of one pass to those of the batch: Σ_passes (l ⊗ r)² = (Σ_passes l²) ⊗ r², as r are the inputs."""
        before = self._products.get(i)
        alike = before is None or before.random == (c > 0) or not self.fourth_powers  # sums where c = 0 are apart
        if before is not None and not (alike and before.goes_on_with(product)):
            self._add_product(i)  # x @ w has the cotangent on the right
        if i not in self._products:
            self._products[i] = SquaredProduct.of(product, promoted(self._parameters[i].dtype))
        self._products[i].add_cotangents(product.left[:, 0], scale, c)

    @torch.no_grad()
    def _add_product(self, i: int) -> None:
        product = self._products.pop(i)
        self._add_form(i, product, 1.0, float(product.random))

    def _add_form(self, i: int, form: Form, scale: float, c: float) -> None:
        """Square the gradients of all samples; take fourth powers if these are cheap, or if `Thinning` says so."""
        fourths, takes = self._fourths[i], False
        if self.fourth_powers and c > 0:
            takes = not form.fourths_are_costly or self._thinning.takes(i, first=not fourths.seen)
            fourths.seen += form.samples
        if takes:
            fourths.taken += form.samples
            self._units.measure([i], lambda: [form.magnitude()], scale, form.device)
        form.add_squares(self._sums_for(i, scale, c, takes))

    def _sums_for(self, i: int, scale: float, c: float, takes: bool) -> PowerSums:
        """Return where the squares of a parameter are added, with fourth powers if these are taken."""
        fourths = self._fourths[i]
        sums = self._noiseless if self.fourth_powers and not c and not fourths.by_row else self._squares
        squares = self._allocated(sums, i)
        return fourths.with_squares(squares, scale, c) if takes else PowerSums(squares, scale=scale)

    def _allocated(self, sums: list[Tensor | None], i: int) -> Tensor:
        found = sums[i]
        if found is None:
            found = sums[i] = zero_sums(self._parameters[i])
        return found

    @override
    def end_pass(self) -> None:
        self._small.flush()

    @override
    def end_batch(self) -> None:
        for i in list(self._products):
            self._add_product(i)
        self._small.flush()

    @override
    def synchronize(self) -> None:
        self._units.end_batch()
        if samples := self._thinning.end_batch():
            pairs = zip(self._fourths, self._squares, strict=True)
            shares = [None if sq is None else fourths.share_of_rare(sq, samples, UNLIKE) for fourths, sq in pairs]
            self._thinning.note_rare(read_back(shares))

    @override
    def note_traces(self, traces: Tensor) -> None:
        self._thinning.note_traces(traces)

    # ---------------------------------------------------------------------------------------------- CUDA graphs

    @property
    def variant(self) -> tuple[object, ...]:
        """All but the shapes that decides which operations a batch takes: a captured CUDA graph fits one variant."""
        taken = self._thinning.variant if self.fourth_powers else ()
        return *taken, *(fourths.unit for fourths in self._fourths), self._small.moves

    def without_synchronization(self) -> AbstractContextManager[None]:
        """Read nothing back from a GPU inside, as in the capture of a CUDA graph."""
        return self._units.without_synchronization()

    def tally(self) -> Tally:
        """Return how many samples have been counted so far."""
        return Tally([fourths.seen for fourths in self._fourths], [fourths.taken for fourths in self._fourths])

    def set_tally(self, tally: Tally) -> None:
        """Set the numbers of samples counted so far."""
        for fourths, seen, taken in zip(self._fourths, *tally, strict=True):
            fourths.seen, fourths.taken = seen, taken

    def discard_batch(self) -> None:
        """Drop the gradients of a batch that was interrupted."""
        self._small.forget()
        self._units.discard()
        self._products = {}

    # ------------------------------------------------------------------------------------ checkpoints, processes

    @override
    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        small, known = self._small.state()
        tensors = named(small, "small")
        for kind, sums in self._tensors().items():
            tensors |= {f"{kind}.{i}": value for i, value in enumerate(sums) if value is not None}
        values = {
            "small": known,
            "units": [fourths.unit for fourths in self._fourths],
            "samples": self.tally()._asdict(),
            "thinning": self._thinning.state(),
            "batches": self._units.batches,
        }
        return tensors, values

    @override
    def set_state(self, tensors: dict[str, Tensor], values: dict[str, Any]) -> None:
        devices = [parameter.device for parameter in self._parameters]
        self._small.set_state(part_of(tensors, "small"), values["small"], devices)
        parts = {kind: part_of(tensors, kind) for kind in self._tensors()}
        for i, (fourths, device) in enumerate(zip(self._fourths, devices, strict=True)):
            copies = {kind: part[f"{i}"].to(device, copy=True) for kind, part in parts.items() if f"{i}" in part}
            self._squares[i], self._noiseless[i] = copies.get("squares"), copies.get("noiseless")
            fourths.sums, fourths.unit = copies.get("fourths"), values["units"][i]
        self.set_tally(Tally(**values["samples"]))
        self._thinning.set_state(values["thinning"])
        self._units.batches = values["batches"]

    @override
    def merge(self, tensors: dict[str, Tensor], values: dict[str, Any]) -> None:
        other = self.empty()
        other.set_state(tensors, values)
        for sums, more in ((self._squares, other._squares), (self._noiseless, other._noiseless)):
            for i, squares in enumerate(more):
                if squares is not None:
                    self._allocated(sums, i).add_(squares)
        for fourths, others in zip(self._fourths, other._fourths, strict=True):
            fourths.merge(others)
        self._small.merge(other._small)
        self._thinning.merge(other._thinning)
        self._units.batches += other._units.batches

    @override
    def reduce(self, processes: Reducer) -> None:
        """Add up the sums of all processes, one parameter after the other, in place; small ones together."""
        has = {kind: [i for i, v in enumerate(sums) if v is not None] for kind, sums in self._tensors().items()}
        units = [fourths.unit for fourths in self._fourths]
        of_all = processes.gather("sums", {**has, "units": units, "samples": self.tally()})
        held = {kind: sorted({i for one in of_all for i in one[kind]}) for kind in has}
        for kind, sums in (("squares", self._squares), ("noiseless", self._noiseless)):
            for i in held[kind]:
                processes.add(self._allocated(sums, i))
        for i, fourths in enumerate(self._fourths):
            fourths.convert(max(one["units"][i] for one in of_all))
            if i in held["fourths"]:
                fourths.reduce(processes)
        self._small.reduce(processes, self._parameters)
        self.set_tally(functools.reduce(Tally.plus, (Tally(*one["samples"]) for one in of_all)))

    def _tensors(self) -> dict[str, list[Tensor | None]]:
        """The sums of each parameter, by the name that a checkpoint has for them."""
        fourths = [fourths.sums for fourths in self._fourths]
        return {"squares": self._squares, "noiseless": self._noiseless, "fourths": fourths}

    # -------------------------------------------------------------------------------------------------- results

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
        random = self._small.fourths() or any(fourths.sums is not None for fourths in self._fourths)
        if not random or all(part is None for part in found):
            return []
        zeros = (zero_sums(p.new_empty(())).expand(p.shape) for p in self._parameters)
        return [zero if part is None else part for part, zero in zip(found, zeros, strict=True)]

    def standard_errors(self, *, in_place: bool = False) -> list[Tensor]:
        """Return √(Σ c g⁴), the standard error of each Σ g² (or of each row's); a single zero, expanded, if c = 0.

        `in_place`: overwrite the sums of fourth powers, which cannot be used afterwards.
        """
        small, found = self._small.fourths(), []
        for i, (parameter, fourths) in enumerate(zip(self._parameters, self._fourths, strict=True)):
            error, zero = (
                fourths.standard_error(self._squares[i], in_place=in_place),
                zero_sums(parameter.new_empty(())),
            )
            if i in small:
                root = small[i].sqrt().to(zero.dtype)
                error = root if error is None else root.hypot(error)
            found.append(zero.expand(fourths.shape) if error is None else error)
        return found

    def relative_error(self) -> float | None:
        """Return Σ stderr / Σ F so far; None while F is zero, or without fourth powers."""
        total = sum(float(square.double().sum()) for square in self.squares) if self.fourth_powers else 0.0
        return sum(float(error.double().sum()) for error in self.standard_errors()) / total if total else None


def _added(*parts: Tensor | None) -> Tensor | None:
    """The sum of the tensors that are not None; None if there are none."""
    found = [part for part in parts if part is not None]
    return sum(found[1:], found[0]) if found else None
