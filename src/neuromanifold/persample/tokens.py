"""Uses of parameters whose gradients can be squared for each token: above everything that mixes the positions.

Let z [n, T, C] be logits, u_t independent cotangents with E[u_t u_tᵀ] = M_t, and y_t the output of a layer that reaches
the logits of position t alone: those of the head, of what comes before it, and of the last block but for its keys and
values.  Then the layer's gradient of position t depends on u_t alone, F = Σ_t E[g_t²], and

    Σ_t g_t²  and  (Σ_t g_t)²  both have the mean F,         Var (Σ_t g_t)² = Σ_t Var g_t² + 4 Σ_{s<t} E[g_s²] E[g_t²].

So the squares of tokens have less noise, by about the number of tokens in a sequence, and need no product over the
positions.  Below attention the gradient of position t belongs to all u_s that y_t reaches: E[g_s g_t] is not zero, and
Σ_t g_t² would be another number.

Which layers these are is seen from the graph, down which positions are followed as samples are (`follow.py`), and
verified once for each kind of graph: where the cotangent is zero, their gradients must be.
"""

from __future__ import annotations

import torch
from torch import Tensor

from neuromanifold.persample.accumulate.base import Pass
from neuromanifold.persample.backward import PerSampleBackward
from neuromanifold.persample.gradients import Form
from neuromanifold.persample.places import ROWS
from neuromanifold.persample.plan import Key, Use, connected
from neuromanifold.persample.shards import Shards, union_of_processes

_TOLERANCE = 1e-3  # of a sum, relative to the size of its terms: both sides add the same numbers


def token_uses(backward: PerSampleBackward, logits: Tensor, shards: Shards | None = None) -> frozenset[Key]:
    """Return the uses in a graph with logits [n, T, C] whose gradients may be squared for each token.

    A parameter that is used elsewhere, too, such as a head that is tied to the embedding, has none.  `shards`: all
    processes that have parts of the parameters find the same ones.
    """
    samples, positions = len(logits), logits.shape[1] if logits.ndim == 3 else 1
    uses, places = backward.uses, backward.uses.places_of_positions(positions)

    def fits(use: Use) -> bool:
        capture, layout = use.capture, backward.plan.layouts[use.key]
        if positions < 2 or capture is None or layout.shared or layout == ROWS or not capture.owner.rule.extra_dims:
            return False
        if any(isinstance(value, Tensor) for value in (*capture.others, *capture.options.values())):
            return False
        found = {layout.positions_of(shape, samples) for shape in (capture.shape, capture.x.shape)}
        return found == {(positions, places.get(use.key))}

    apart = [(numbers, members) for numbers, members in connected(uses.supported) if all(map(fits, members))]
    own = set(range(len(backward.parameters))).difference(*(numbers for numbers, _ in apart))
    others = union_of_processes(shards, "token uses", own)
    apart = [(numbers, members) for numbers, members in apart if numbers.isdisjoint(others)]
    keys = frozenset(use.key for _, members in apart for use in members)
    found = _wrong(backward, logits, keys, {i for numbers, _ in apart for i in numbers}, shards) if keys else set()
    wrong = union_of_processes(shards, "token errors", found)
    return frozenset(use.key for numbers, members in apart if numbers.isdisjoint(wrong) for use in members)


def _wrong(
    backward: PerSampleBackward, logits: Tensor, keys: frozenset[Key], numbers: set[int], shards: Shards | None
) -> set[int]:
    """Return the parameters whose gradients of tokens are not zero where the cotangent is, or do not add up."""
    generator = torch.Generator().manual_seed(len(logits))
    shown = torch.rand(logits.shape[:2], generator=generator).to(logits.device) < 0.5
    noise = torch.Generator(logits.device).manual_seed(1)
    cotangent = torch.randn(logits.shape, generator=noise, device=logits.device, dtype=logits.dtype)
    cotangent.mul_(shown[..., None])
    whole = _Sums(numbers)
    tokens = _Sums(numbers, whole, hidden=~shown.flatten())
    for how, sums in ((backward, whole), (backward.with_tokens(keys), tokens)):
        if shards is None:
            how.to_uses(logits, [cotangent], [sums], [Pass()], numbers)
        else:  # the layers' parameters are there only while backward passes them
            with shards.streamed(how.uses.remaining, lambda *_: None):
                how(logits, cotangent, sums, Pass(), keep_graph=True)
    return numbers - {i for i, right in tokens.right.items() if bool(right)}


class _Sums:
    """Σ g of each parameter; or whether those of tokens are the same, and zero where they must be."""

    def __init__(self, wanted: set[int], whole: _Sums | None = None, hidden: Tensor | None = None) -> None:
        """`whole`: the sums to compare with, each of which is dropped then; `hidden` tokens have no cotangent."""
        self._wanted, self._whole, self._hidden = wanted, whole, hidden
        self.totals: dict[int, Tensor] = {}
        self.right: dict[int, Tensor] = {}

    def add_samples(self, i: int, form: Form, made_by: Pass) -> None:
        """Take the gradients of one parameter; a form with another number of terms cannot be compared."""
        del made_by
        if i not in self._wanted or (self._hidden is not None and form.samples != len(self._hidden)):
            return
        dtype = torch.float64 if form.device.type == "cpu" else torch.float32
        total = form.weighted_sum(torch.ones(form.samples, dtype=dtype, device=form.device)).flatten()
        if self._whole is None or self._hidden is None:
            self.totals[i] = total
            return
        whole = self._whole.totals.pop(i, None)
        if whole is not None and whole.numel() == total.numel():
            norms = form.squared_norms(dtype).double()
            difference = torch.linalg.vector_norm(total.sub_(whole))
            agree = difference <= _TOLERANCE * norms.sum().sqrt()  # the size of the terms
            self.right[i] = agree & (norms[self._hidden].sum() == 0)

    def end_pass(self) -> None:
        """Do nothing: forms are added at once."""
