"""Verify per-sample gradients against ordinary autograd, and choose the layouts that pass.

For cotangents u_n of the samples and weights c_n, ordinary autograd (no hooks, one backward pass) must give

    Jᵀ(c∘u) = Σ_n c_n g_n,        g_n the per-sample gradients that the plan gives for u,

to the precision of the arithmetic.  This sees wrong rules, wrong layouts, stale or detached weights, derivatives inside
of a forward pass, overwritten gradients and samples that influence each other alike.  The weights are small powers of
two with a sign, different for neighbours: powers of two are exact, so that what is only rounding stays the same.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Set
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from neuromanifold.core.checks import promoted
from neuromanifold.persample.accumulate.base import Pass, read_back
from neuromanifold.persample.backward import PerSampleBackward, dense
from neuromanifold.persample.gradients import Dense, Form, root_mean_square
from neuromanifold.persample.hooks import Hooks
from neuromanifold.persample.places import Layout
from neuromanifold.persample.plan import Key, Plan, Use, Uses, combinations, preferred
from neuromanifold.persample.shards import Shards, any_process, union_of_processes

_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 5e-2}
_TF32 = 1e-2, 1e-3  # tolerance and precision of float32 where it is rounded to 11 bits
_ROUNDING = 16.0  # times the precision and the size of what is added up
_SMALLEST, _LARGEST = 1e-12, 1e18  # norms that float32 has to its precision
_COMPARED = 2**21  # logits that are compared where there are more of them
_WEIGHTS = (1.0, -2.0, 0.5, -1.0, 2.0, 4.0, -0.5)  # none is zero: every sample is seen


@dataclass(frozen=True)
class Reference:
    """What ordinary autograd says about one batch: Jᵀ(c∘u), and the logits."""

    logits: Tensor  # some of them, all over the batch, where they are many
    gradients: dict[int, Tensor]  # by number of the parameter; those that the logits do not depend on are left out
    shards: Shards | None = None  # of which the gradients are parts, added up over processes

    @classmethod
    def of(cls, logits: Tensor, parameters: list[nn.Parameter], shards: Shards | None = None) -> Reference:
        """Differentiate logits of a forward pass without hooks; the graph is freed."""
        weights = _sample_weights(logits).to(logits.dtype)  # powers of two, which every type has
        cotangent = _cotangent(logits).mul_(weights.view(-1, *[1] * (logits.ndim - 1)))
        if shards is None:
            found = torch.autograd.grad(logits, parameters, cotangent, allow_unused=True)
            return cls(_subsample(logits), {i: dense(g).detach() for i, g in enumerate(found) if g is not None})
        parts: dict[int, Tensor] = {}
        layers = shards.sums(lambda i, _, part: parts.update({i: part}))
        with shards.streamed(list(range(len(parameters))), lambda i, g: layers.put(i, "", g.to(promoted(g.dtype)))):
            torch.autograd.grad(logits, parameters, cotangent, allow_unused=True)
        layers.flush()
        shards.compare(parts)
        return cls(_subsample(logits), parts, shards)


def make_plan(
    uses: Uses, logits: Tensor, reference: Reference, hooks: Hooks, parameters: list[nn.Parameter]
) -> tuple[Plan, frozenset[int]]:
    """Return a plan whose per-sample gradients are verified, and the parameters that did not pass."""
    shards = reference.shards
    if any_process(shards, "other logits", not _same_logits(_subsample(logits), reference.logits)):
        # hooks change what the model computes, or it never computes it twice
        return Plan({}), frozenset(uses.counts) | uses.unsupported
    if unsupported := union_of_processes(shards, "unsupported", uses.unsupported):
        return Plan({}), unsupported
    candidates, expected = preferred(uses)
    pending = combinations(uses, candidates)  # of layouts, for each group of parameters that share uses
    chosen = {group: next(choices) for group, choices in pending.items()}
    best: dict[frozenset[int], tuple[frozenset[int], dict[Key, Layout]]] = {}  # which fail, with which layouts
    while True:
        plan = Plan({key: layout for own in chosen.values() for key, layout in own.items()})
        check = Verification(uses, plan, logits, reference, hooks, parameters)
        for group in list(pending):
            failed = check.failed & group
            if group not in best or len(failed) < len(best[group][0]):
                best[group] = failed, chosen[group]
            following = next(pending[group], None) if failed else None
            chosen[group] = following or best[group][1]
            if following is None:
                del pending[group]
        if not any_process(shards, "pending", bool(pending)):
            break
    layouts = {key: layout for own in chosen.values() for key, layout in own.items()}
    wrong = (check.failed - uses.counts.keys()).union(*(failed for failed, _ in best.values()))
    followed = uses.samples == 1 or all(expected.get(key) == layout for key, layout in layouts.items())
    return Plan(layouts, followed, check.zero), wrong


class Verification:
    """One backward pass of a plan, held against autograd."""

    def __init__(
        self, uses: Uses, plan: Plan, logits: Tensor, reference: Reference, hooks: Hooks, parameters: list[nn.Parameter]
    ) -> None:
        seen = _Observations(logits)
        sums = _WeightedSums(_sample_weights(logits), parameters, reference.gradients, shards=reference.shards)
        backward = PerSampleBackward(hooks, parameters, uses, plan)
        backward(logits, _cotangent(logits), sums, Pass(), keep_graph=True, observer=seen)
        sums.end_pass()
        seen.read()
        self.zero = frozenset(use.key for use in uses.supported) - seen.nonzero
        """Uses at which nothing but zeros was captured: nothing is known about them."""
        refused = seen.refusing | sums.misshapen
        # also those whose calls do not reach the logits with hooks, but do without: by a derivative inside of forward
        own = uses.counts.keys() | reference.gradients.keys() - set(uses.remaining)
        expected = union_of_processes(reference.shards, "expected", own)
        failed = refused | seen.wrong(expected, sums)
        self.failed = union_of_processes(reference.shards, "failed", failed)
        """Parameters whose per-sample gradients are not autograd's."""


def vectorizes_correctly(backward: PerSampleBackward, logits: Tensor) -> bool:
    """Return whether cotangents that go back in one vectorised pass have the gradients that they have alone.

    They do not where an operation cannot be vectorised, or works in place on gradients that are shared.
    """
    weights, cotangent = _sample_weights(logits), _cotangent(logits)
    seen, alone = _Observations(logits), _WeightedSums(weights, backward.parameters)
    backward(logits, cotangent.clone(), alone, Pass(), keep_graph=True, observer=seen)
    alone.end_pass()
    seen.read()
    together = [_WeightedSums(weights, backward.parameters, alone.totals, factor) for factor in (1.0, 2.0)]
    if not backward.to_uses(logits, [cotangent, 2 * cotangent], together, [Pass(), Pass()]):
        return False
    return not any(sums.misshapen or seen.wrong(alone.totals.keys() | sums.sizes.keys(), sums) for sums in together)


class _Observations:
    """What is captured: how large gradients are, in which precision, and which rules refuse.

    The lowest precision counts for all: autocast computes in bfloat16 what the gradients of float32 come from.
    """

    def __init__(self, logits: Tensor) -> None:
        self.nonzero: set[Key] = set()
        self.refusing: set[int] = set()
        self._sizes: dict[int, float] = {}
        self._unread: list[tuple[Use, Tensor, Tensor | None]] = []  # a GPU is waited for once
        self._precision = self._tolerance = 0.0
        self._lower_precision(logits)

    @torch.no_grad()
    def captured(self, use: Use, g: Tensor) -> None:
        """Note size and precision of the gradient at a use."""
        x = use.sites[0].partner if use.capture is None else use.capture.x
        scaled = x is not None and x.is_floating_point() and x.layout == torch.strided
        self._unread.append((use, _norm(g), root_mean_square(x.detach()) if x is not None and scaled else None))
        self._lower_precision(g)

    def read(self) -> None:
        """Read the sizes of all that was captured."""
        found = read_back([number for _, *numbers in self._unread for number in numbers])
        for (use, *_), size, scale in zip(self._unread, found[::2], found[1::2], strict=True):
            if size != 0:
                self.nonzero.add(use.key)
            for i in use.parameters.values():
                self._sizes[i] = self._sizes.get(i, 0.0) + size * max(1.0, scale)
        self._unread = []

    def refused(self, use: Use) -> None:
        """Note the parameters of a use whose rule does not apply."""
        self.refusing |= set(use.parameters.values())

    def wrong(self, numbers: Set[int], sums: _WeightedSums) -> frozenset[int]:
        """Return the parameters whose Σ c_n g_n is not autograd's gradient, but for rounding.

        Where autograd says NaN, they must say so, too: the result will show it.
        """
        chosen = sorted(numbers)
        expected = [sums.expected.get(i) for i in chosen]
        for gradient in expected:
            if gradient is not None:
                self._lower_precision(gradient)
        differences = [
            _norm(gradient) if gradient is not None and i not in sums.differences else sums.differences.get(i)
            for i, gradient in zip(chosen, expected, strict=True)
        ]
        found, wrong = read_back([*differences, *map(sums.sizes.get, chosen)]), set()
        sizes = [self._sizes.get(i, 0.0) for i in chosen]
        undefined = [g is not None and bool(g.isnan().any()) for g in expected] if any(map(math.isnan, found)) else []
        if sums.shards is not None:
            found, sizes, undefined = _over_processes(sums.shards, found, sizes, undefined)
        for k, i in enumerate(chosen):
            difference, size = found[k], found[len(chosen) + k]
            agree = difference <= self._tolerance * size + _ROUNDING * self._precision * sizes[k]
            if math.isnan(size) and undefined:
                agree = undefined[k]
            if not agree:
                wrong.add(i)
        return frozenset(wrong)

    def _lower_precision(self, values: Tensor) -> None:
        tolerance, precision = _TOLERANCE[values.dtype.to_real()], torch.finfo(values.dtype).eps
        rounds = torch.backends.cuda.matmul.allow_tf32 or torch.backends.cudnn.allow_tf32
        if values.is_cuda and values.dtype == torch.float32 and rounds:
            tolerance, precision = _TF32
        self._tolerance, self._precision = max(tolerance, self._tolerance), max(precision, self._precision)


def _over_processes(
    shards: Shards, norms: list[float], sizes: list[float], undefined: list[bool]
) -> tuple[list[float], list[float], list[bool]]:
    """Return the norms of whole tensors from those of their parts, and what is known of them in any process."""
    of_all = shards.processes.gather("verified", [norms, sizes, undefined])
    squares = [math.sqrt(sum(norm**2 for norm in one)) for one in zip(*(norms for norms, *_ in of_all), strict=True)]
    together = [sum(one) for one in zip(*(sizes for _, sizes, _ in of_all), strict=True)]
    some = [flags or [False] * len(sizes) for *_, flags in of_all]
    return squares, together, list(map(any, zip(*some, strict=True))) if any(flags for *_, flags in of_all) else []


class _WeightedSums:
    """Σ_n c_n g_n of each parameter, compared with what is expected as soon as it is there.

    Dense forms wait until the end of the pass, as in `accumulate`.
    """

    def __init__(
        self,
        weights: Tensor,
        parameters: list[nn.Parameter],
        expected: Mapping[int, Tensor] | None = None,
        factor: float = 1.0,
        shards: Shards | None = None,
    ) -> None:
        """Without `expected`, the sums themselves are kept; they are `factor` times too large."""
        self._weights, self._parameters, self._factor = weights, parameters, factor
        self._keeps, self.expected = expected is None, expected or {}
        self.shards = shards
        self._layers = None if shards is None else shards.sums(lambda i, _, part: self._compare(i, part))
        self._waiting: list[tuple[int, Form]] = []
        self.totals: dict[int, Tensor] = {}
        self.differences: dict[int, Tensor] = {}  # ‖Σ c_n g_n - expected‖
        self.sizes: dict[int, Tensor] = {}  # ‖Σ c_n g_n‖
        self.misshapen: set[int] = set()

    def add_samples(self, i: int, form: Form, made_by: Pass) -> None:
        """Take the per-sample gradients of one parameter."""
        del made_by
        if isinstance(form, Dense):
            self._waiting.append((i, form))
        else:
            self._add(i, form)

    def end_pass(self) -> None:
        """Add the dense forms of this pass, which are read only after the backward pass, as in `accumulate`."""
        for i, form in self._waiting:
            self._add(i, form)
        self._waiting = []
        if self._layers is not None:
            self._layers.flush()

    @torch.no_grad()
    def _add(self, i: int, form: Form) -> None:
        shape = (self._parameters[i] if self.shards is None else self.shards.squared(i)).shape
        try:
            if form.samples != len(self._weights) or form.shape.numel() != shape.numel():
                raise ValueError("Not the gradients of these samples.")
            total = form.weighted_sum(self._weights).reshape(shape)
        except torch.OutOfMemoryError:
            raise
        except Exception:  # factors that do not fit together
            self.misshapen.add(i)
            return
        total = total if self._factor == 1.0 else total / self._factor
        if self._keeps:
            self.totals[i] = total
        elif self._layers is not None:
            self._layers.put(i, "", total)
        else:
            self._compare(i, total)

    def _compare(self, i: int, total: Tensor) -> None:
        wanted = self.expected.get(i)
        self.sizes[i] = self.differences[i] = size = _norm(total)
        if wanted is not None:
            self.differences[i] = _norm(total.sub_(wanted.to(total.device)), beside=size)


def _norm(values: Tensor, beside: Tensor | None = None) -> Tensor:
    """Return the Euclidean norm, in float64: float32 does not have the squares of tiny gradients.

    On a CPU, where float64 takes four times as long and reading a number costs nothing, only if the norm, or the one
    that it is compared with, is so small or so large.
    """
    values = torch.view_as_real(values) if values.is_complex() else values
    if values.dtype == torch.float32 and values.device.type == "cpu":
        quick: Tensor = torch.linalg.vector_norm(values)
        if (quick if beside is None else beside) > _SMALLEST and quick < _LARGEST:
            return quick.double()
    norm: Tensor = torch.linalg.vector_norm(values, dtype=torch.float64)
    return norm


def _sample_weights(logits: Tensor) -> Tensor:
    """Weights for the samples, all different for few of them; the same for logits of the same shape."""
    samples, dtype = len(logits), torch.float64 if logits.dtype == torch.float64 else torch.float32
    repeated = torch.tensor(_WEIGHTS, dtype=dtype).repeat(-(-samples // len(_WEIGHTS)))[:samples]
    order = torch.randperm(samples, generator=torch.Generator().manual_seed(samples))
    return repeated[order].to(logits.device)


def _cotangent(logits: Tensor) -> Tensor:
    """Noise of the logits' shape; the same for logits of the same shape, on the same device."""
    generator = torch.Generator(logits.device).manual_seed(len(logits))
    return torch.randn(logits.shape, generator=generator, device=logits.device, dtype=logits.dtype)


def _subsample(logits: Tensor) -> Tensor:
    """Return some millions of the logits, evenly spread over the batch; all if there are fewer."""
    values = logits.detach().flatten()
    return values[:: 1 + len(values) // _COMPARED].clone()


def _same_logits(found: Tensor, expected: Tensor) -> bool:
    """Whether the model computes the same with hooks as without."""
    if found.shape != expected.shape or found.dtype != expected.dtype:
        return False
    tolerance = _TOLERANCE[found.dtype] * expected.abs().nan_to_num(0.0, 0.0, 0.0).amax() if found.numel() else 0.0
    return bool(
        ((found - expected).abs() <= tolerance).logical_or(found == expected).logical_or(expected.isnan()).all()
    )
