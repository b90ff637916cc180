"""Accumulators: what is kept of the gradients of all passes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from neuromanifold.pullback.forms import Accumulators, Dense, Form
from neuromanifold.pullback.small import LIMIT, SmallSums

# On a CPU, how many numbers are squared, added and raised to the fourth at a time: few enough to stay in the cache.
_CHUNK = 2**18


# Of so many samples all fourth powers are taken, then of one in so many.
_ALL_OF, _ONE_IN = 128, 4


class Pass(NamedTuple):
    """One backward pass: how many times too large its gradients are, and c with Var(g²) <= c E[g⁴].

    The constant may be smaller for squares of single samples than for those of batches; 0: nothing is random.
    """

    scale: float = 1.0
    noise: float = 0.0
    sample_noise: float = 0.0
    independent: bool = False  # of the other passes of the batch


class GradientSums(Protocol):
    """Takes the gradients of one pass after the other."""

    waits: bool
    """Whether what several passes have in common may be added up first."""

    def add(self, gradients: Sequence[Tensor | None], made_by: Pass) -> None:
        """Take the gradients of one pass, of a batch as a whole; None stands for zero."""

    def add_samples(self, i: int, form: Form, made_by: Pass) -> None:
        """Take gradients of single samples with respect to parameter number i; autograd must not be recording."""

    def end_pass(self) -> None:
        """All gradients of a pass have been added."""

    def end_batch(self) -> None:
        """All passes of a batch have been added."""


class DiagonalSums:
    """Σ g² for each entry, and Σ c g⁴ for its error bar, in float32 or better whatever the model's precision.

    Fourth powers of small numbers underflow, so they are kept in units of a power of two near the root mean square of
    each parameter's first gradient; `noise` takes the unit out again.
    """

    waits = True

    def __init__(self, parameters: Sequence[Tensor], fourth_powers: bool) -> None:
        count = len(parameters)
        self._parameters = parameters
        self._keeps = fourth_powers
        self._squares: list[Tensor | None] = [None] * count  # made when the first is needed, as .grad is
        self._fourths: list[Tensor | None] = [None] * count
        self._units = [0.0] * count
        self._passes = 0
        self._small = SmallSums()
        self._sizes: dict[int, Tensor] = {}  # about how large gradients are now, to be looked at later
        self._looks = [0] * count  # how often each has been added to by samples
        self._seen = [0] * count  # how many samples

    @torch.no_grad()
    def add(self, gradients: Sequence[Tensor | None], made_by: Pass) -> None:
        """Add (g/scale)² and its square; None is a parameter that the outputs do not depend on."""
        used = [i for i, g in enumerate(gradients) if g is not None and g.numel()]
        if not used:
            return
        squares = [self._square(i) for i in used]
        values = [
            g.to(square.dtype) for i, square in zip(used, squares, strict=True) if (g := gradients[i]) is not None
        ]
        if made_by.scale != 1.0:
            values = list(torch._foreach_mul(values, 1 / made_by.scale))
        if not self._keeps or not made_by.noise:
            torch._foreach_addcmul_(squares, values, values)
            return
        self._passes += 1
        rare = self._passes & (self._passes - 1) == 0  # pass number 1, 2, 4, 8, ...: reading values back takes time
        if rare or not all(self._units[i] for i in used):
            norms = torch.stack([norm.double() for norm in torch._foreach_norm(values)]).tolist()
            for i, value, norm in zip(used, values, norms, strict=True):
                self._raise_unit(i, _power_of_two_near(norm / math.sqrt(value.numel())))
        factors = [(self._units[i] or 1.0) ** -2 for i in used]
        add = _add_in_chunks if values[0].device.type == "cpu" else _add_at_once
        add(values, squares, [self._fourth_powers(i) for i in used], factors, made_by.noise)

    def add_samples(self, i: int, form: Form, made_by: Pass) -> None:
        """Add Σ_n (g_n/scale)² and the squares of its terms."""
        if not form.samples or not self._parameters[i].numel():
            return
        if isinstance(form, Dense) and form.values.numel() <= LIMIT:
            self._small.add(i, form.values, made_by.scale, made_by.sample_noise if self._keeps else 0.0)
            return
        squares = self._square(i)
        weight = self._weight(i, form) if self._keeps and made_by.sample_noise else 0
        if not weight:
            form.add_squares(Accumulators(squares, scale=made_by.scale))
            return
        if not self._units[i]:
            self._raise_unit(i, _power_of_two_near(float(form.magnitude()) / made_by.scale))
        elif self._looks[i] & (self._looks[i] - 1) == 0:
            self._sizes[i] = form.magnitude() / made_by.scale
        unit, noise = self._units[i] or 1.0, weight * made_by.sample_noise
        fourths = self._fourth_powers(i)
        form.add_squares(Accumulators(squares, fourths, unit, noise, made_by.scale))

    def _weight(self, i: int, form: Form) -> int:
        """How often these fourth powers count: an error bar need not be as exact as what it belongs to.

        All of the first samples once; then, where they cost much, one of every four passes four times, the others
        not at all.  Which one is as good as random, so that nothing in the order of the data goes with it.
        """
        self._looks[i] += 1
        self._seen[i] += form.samples
        if not form.thins or self._seen[i] <= _ALL_OF:
            return 1
        group, place = divmod(self._looks[i], _ONE_IN)
        return _ONE_IN if place == (2654435761 * (group + 1) >> 16) % _ONE_IN else 0

    def _raise_unit(self, i: int, unit: float) -> None:
        """Take a larger unit if gradients have grown much, so that fourth powers do not overflow."""
        old = self._units[i]
        if unit > 16 * old:
            self._fourth_powers(i).mul_((old / unit) ** 4)
            self._units[i] = unit

    def _fourth_powers(self, i: int) -> Tensor:
        kept = self._fourths[i]
        if kept is None:
            kept = self._fourths[i] = _zeros_like(self._parameters[i])
        return kept

    def _square(self, i: int) -> Tensor:
        kept = self._squares[i]
        if kept is None:
            kept = self._squares[i] = _zeros_like(self._parameters[i])
        return kept

    def end_pass(self) -> None:
        """Square what is small."""
        self._small.flush()

    def end_batch(self) -> None:
        """Look whether gradients have grown: all at once, since reading values back takes time."""
        self._small.flush()
        for device in {size.device for size in self._sizes.values()}:
            there = {i: size.double() for i, size in self._sizes.items() if size.device == device}
            for i, size in zip(there, torch.stack(list(there.values())).tolist(), strict=True):
                self._raise_unit(i, _power_of_two_near(size))
        self._sizes = {}

    @property
    def squares(self) -> list[Tensor]:
        """Σ g², zero where nothing came."""
        small, found = self._small.squares(), []
        for i, square in enumerate(self._squares):
            both = square + small[i] if square is not None and i in small else small.get(i, square)
            found.append(_zeros_like(self._parameters[i]) if both is None else both)
        return found

    def noise(self) -> list[Tensor]:
        """√(Σ c g⁴): the standard error of each Σ g².  Where nothing was random, a single zero, expanded."""
        small, found = self._small.fourths(), []
        for i, (parameter, fourth, unit) in enumerate(zip(self._parameters, self._fourths, self._units, strict=True)):
            zeros = _zeros_like(parameter.new_empty(()))
            if i not in small:
                found.append(
                    zeros.expand(parameter.shape) if fourth is None else fourth.sqrt().mul_((unit or 1.0) ** 2)
                )
                continue
            total = small[i] if fourth is None else small[i] + fourth.double() * (unit or 1.0) ** 4
            found.append(total.sqrt().to(zeros.dtype))
        return found


class TraceSums:
    """Σ ‖g‖² of each pass of each batch, and of single samples: no tensor of a parameter's size."""

    waits = False

    def __init__(self) -> None:
        self.batches: list[list[float]] = []  # passes of whole batches
        self.samples = 0.0  # Σ_n ‖g_n‖² over all passes
        self.samples_variance = 0.0  # Σ c ‖g_n‖⁴
        self._passes: list[float] = []
        self._whole: list[Tensor] = []
        self._single: list[Tensor] = []
        self._norms: list[Tensor] = []  # [n] of each pass of a batch
        self._made_by: list[Pass] = []

    @torch.no_grad()
    def add(self, gradients: Sequence[Tensor | None], made_by: Pass) -> None:
        """Add ‖g/scale‖²."""
        used = [g.float() if g.dtype.itemsize < 4 else g for g in gradients if g is not None and g.numel()]
        norms = torch._foreach_norm(used) if used else []
        self._whole.extend(norm.double().square() / made_by.scale**2 for norm in norms)

    def add_samples(self, i: int, form: Form, made_by: Pass) -> None:
        """Add ‖g_n/scale‖² to what sample n has of other parameters."""
        del i
        norms = form.squared_norms(torch.float64) / made_by.scale**2
        if not self._single:
            self._made_by.append(made_by)
        self._single.append(norms.to(self._single[0].device) if self._single else norms)

    def end_pass(self) -> None:
        """Close the sums of this pass."""
        if self._whole:
            self._passes.append(float(torch.stack(self._whole).sum()))
        if self._single:
            self._norms.append(torch.stack(self._single).sum(0))
        self._whole, self._single = [], []

    def end_batch(self) -> None:
        """Close the list of this batch's passes."""
        if self._passes:
            self.batches.append(self._passes)
        if self._norms:
            self._add_samples_of_batch(torch.stack(self._norms))
        self._passes, self._norms, self._made_by = [], [], []

    def _add_samples_of_batch(self, norms: Tensor) -> None:
        """‖g_n‖² of each pass, [k, n].  The spread of independent passes is their noise; else Σ c ‖g_n‖⁴ bounds it."""
        self.samples += float(norms.sum())
        if len(norms) > 1 and all(one.independent for one in self._made_by):
            self.samples_variance += len(norms) * float(norms.var(0).sum())
        else:
            factors = torch.tensor([one.sample_noise for one in self._made_by], dtype=norms.dtype, device=norms.device)
            self.samples_variance += float((factors[:, None] * norms.square()).sum())


def _zeros_like(parameter: Tensor) -> Tensor:
    dtype = torch.float64 if parameter.dtype == torch.float64 else torch.float32
    return torch.zeros(parameter.shape, dtype=dtype, device=parameter.device)


def _power_of_two_near(rms: float) -> float:
    """A unit for fourth powers; 0 while the gradient is zero."""
    return 2.0 ** round(math.log2(rms)) if 0 < rms < math.inf else 0.0


def _add_at_once(
    values: list[Tensor], squares: list[Tensor], fourths: list[Tensor], factors: list[float], noise: float
) -> None:
    """A few kernel launches for all parameters together."""
    products = torch._foreach_mul(values, values)
    torch._foreach_add_(squares, products)
    torch._foreach_mul_(products, factors)
    torch._foreach_addcmul_(fourths, products, products, value=noise)


def _add_in_chunks(
    values: list[Tensor], squares: list[Tensor], fourths: list[Tensor], factors: list[float], noise: float
) -> None:
    """The same by pieces that stay in a CPU's cache: each number is read from and written to memory once."""
    for i, value in enumerate(values):
        pieces = (value.reshape(-1), squares[i].view(-1), fourths[i].view(-1))
        for g, square, fourth in zip(*(torch.split(piece, _CHUNK) for piece in pieces), strict=True):
            product = g * g
            square.add_(product)
            product.mul_(factors[i])
            fourth.addcmul_(product, product, value=noise)
