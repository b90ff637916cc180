"""Products Jᵀ M J v for one batch, with J = ∂z/∂θ: forward mode and then an ordinary backward, in one forward pass.

dual parameters (θ, v) ─► logits (z, Jv) ─► u = M Jv ─► Jᵀu through the graph of z

Where an operation has no forward mode, J v comes from differentiating w ↦ Jᵀw, which is linear in w, once more (double
backward).  Fused attention and fused recurrent layers have neither, so their unfused forms are used then.  The first
batch shows which of these methods works: ⟨Jv, u⟩ = ⟨v, Jᵀu⟩ must hold for random u and v, which fails if a use of a
parameter is missed.  The same is checked with the u and v of all batches, at no cost, since later ones may take other
branches than the first.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.func import functional_call, jvp
from torch.nn.attention import SDPBackend, sdpa_kernel

from neuromanifold.core.checks import message
from neuromanifold.persample.backward import BatchBackward
from neuromanifold.persample.scaling import involves_half, largest_scale

T = TypeVar("T")

METHODS = ("forward mode", "forward mode, plain kernels", "double backward", "double backward, plain kernels")
_LARGEST = {False: 0.02, True: 0.3}  # relative discrepancy, in half precision; float32 may be TF32, float64 float32
_AT_ONCE = {True: 2**20, False: 2**25}  # numbers of a block of vectors, on a CPU; on a GPU
_MOST = 8  # vectors at once: activations are as many times larger
_CHECKS = {False: 2, True: 8}  # of a method; more in half precision, where a single one could pass by chance


class _Whole(nn.Module):
    """A model whose parameters are replaced while a function that calls it runs."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, work: Callable[[], Any]) -> Any:
        return work()


class JacobianProducts(Generic[T]):
    """Jᵀ M J v for one batch after the other.

    `logits_of` finds the logits in what an evaluation of the model gives, and `middle` makes the cotangent from it and
    from J v (in float32 or better).
    """

    def __init__(
        self, model: nn.Module, parameters: Mapping[str, nn.Parameter], logits_of: Callable[[T], Tensor]
    ) -> None:
        self.model, self.names, self.parameters = model, list(parameters), list(parameters.values())
        self.logits_of = logits_of
        self.method = ""
        """How J v is computed; empty before the first batch."""

        self.several = True
        """Whether several vectors go through the model together; False once that has failed."""

        self._compared = False  # blocks with single vectors
        self._found = 0.0  # the relative discrepancy on the first batch
        self._half = self._half_logits = False  # whether float16 is involved
        self._backward = BatchBackward(self.parameters)
        self._whole = _Whole(model)
        self._whole.training = False

    def choose(self, evaluate: Callable[[], T], seed: int = 0) -> None:
        """Find the first method that works on a batch (which must not be empty)."""
        self._look_for_half()
        generator = torch.Generator(self.parameters[0].device).manual_seed(seed)
        _load_forward_mode()
        found: dict[str, float] = {}
        first: Exception | None = None
        for method in METHODS:
            try:
                checks = [self._discrepancy(evaluate, method, generator) for _ in range(_CHECKS[self._eps() > 1e-4])]
                found[method] = math.hypot(*checks) / math.sqrt(len(checks))
            except torch.OutOfMemoryError:
                raise
            except Exception as error:  # of any kind: operations without derivatives raise what they like
                first = first or error
                continue
            if found[method] <= self._rounding():
                break
        best = min(found.values(), default=math.inf)
        if best <= self._largest():
            self.method = next(method for method in found if found[method] <= max(10 * best, self._rounding()))
            self._found = found[self.method]
            return
        advice = (
            "Leave out with `parameters` what its operations cannot be differentiated in, or take nm.fisher_factors."
        )
        got = "one with derivatives that are " + ("NaN" if any(map(math.isnan, found.values())) else "inconsistent")
        got = f"one that fails ({type(first).__name__}: {first})" if first else got
        raise ValueError(message("model", "differentiable in forward mode, or twice", got, advice)) from first

    def __call__(
        self, evaluate: Callable[[], T], vectors: Sequence[Tensor], middle: Callable[[T, Tensor], Tensor]
    ) -> Iterator[tuple[slice, Sequence[Tensor | None], Tensor]]:
        """Yield the products of vectors [m, *shape], a few at a time: their range, the products, and their sizes.

        Products have the form of the vectors; None is zero.  Sizes are ⟨Jv, u⟩ and ‖Jv‖‖u‖ of each, [., 2], for
        `compare`.
        """
        self._look_for_half()
        count = len(vectors[0])
        step = max(1, min(_MOST, _AT_ONCE[self.parameters[0].device.type == "cpu"] // self._size))
        if not self.method.startswith("forward mode") or self._half:
            step = 1
        for start in range(0, count, step):
            group = [v[start : start + step] for v in vectors]
            if len(group[0]) > 1 and self.several:
                measured = _MeasuredMiddle(middle)
                together = self._together(evaluate, group, measured)
                if together is not None and self._agrees(evaluate, group, together, middle):
                    yield slice(start, start + step), together, measured.sizes()
                    continue
            for i in range(len(group[0])):
                measured = _MeasuredMiddle(middle)
                one = self._one(evaluate, self.method, [v[i] for v in group], measured)
                yield slice(start + i, start + i + 1), [None if g is None else g[None] for g in one], measured.sizes()

    def compare(self, vectors: Tensor, products: Tensor, sizes: Tensor) -> None:
        """Raise unless ⟨v, Jᵀu⟩ = ⟨Jv, u⟩ over all batches, for v [m, P], their products and the sum of their sizes.

        Where v is nearly in the kernel of J both are rounding, of the size of ‖v‖‖Jᵀu‖.
        """
        found = (vectors * products).sum(1)
        rounding = torch.linalg.vector_norm(vectors, dim=1) * torch.linalg.vector_norm(products, dim=1)
        tolerance = min(self._largest(), 1e3 * max(self._found, self._eps(), 1e-9))
        allowed = (tolerance * (sizes[:, 1] + rounding / 2)).clamp(min=1e-30)  # below, products underflow
        if bool(((sizes[:, 0] - found).abs() > allowed).any()):
            got = f"others in some batch by {self.method}, which the first batch was right by"
            advice = "Put a batch that shows it first (one with padding, say): the method is chosen by it."
            raise ValueError(message("model", "one with the same derivatives in both modes", got, advice))

    def _look_for_half(self) -> None:
        """Update whether float16 is involved: autocast may have changed, and logits are known after a batch."""
        half = self._half_logits or involves_half(self.model.parameters(), self.parameters[0].device)
        if half != self._half:
            self._half, self._backward = half, BatchBackward(self.parameters, half)

    @property
    def _size(self) -> int:
        return max(1, sum(parameter.numel() for parameter in self.parameters))

    def _discrepancy(self, evaluate: Callable[[], T], method: str, generator: torch.Generator) -> float:
        """Return |⟨Jv, u⟩ - ⟨v, Jᵀu⟩|/‖Jv‖ for random u and v."""
        v = [_normal(parameter, generator) for parameter in self.parameters]
        seen: list[Tensor] = []

        def random(_: T, tangent: Tensor) -> Tensor:
            u = torch.randn(tangent.shape, generator=generator, dtype=tangent.dtype, device=tangent.device)
            seen[:] = [tangent, u]
            return u

        gradients = self._one(evaluate, method, v, random)
        tangent, u = (value.double() for value in seen)
        pairs = zip(gradients, v, strict=True)
        found = sum(float((g.double() * one.double()).sum()) for g, one in pairs if g is not None)
        difference, size = float((tangent * u).sum()) - found, float(torch.linalg.vector_norm(tangent))
        return abs(difference) / size if size else float(difference != 0)

    def _rounding(self) -> float:
        """Return the discrepancy that rounding explains, in the lowest precision used: no better method is needed."""
        return (16 if self._eps() > 1e-4 else 1e3) * self._eps()

    def _largest(self) -> float:
        """Return the discrepancy that is accepted if no method does better."""
        return _LARGEST[self._eps() > 1e-4]

    def _eps(self) -> float:
        kind, used = self.parameters[0].device.type, {parameter.dtype for parameter in self.parameters}
        if torch.is_autocast_enabled(kind):
            used.add(torch.get_autocast_dtype(kind))
        return max(torch.finfo(dtype).eps for dtype in used)

    def _agrees(
        self,
        evaluate: Callable[[], T],
        group: Sequence[Tensor],
        together: Sequence[Tensor | None],
        middle: Callable[[T, Tensor], Tensor],
    ) -> bool:
        """Whether the first product of the first block equals that of the vector alone, up to rounding."""
        if self._compared:
            return True
        self._compared = True
        alone = self._one(evaluate, self.method, [v[0] for v in group], middle)
        sizes, differences = [0.0], [0.0]
        for x, y, parameter in zip(together, alone, self.parameters, strict=True):
            expected = torch.zeros_like(parameter) if y is None else y
            sizes.append(float(torch.linalg.vector_norm(expected)))
            differences.append(float(torch.linalg.vector_norm(expected if x is None else x[0] - expected)))
        self.several = math.hypot(*differences) <= self._largest() * math.hypot(*sizes)
        return self.several

    def _one(
        self, evaluate: Callable[[], T], method: str, v: Sequence[Tensor], middle: Callable[[T, Tensor], Tensor]
    ) -> list[Tensor | None]:
        """Return the product of one vector, by one forward pass; v is scaled if float16 is involved."""
        with _unfused_kernels(self.model, "plain" in method):
            if not self._half:
                return self._run(evaluate, method, v, middle, 1.0)
            largest = math.hypot(*(float(one.abs().amax()) for one in v if one.numel()))
            if not math.isfinite(largest):
                raise ValueError(message("v", "finite", "NaN or infinity"))
            scale = 2.0 ** -math.ceil(math.log2(largest)) if largest else 1.0
            while True:
                try:
                    return self._run(evaluate, method, v, middle, scale)
                except _OverflowError:
                    scale /= 16

    def _run(
        self,
        evaluate: Callable[[], T],
        method: str,
        v: Sequence[Tensor],
        middle: Callable[[T, Tensor], Tensor],
        scale: float,
    ) -> list[Tensor | None]:
        """Return the product of v, with v multiplied by `scale` inside the model against underflow in float16."""
        tangents = [(one * scale).to(parameter) for one, parameter in zip(v, self.parameters, strict=True)]

        def pull(outputs: T, logits: Tensor, tangent: Tensor) -> list[Tensor | None]:
            tangent = tangent.detach().to(torch.promote_types(tangent.dtype, torch.float32))
            if self._half and scale > 2.0**-40 and not bool(torch.isfinite(tangent).all()):
                raise _OverflowError
            u = middle(outputs, tangent / scale)
            self._half_logits = logits.dtype == torch.float16
            if not (self._half or self._half_logits):
                return self._backward(logits, u, keep_graph=False)[0]
            size = min(largest_scale(u) or 1.0, 2.0**120)  # so that its scale for float16 is right for any v
            gradients, larger = self._backward(logits, u * size, keep_graph=False)
            return [None if g is None else g.float() / larger / size for g in gradients]

        if method.startswith("double"):
            outputs = evaluate()
            return pull(outputs, self.logits_of(outputs), self._twice(self.logits_of(outputs), tangents))

        def work() -> tuple[T, Tensor, Tensor]:
            outputs = evaluate()
            logits, tangent = forward_ad.unpack_dual(self.logits_of(outputs))  # type: ignore[no-untyped-call]
            return outputs, logits, torch.zeros_like(logits) if tangent is None else tangent.detach()

        with forward_ad.dual_level(), _padding_fixed(self.model):
            pairs = zip(self.names, self.parameters, tangents, strict=True)
            duals = {f"model.{name}": forward_ad.make_dual(p, one) for name, p, one in pairs}  # type: ignore[no-untyped-call]
            found = functional_call(self._whole, duals, (work,))
        return pull(*found)  # outside: inside, tangents would go through the backward pass, too

    def _twice(self, logits: Tensor, tangents: Sequence[Tensor]) -> Tensor:
        """Return J v as the derivative of ⟨Jᵀw, v⟩ in w."""
        w = torch.zeros_like(logits, requires_grad=True)
        rows = torch.autograd.grad(logits, self.parameters, w, create_graph=True, allow_unused=True)
        pairs = [(row, one) for row, one in zip(rows, tangents, strict=True) if row is not None and row.requires_grad]
        if not pairs:
            return torch.zeros_like(logits)
        (tangent,) = torch.autograd.grad(
            [row for row, _ in pairs], w, [one for _, one in pairs], retain_graph=True, allow_unused=True
        )
        return torch.zeros_like(logits) if tangent is None else tangent

    def _together(
        self, evaluate: Callable[[], T], vectors: Sequence[Tensor], middle: Callable[[T, Tensor], Tensor]
    ) -> Sequence[Tensor | None] | None:
        """Return the products of several vectors by two forward passes and one backward; None if vmap fails."""
        primals = {f"model.{name}": p.detach() for name, p in zip(self.names, self.parameters, strict=True)}
        stacked = [v.to(p) for v, p in zip(vectors, self.parameters, strict=True)]

        def push(tangents: dict[str, Tensor]) -> Tensor:
            def logits(values: dict[str, Tensor]) -> Tensor:
                found: Tensor = functional_call(self._whole, values, (lambda: self.logits_of(evaluate()),))
                return found

            return jvp(logits, (primals,), (tangents,))[1]  # type: ignore[no-any-return]

        try:
            with (
                warnings.catch_warnings(),
                _unfused_kernels(self.model, "plain" in self.method),
                _padding_fixed(self.model),
            ):
                warnings.simplefilter("ignore")  # of operations that are looped over instead
                with torch.no_grad():
                    tangents = torch.vmap(push, randomness="same")(dict(zip(primals, stacked, strict=True)))
                outputs = evaluate()
                logits = self.logits_of(outputs)
                tangents = tangents.to(torch.promote_types(tangents.dtype, torch.float32))
                cotangents = torch.stack([middle(outputs, one) for one in tangents]).to(logits.dtype)
                return torch.autograd.grad(
                    logits, self.parameters, cotangents, allow_unused=True, is_grads_batched=True
                )
        except Exception:  # an operation that cannot be vectorised; a single vector works or raises the real error
            self.several = False
            return None


class _MeasuredMiddle(Generic[T]):
    """A middle function that also records ⟨Jv, u⟩ and ‖Jv‖‖u‖ of what goes in and comes out."""

    def __init__(self, middle: Callable[[T, Tensor], Tensor]) -> None:
        self._middle = middle
        self._sizes: list[Tensor] = []

    def __call__(self, outputs: T, tangent: Tensor) -> Tensor:
        u = self._middle(outputs, tangent)
        with torch.autocast(u.device.type, enabled=False):
            inner = torch.linalg.vecdot(tangent, u).sum()
            self._sizes.append(torch.stack([inner, torch.linalg.vector_norm(tangent) * torch.linalg.vector_norm(u)]))
        return u

    def sizes(self) -> Tensor:
        """Return ⟨Jv, u⟩ and ‖Jv‖‖u‖ for each v, [m, 2]."""
        return torch.stack(self._sizes)


class _OverflowError(RuntimeError):
    """J v has left the range of float16."""


def _load_forward_mode() -> None:
    """Make a first dual number, at which torch compiles formulas and warns of its own deprecated calls."""
    with warnings.catch_warnings(), forward_ad.dual_level():
        warnings.simplefilter("ignore")
        forward_ad.make_dual(torch.zeros(1), torch.zeros(1))  # type: ignore[no-untyped-call]


def _normal(like: Tensor, generator: torch.Generator) -> Tensor:
    dtype = torch.promote_types(like.dtype, torch.float32)
    return torch.randn(like.shape, generator=generator, dtype=dtype, device=generator.device).to(like.device)


@contextmanager
def _unfused_kernels(model: nn.Module, unfused: bool) -> Iterator[None]:
    """Compute attention by matrix products and recurrent layers without cuDNN, if `unfused`."""
    with ExitStack() as stack:
        if unfused:
            stack.enter_context(sdpa_kernel(SDPBackend.MATH))
            if any(isinstance(module, nn.RNNBase) for module in model.modules()):
                before = torch.backends.cudnn.enabled
                stack.callback(setattr, torch.backends.cudnn, "enabled", before)
                torch.backends.cudnn.enabled = False
        yield


@contextmanager
def _padding_fixed(model: nn.Module) -> Iterator[None]:
    """Give padding rows of embeddings no tangent in forward mode, as backward passes give them no gradient."""

    def fix(module: nn.Embedding, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor) -> Tensor:
        ids = args[0] if args else kwargs["input"]
        return torch.where((ids == module.padding_idx)[..., None], output.detach(), output)

    embeddings = [m for m in model.modules() if isinstance(m, nn.Embedding) and m.padding_idx is not None]
    with ExitStack() as stack:
        for module in embeddings:
            handle = module.register_forward_hook(fix, with_kwargs=True, prepend=True)
            stack.callback(handle.remove)
        yield
