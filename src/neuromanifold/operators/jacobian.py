"""Products Jᵀ M J v for one batch, with J = ∂z/∂θ: forward mode and then an ordinary backward, in one forward pass.

dual parameters (θ, v) ─► logits (z, Jv) ─► u = M Jv ─► Jᵀu through the graph of z

Where an operation has no forward mode, J v comes from differentiating w ↦ Jᵀw, which is linear in w, once more (double
backward).  Fused attention and fused recurrent layers have neither, so they run unfused then.  The first batch shows
which of these methods works: ⟨Jv, u⟩ = ⟨v, Jᵀu⟩ must hold for random u and v, which fails if a use of a parameter is
missed.  The same is checked with the u and v of all batches, at no cost, since later ones may take other branches.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.func import functional_call, jvp
from torch.nn.attention import SDPBackend, sdpa_kernel

from neuromanifold.core.checks import message, promoted
from neuromanifold.persample.backward import BatchBackward, largest_scale
from neuromanifold.problem.batches import dtypes_in_use
from neuromanifold.problem.outputs import Outputs

METHODS = ("forward mode", "forward mode, unfused kernels", "double backward", "double backward, unfused kernels")
_BLOCK_NUMBERS = {True: 2**20, False: 2**25}  # of the vectors that go through the model together, on a CPU; on a GPU
_BLOCK_VECTORS = 8  # at most: activations are as many times larger

Evaluate = Callable[[], Outputs]
ToCotangents = Callable[[Outputs, Sequence[Tensor]], Sequence[Tensor]]
"""From outputs, and J v of some vectors v (float32 or better), to their cotangents u = M J v."""


class JacobianProduct(NamedTuple):
    """Jᵀu for the cotangents u that were made of J v, for one vector v or for several, stacked."""

    gradients: Sequence[Tensor | None]  # Jᵀu, one for each parameter; None: zero
    tangents: Tensor  # J v, [m, B, ..., C]
    cotangents: Tensor  # u, [m, B, ..., C]
    outputs: Outputs

    def sizes(self) -> Tensor:
        """⟨Jv, u⟩ and ‖Jv‖‖u‖ of each vector, [m, 2]."""
        tangents, u = self.tangents.flatten(1), self.cotangents.flatten(1)
        with torch.autocast(u.device.type, enabled=False):
            norms = torch.linalg.vector_norm(tangents, dim=1) * torch.linalg.vector_norm(u, dim=1)
            return torch.stack([torch.linalg.vecdot(tangents, u), norms], 1)


class Tolerance(NamedTuple):
    """How far ⟨Jv, u⟩ and ⟨v, Jᵀu⟩ may be apart, over ‖Jv‖ for random u, in the lowest precision that is used."""

    eps: float
    rounding: float  # explained by rounding: no better method is looked for
    largest: float  # accepted if no method does better; float32 may be TF32, float64 float32
    checks: int  # of a method; in half precision a single one could pass by chance

    @classmethod
    def of(cls, parameters: Sequence[Tensor]) -> Tolerance:
        """The tolerance for the dtypes of the parameters, and that of autocast where it is on."""
        eps = max(torch.finfo(dtype).eps for dtype in dtypes_in_use(parameters, parameters[0].device))
        return cls(eps, 16 * eps, 0.3, 8) if eps > 1e-4 else cls(eps, 1e3 * eps, 0.02, 2)


class WithParameters(nn.Module):
    """A model whose parameters `functional_call` replaces (as "model.NAME") while a function that calls it runs."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model, self.training = model, False

    def forward(self, function: Callable[[], Any]) -> Any:
        """Call a function, which calls the model, while parameters are replaced."""
        return function()


class JacobianProducts:
    """Jᵀ M J v for one batch after the other, by the method that `choose` finds on the first one."""

    def __init__(self, model: nn.Module, parameters: Mapping[str, nn.Parameter]) -> None:
        self.model, self.parameters = model, list(parameters.values())
        self.method = ""
        """How J v is computed, one of `METHODS`; empty before the first batch."""

        self.vectorized = True
        """Whether several vectors go through the model together; False once that has failed."""

        self._names = [f"model.{name}" for name in parameters]
        self._with_parameters = WithParameters(model)
        self._padded = [m for m in model.modules() if isinstance(m, nn.Embedding) and m.padding_idx is not None]
        self._size = max(1, sum(parameter.numel() for parameter in self.parameters))
        self._checked_block = False  # against a single vector
        self._discrepancy = 0.0  # of the method on the first batch
        self._half = self._half_logits = False  # whether float16 is involved; whether the logits have it
        self._scaled_backward: BatchBackward | None = None  # where it is

    def choose(self, evaluate: Evaluate) -> None:
        """Find the first method that works on a batch (which must not be empty)."""
        self.begin_pass()
        generator = torch.Generator(self.parameters[0].device).manual_seed(0)
        _load_forward_mode()
        tolerance, errors = Tolerance.of(self.parameters), dict[str, float]()
        first: Exception | None = None
        for method in METHODS:
            try:
                checks = [self._check(evaluate, method, generator) for _ in range(tolerance.checks)]
                errors[method] = math.hypot(*checks) / math.sqrt(len(checks))
            except torch.OutOfMemoryError:
                raise
            except Exception as error:  # of any kind: operations without derivatives raise different errors
                first = first or error
                continue
            if errors[method] <= tolerance.rounding:
                break
        best = min(errors.values(), default=math.inf)
        if best <= tolerance.largest:
            self.method = next(method for method in errors if errors[method] <= max(10 * best, tolerance.rounding))
            self._discrepancy = errors[self.method]
            return
        advice = (
            "Leave out with `parameters` what its operations cannot be differentiated in, or take nm.fisher_factors."
        )
        got = "one with derivatives that are " + ("NaN" if any(map(math.isnan, errors.values())) else "inconsistent")
        got = f"one that fails ({type(first).__name__}: {first})" if first else got
        raise ValueError(message("model", "differentiable in forward mode, or twice", got, advice)) from first

    def begin_pass(self) -> None:
        """Check whether float16 is involved: autocast may have changed since the last pass over the data."""
        dtypes = dtypes_in_use(self.model.parameters(), self.parameters[0].device)
        half = self._half_logits or torch.float16 in dtypes
        if half != self._half:
            self._half, self._scaled_backward = half, None

    def __call__(
        self, evaluate: Evaluate, vectors: Sequence[Tensor], to_cotangents: ToCotangents
    ) -> Iterator[tuple[slice, JacobianProduct]]:
        """Yield the products of vectors [m, *shape] with the range of each among them: one, or a few at a time."""
        step = 1
        if self.vectorized and self.method.startswith("forward mode") and not self._half:
            numbers = _BLOCK_NUMBERS[self.parameters[0].device.type == "cpu"]
            step = max(1, min(_BLOCK_VECTORS, numbers // self._size, len(vectors[0])))
        for start in range(0, len(vectors[0]), step):
            block = [v[start : start + step] for v in vectors]
            several = len(block[0]) > 1 and self.vectorized
            product = self._vectorized_product(evaluate, block, to_cotangents) if several else None
            if product is not None and self._is_right(product, evaluate, block, to_cotangents):
                yield slice(start, start + step), product
                continue
            for i, v in enumerate(zip(*block, strict=True), start):
                yield slice(i, i + 1), self._product(evaluate, self.method, v, to_cotangents)

    def compare(self, vectors: Tensor, products: Tensor, sizes: Tensor) -> None:
        """Raise unless ⟨v, Jᵀu⟩ = ⟨Jv, u⟩ over all batches, for v [m, P], their products and the sums of `sizes`.

        Where v is nearly in the kernel of J both are rounding, of the size of ‖v‖‖Jᵀu‖.
        """
        inner, tolerance = (vectors * products).sum(1), Tolerance.of(self.parameters)
        rounding = torch.linalg.vector_norm(vectors, dim=1) * torch.linalg.vector_norm(products, dim=1)
        relative = min(tolerance.largest, 1e3 * max(self._discrepancy, tolerance.eps, 1e-9))
        allowed = (relative * (sizes[:, 1] + rounding / 2)).clamp(min=1e-30)  # below, products underflow
        if bool(((sizes[:, 0] - inner).abs() > allowed).any()):
            got = f"different ones in some batch by {self.method}, which was right for the first batch"
            advice = "Put a batch that shows it first (one with padding, say): the method is chosen by it."
            raise ValueError(message("model", "one with the same derivatives in both modes", got, advice))

    def _check(self, evaluate: Evaluate, method: str, generator: torch.Generator) -> float:
        """Return |⟨Jv, u⟩ - ⟨v, Jᵀu⟩|/‖Jv‖ for random u and v."""

        def normal(like: Tensor) -> Tensor:
            made = torch.randn(like.shape, generator=generator, dtype=promoted(like.dtype), device=generator.device)
            return made.to(like.device)

        v = [normal(parameter) for parameter in self.parameters]
        product = self._product(evaluate, method, v, lambda _, tangents: [*map(normal, tangents)])
        pairs, tangent = zip(product.gradients, v, strict=True), product.tangents.double()
        inner = sum(float((g.double() * one.double()).sum()) for g, one in pairs if g is not None)
        difference = float((tangent * product.cotangents.double()).sum()) - inner
        size = float(torch.linalg.vector_norm(tangent))
        return abs(difference) / size if size else float(difference != 0)

    def _is_right(
        self, product: JacobianProduct, evaluate: Evaluate, block: Sequence[Tensor], to_cotangents: ToCotangents
    ) -> bool:
        """Whether the first vector of the first block has the same product alone, up to rounding."""
        if self._checked_block:
            return True
        self._checked_block = True
        alone = self._product(evaluate, self.method, [v[0] for v in block], to_cotangents)
        sizes, differences = [0.0], [0.0]
        for x, y, parameter in zip(product.gradients, alone.gradients, self.parameters, strict=True):
            expected = torch.zeros_like(parameter) if y is None else y
            sizes.append(float(torch.linalg.vector_norm(expected)))
            differences.append(float(torch.linalg.vector_norm(expected if x is None else x[0] - expected)))
        self.vectorized = math.hypot(*differences) <= Tolerance.of(self.parameters).largest * math.hypot(*sizes)
        return self.vectorized

    def _product(
        self, evaluate: Evaluate, method: str, v: Sequence[Tensor], to_cotangents: ToCotangents
    ) -> JacobianProduct:
        """Return the product of one vector, by one forward pass; v is scaled if float16 is involved."""
        with _unfused_kernels(self.model) if "unfused" in method else nullcontext():
            if not self._half:
                return self._scaled_product(evaluate, method, v, to_cotangents)
            largest = math.hypot(*(float(one.abs().amax()) for one in v if one.numel()))
            if not math.isfinite(largest):
                raise ValueError(message("v", "finite", "NaN or infinity"))
            scale = 2.0 ** -math.ceil(math.log2(largest)) if largest else 1.0
            while True:
                try:
                    return self._scaled_product(evaluate, method, v, to_cotangents, scale)
                except _OverflowError:
                    scale /= 16

    def _scaled_product(
        self, evaluate: Evaluate, method: str, v: Sequence[Tensor], to_cotangents: ToCotangents, scale: float = 1.0
    ) -> JacobianProduct:
        """Return the product of v, with v multiplied by `scale` inside the model against underflow in float16."""
        tangents = [(one * scale).to(parameter) for one, parameter in zip(v, self.parameters, strict=True)]
        if method.startswith("forward mode"):
            outputs, tangent = self._forward_mode(evaluate, tangents)
        else:
            outputs = evaluate()
            tangent = self._double_backward(outputs.logits, tangents)
        tangent = tangent.detach().to(promoted(tangent.dtype))
        if self._half and scale > 2.0**-40 and not bool(torch.isfinite(tangent).all()):
            raise _OverflowError
        logits, tangent = outputs.logits, tangent / scale
        (u,) = to_cotangents(outputs, [tangent])
        self._half_logits = logits.dtype == torch.float16
        gradients: Sequence[Tensor | None]
        if self._half or self._half_logits:
            self._scaled_backward = self._scaled_backward or BatchBackward(self.parameters, self._half)
            size = min(largest_scale(u) or 1.0, 2.0**120)  # so that its scale for float16 is right for any v
            found, larger = self._scaled_backward(logits, u * size, keep_graph=False)
            gradients = [None if g is None else g.float() / larger / size for g in found]
        else:
            gradients = torch.autograd.grad(logits, self.parameters, u.to(logits.dtype), allow_unused=True)
        return JacobianProduct(gradients, tangent[None], u[None], outputs)

    def _forward_mode(self, evaluate: Evaluate, tangents: Sequence[Tensor]) -> tuple[Outputs, Tensor]:
        """Return the outputs and J v, by one forward pass at dual numbers as parameters.

        The outputs have no tangent, since a backward pass would go through it, too.
        """
        with forward_ad.dual_level(), _padding_fixed(self._padded) if self._padded else nullcontext():
            duals = {
                name: forward_ad.make_dual(p, one)  # type: ignore[no-untyped-call]
                for name, p, one in zip(self._names, self.parameters, tangents, strict=True)
            }
            outputs = functional_call(self._with_parameters, duals, (evaluate,))
            logits, tangent = forward_ad.unpack_dual(outputs.logits)  # type: ignore[no-untyped-call]
        return outputs._replace(logits=logits), torch.zeros_like(logits) if tangent is None else tangent

    def _double_backward(self, logits: Tensor, tangents: Sequence[Tensor]) -> Tensor:
        """Return J v as the derivative of ⟨Jᵀw, v⟩ in w."""
        w = torch.zeros_like(logits, requires_grad=True)
        rows = torch.autograd.grad(logits, self.parameters, w, create_graph=True, allow_unused=True)
        pairs = [(row, one) for row, one in zip(rows, tangents, strict=True) if row is not None and row.requires_grad]
        if not pairs:
            return torch.zeros_like(logits)
        (tangent,) = torch.autograd.grad(
            [row for row, _ in pairs], w, [one for _, one in pairs], retain_graph=True, materialize_grads=True
        )
        return tangent

    def _vectorized_product(
        self, evaluate: Evaluate, vectors: Sequence[Tensor], to_cotangents: ToCotangents
    ) -> JacobianProduct | None:
        """Return the product of several vectors by two forward passes and one backward; None if vmap fails."""
        primals = {name: p.detach() for name, p in zip(self._names, self.parameters, strict=True)}
        stacked = {name: v.to(p) for (name, p), v in zip(primals.items(), vectors, strict=True)}

        def logits_at(values: dict[str, Tensor]) -> Tensor:
            return functional_call(self._with_parameters, values, (lambda: evaluate().logits,))  # type: ignore[no-any-return]

        def push_forward(tangents: dict[str, Tensor]) -> Tensor:
            return jvp(logits_at, (primals,), (tangents,))[1]  # type: ignore[no-any-return]

        unfused = _unfused_kernels(self.model) if "unfused" in self.method else nullcontext()
        try:
            with warnings.catch_warnings(), unfused, _padding_fixed(self._padded):
                warnings.simplefilter("ignore")  # of operations that are looped over instead
                with torch.no_grad():
                    tangents = torch.vmap(push_forward, randomness="same")(stacked)
                outputs = evaluate()
                tangents = tangents.to(promoted(tangents.dtype))
                cotangents = torch.stack([*to_cotangents(outputs, [*tangents])])
                scaled = cotangents.to(outputs.logits.dtype)
                gradients = torch.autograd.grad(
                    outputs.logits, self.parameters, scaled, allow_unused=True, is_grads_batched=True
                )
                return JacobianProduct(gradients, tangents, cotangents, outputs)
        except Exception:  # an operation that cannot be vectorized; a single vector works or raises the real error
            self.vectorized = False
            return None


class _OverflowError(RuntimeError):
    """J v has left the range of float16."""


def _load_forward_mode() -> None:
    """Make a first dual number, at which torch compiles formulas and warns of its own deprecated calls."""
    with warnings.catch_warnings(), forward_ad.dual_level():
        warnings.simplefilter("ignore")
        forward_ad.make_dual(torch.zeros(1), torch.zeros(1))  # type: ignore[no-untyped-call]


@contextmanager
def _unfused_kernels(model: nn.Module) -> Iterator[None]:
    """Compute attention by matrix products and recurrent layers without cuDNN."""
    with ExitStack() as stack:
        stack.enter_context(sdpa_kernel(SDPBackend.MATH))
        if any(isinstance(module, nn.RNNBase) for module in model.modules()):
            before = torch.backends.cudnn.enabled
            stack.callback(setattr, torch.backends.cudnn, "enabled", before)
            torch.backends.cudnn.enabled = False
        yield


@contextmanager
def _padding_fixed(embeddings: Sequence[nn.Embedding]) -> Iterator[None]:
    """Give their padding rows no tangent in forward mode, as backward passes give them no gradient."""

    def fix(module: nn.Embedding, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor) -> Tensor:
        if module.padding_idx is None:  # changed by the model itself
            return output
        ids = args[0] if args else kwargs["input"]
        return torch.where((ids == module.padding_idx)[..., None], output.detach(), output)

    with ExitStack() as stack:
        for module in embeddings:
            handle = module.register_forward_hook(fix, with_kwargs=True, prepend=True)
            stack.callback(handle.remove)
        yield
