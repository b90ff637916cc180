"""`fisher_kronecker`: a pass over the data for the factors, and one for the eigenvalues in their basis.

FactorSums      pass 1   L = Σ l lᵀ, R = Σ r rᵀ  ─►  eigenvectors U, V        (or those of `basis`)
EigenvalueSums  pass 2   E = Σ_n (Uᵀ G_n V)²                                 with noise that U and V have not seen
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn

from neuromanifold.core import Categorical
from neuromanifold.core.checks import check_reduction, integer_in_range, message, one_of, promoted
from neuromanifold.estimators import Adaptive, Estimator, Hutchinson
from neuromanifold.operators.kronecker.blocks import EigenBlock, Eigenvectors, Kind, dense_block, nearest, product_block
from neuromanifold.operators.kronecker.result import KroneckerFisher
from neuromanifold.operators.layout import ParameterLayout
from neuromanifold.persample.accumulate import Basis, EigenvalueSums, FactorShape, FactorSums, WeightSharing
from neuromanifold.problem.cotangents import Likelihood, batch_seed
from neuromanifold.problem.model import Selection, ShiftLabels
from neuromanifold.problem.problem import Problem
from neuromanifold.run.counts import Counts
from neuromanifold.run.fisher import make_provenance
from neuromanifold.run.loop import run
from neuromanifold.run.methods import Method, make_method
from neuromanifold.run.processes import together
from neuromanifold.run.settings import Checkpoint, Distributed, LoopOptions, Observer, Settings

_KINDS: tuple[Kind, ...] = ("kronecker", "table", "tied table")  # by FactorShape.tables
_SECOND = 2**31  # no batch has this number: its seed is that of the second pass


@torch.inference_mode(mode=False)
def fisher_kronecker(
    model: nn.Module | Callable[..., object],
    data: Iterable[object],
    estimator: Estimator | None = None,
    likelihood: Likelihood = Categorical,
    eigenvalues: Literal["corrected", "kronecker"] = "corrected",
    weight_sharing: WeightSharing = "expand",
    basis: KroneckerFisher | None = None,
    parameters: Selection = None,
    reduction: str = "mean",
    max_block: int = 1024,
    max_side: int = 8192,
    error_bars: bool = True,
    seed: int = 0,
    progress: bool | Observer = False,
    class_dim: int = -1,
    batch_dim: int = 0,
    ignore_index: int = -100,
    label_key: str = "labels",
    shift_labels: ShiftLabels = "auto",
    checkpoint: str | Path | Checkpoint | None = None,
    shard: tuple[int, int] | None = None,
    distributed: Distributed = "auto",
) -> KroneckerFisher:
    """Return F as a Kronecker-factored block for each layer: KFAC, or EKFAC with unbiased eigenvalues and error bars.

    The gradient of a sample for a layer's weight is G_n = Σ_t l_nt r_ntᵀ, with output gradients l and inputs r at its
    positions t (a bias is the weight of a further input that is always 1).  From the sums L = Σ l lᵀ and R = Σ r rᵀ,

        F_layer ≈ L ⊗ R/T = (U ⊗ V) (λ_L ⊗ λ_R)/T (U ⊗ V)ᵀ                         eigenvalues="kronecker": KFAC
        F_layer ≈ (U ⊗ V) diag(Σ_n (Uᵀ G_n V)²) (U ⊗ V)ᵀ                           eigenvalues="corrected": EKFAC

    where T is the number of terms in both sums.  The corrected eigenvalues are unbiased for the diagonal of F in that
    basis, with standard errors.  Cost: one backward pass for each batch and probe, twice (the second pass, for
    corrected eigenvalues, has noise that is independent of the basis), and the eigenvectors of two matrices for each
    layer. Arguments that are not listed are those of `fisher_diagonal`.

    Args:
        estimator: any that is right per sample; `nm.Hutchinson()` unless given, and `nm.Exact()` is type-2 KFAC.
        eigenvalues: "corrected" or "kronecker", as above.
        weight_sharing: "expand" takes each position of a sample (of a sequence, of a convolution) for a sample of its
            own; "reduce" sums output gradients and averages inputs over positions first (Eschenhagen et al. 2023).
        basis: an earlier result whose eigenvectors are taken: then there is one pass, and `weight_sharing` is that of
            the basis.  Results in one basis add, as those of shards.
        max_block: a parameter whose gradient is no such sum (norms, position tables, parameters without a rule) gets a
            dense block if it has at most that many entries, else dense blocks of its rows where these have max_block²
            numbers at most, else its diagonal.
        max_side: a factor with more features than that, such as a vocabulary, is diagonal.
        error_bars: standard errors of corrected eigenvalues; without them (NaN) the second pass takes no fourth powers.
        checkpoint: of the pass over the eigenvalues; the factors' is beside it, with ".factors" added to its name.

    Returns:
        A `KroneckerFisher`: products, damped solutions, samples, log-determinant and spectrum in closed form.

    Raises:
        TypeError, ValueError: an argument or a batch is not what is expected; the message says what is.

    Example:
        >>> F = nm.fisher_kronecker(model, data)
        >>> gradients = [torch.ones_like(parameter) for parameter in model.parameters()]
        >>> natural = F.solve(gradients, damping=0.1).x
        >>> [tuple(direction.shape) for direction in natural]
        [(8, 4), (8,), (3, 8), (3,)]
    """
    estimator = Hutchinson() if estimator is None else estimator
    one_of(eigenvalues, "eigenvalues", "corrected", "kronecker")
    one_of(weight_sharing, "weight_sharing", "expand", "reduce")
    problem = Problem.of(
        model, data, likelihood, parameters, class_dim, batch_dim, ignore_index, label_key, shift_labels
    )
    settings, view = Settings.of(estimator, "auto", seed), check_reduction(reduction)
    if settings.granularity == "batch":
        raise ValueError(message("estimator", "one that squares per-sample gradients", repr(estimator)))
    options = LoopOptions.of(progress, shard, checkpoint, "raise", distributed=distributed)
    limits = (
        integer_in_range(max_block, "max_block", 0, 2**20, "entries of a parameter with a dense block"),
        integer_in_range(max_side, "max_side", 1, 2**20, "features of a dense factor"),
    )
    layout = ParameterLayout.of(problem.parameters)
    both = eigenvalues == "corrected" and basis is None
    _check_combination(basis, layout, eigenvalues, options)
    blocks: list[EigenBlock] = [] if basis is None else [block for block in basis.blocks.values() if block.is_product]
    method: Method | None = None
    if basis is None:
        first = options
        if both:
            problem = replace(problem, data=problem.repeated().items())
            if options.checkpoint is not None:
                beside = Checkpoint(f"{options.checkpoint.path}.factors", options.checkpoint.every)
                first = replace(options, checkpoint=beside)
        method = make_method(problem, settings)  # of both passes: gradients are verified once
        blocks, counts = _factors(problem, settings, weight_sharing, limits, first, method)
        _share(blocks, options)
    if basis is not None or both:
        blocks, counts = _eigenvalues(problem, settings, blocks, limits[0], error_bars, options, method)
    sharing = weight_sharing if basis is None else basis.weight_sharing
    provenance = make_provenance(problem, settings, counts, options.shard)
    return KroneckerFisher(blocks, layout, counts.samples, provenance, view, counts.positions, sharing)


def _share(blocks: list[EigenBlock], options: LoopOptions) -> None:
    """Give all processes the eigenvectors and eigenvalues of the first, which need not be the same to the last bit."""
    found = [t for block in blocks for t in (block.left, block.right, block.eigenvalues, *(block.factor_values or ()))]
    with together(options.distributed is not False) as processes:
        if processes.several:
            for tensor in {id(t): t for t in found if t is not None}.values():
                processes.add(tensor.zero_() if processes.rank else tensor)
            processes.barrier(found[-1].device)  # type: ignore[union-attr]


def _check_combination(
    basis: KroneckerFisher | None, layout: ParameterLayout, eigenvalues: str, options: LoopOptions
) -> None:
    if basis is None:
        if eigenvalues == "corrected" and options.shard[1] > 1:
            advice = "Add up the shards' results with eigenvalues='kronecker' first, and give their sum as `basis`."
            got = "none: each shard would have eigenvectors of its own, and their results would not add"
            raise ValueError(message("basis", "given for corrected eigenvalues of a shard", got, advice))
        return
    if not isinstance(basis, KroneckerFisher):
        raise TypeError(message("basis", "an nm.KroneckerFisher or None", type(basis).__name__))
    if eigenvalues != "corrected":
        raise ValueError(message("basis", "None for eigenvalues='kronecker', which are those of the factors", "one"))
    if basis.layout != layout:
        differ = [name for name in layout.shapes if layout.shapes[name] != basis.layout.shapes.get(name)]
        got = f"one that differs in {differ[0]!r}" if differ else "one of more parameters, or in another order"
        raise ValueError(message("basis", "a result of the same parameters of the same model", got))


def _factors(
    problem: Problem,
    settings: Settings,
    sharing: WeightSharing,
    limits: tuple[int, int],
    options: LoopOptions,
    method: Method,
) -> tuple[list[EigenBlock], Counts]:
    """Return the blocks of one pass over the data, with the eigenvalues of the factors."""
    names, tensors = list(problem.parameters), list(problem.parameters.values())
    sums = FactorSums(problem.parameters, _biases(names), sharing, *limits)
    counts = run(problem, settings, sums, replace(options, description="Kronecker factors"), method=method)
    sums.verify()
    known: dict[int, Eigenvectors] = {}
    blocks = [
        _from_factors(sums, shape, names, _padding_row(problem, tensors[i]), known) for i, shape in sums.shapes.items()
    ]
    return _in_order([*blocks, *_others(names, tensors, sums)], names, tensors), counts


def _eigenvalues(
    problem: Problem,
    settings: Settings,
    blocks: list[EigenBlock],
    max_block: int,
    error_bars: bool,
    options: LoopOptions,
    method: Method | None,
) -> tuple[list[EigenBlock], Counts]:
    """Return the blocks with their eigenvectors and the diagonal of F in that basis, and the other blocks anew."""
    names, tensors = list(problem.parameters), list(problem.parameters.values())
    products = {names.index(block.names[0]): block for block in blocks if block.is_product}
    bases = {}
    for i, block in products.items():
        dtype, device = promoted(tensors[i].dtype), tensors[i].device
        left, right = (None if side is None else side.to(device, dtype) for side in (block.left, block.right))
        bias = names.index(block.names[1]) if len(block.names) > 1 else None
        shape = FactorShape(i, bias, *block.eigenvalues.shape, block.turned, _KINDS.index(block.kind))  # type: ignore[call-arg]
        bases[i] = Basis(shape, left, right)
    random, similar = settings.estimator.noise_factor > 0, not isinstance(settings.estimator, Adaptive)
    sums = EigenvalueSums(problem.parameters, bases, max_block, random and error_bars, similar)
    independent = replace(settings, seed=batch_seed(settings.seed, _SECOND) & (2**63 - 1))
    counts = run(problem, independent, sums, replace(options, description="Corrected eigenvalues"), method=method)
    squares, errors = sums.diagonal.squares, sums.diagonal.standard_errors(in_place=True)
    if random and not error_bars:
        errors = [value.new_full((1, 1, 1), torch.nan) for value in errors]
    corrected = [
        replace(
            block,
            left=bases[i].left,
            right=bases[i].right,
            eigenvalues=squares[i].view(block.eigenvalues.shape),
            stderr=errors[i].reshape(block.eigenvalues.shape if error_bars or not random else (1, 1, 1)),
        )
        for i, block in products.items()
    ]
    return _in_order([*corrected, *_others(names, tensors, sums)], names, tensors), counts


def _from_factors(
    sums: FactorSums, shape: FactorShape, names: list[str], padding: int | None, known: dict[int, Eigenvectors]
) -> EigenBlock:
    """Return the block of a weight, with its bias where they belong together."""
    members = (names[shape.weight], *([] if shape.bias is None else [names[shape.bias]]))
    like = EigenBlock(members, _KINDS[shape.tables], torch.empty(0), turned=shape.turned)
    keys = [key for key in sums.terms if key.split(".")[0] == str(shape.weight)]
    parts = []
    for key in keys:
        left, right, terms = sums.factor(f"{key}.left"), sums.factor(f"{key}.right"), float(sums.terms[key])
        if key.endswith(".table") and padding is not None:  # looked up, but without a gradient
            terms -= float(left[0, padding])
            left[0, padding] = 0.0
        parts.append((left, right, max(terms, 1.0)))
    if len(parts) == 1:
        return product_block(like, *parts[0], known)
    return product_block(like, *nearest([(_symmetric(left), _symmetric(right), t) for left, right, t in parts]), 1.0)


def _symmetric(factor: Tensor) -> Tensor:
    return factor if factor.ndim == 2 else factor.tril() + factor.tril(-1).mT


def _others(names: list[str], tensors: list[nn.Parameter], sums: FactorSums | EigenvalueSums) -> list[EigenBlock]:
    """Return the dense blocks and the diagonals."""
    found, squares = [], sums.diagonal.squares
    for i in sorted(sums.remainder.numbers):
        block = sums.remainder.blocks.get(i)
        if block is None:
            found.append(EigenBlock((names[i],), "diagonal", squares[i].reshape(1, tensors[i].numel(), 1)))
        else:
            found.append(dense_block((names[i],), block, "dense" if len(block) == 1 else "dense rows"))
    return found


def _in_order(blocks: list[EigenBlock], names: list[str], tensors: list[nn.Parameter]) -> list[EigenBlock]:
    """Return blocks for all parameters in the model's order: zeros for those that no gradient came to."""
    known = {name for block in blocks for name in block.names}
    for name, tensor in zip(names, tensors, strict=True):
        if name not in known:
            zeros = torch.zeros(1, tensor.numel(), 1, dtype=promoted(tensor.dtype), device=tensor.device)
            blocks.append(EigenBlock((name,), "unused", zeros))
    return sorted(blocks, key=lambda block: names.index(block.names[0]))


def _biases(names: list[str]) -> dict[int, int]:
    """Return for each weight, by number, the parameter of the same module that may be its bias, going by the names."""
    numbers, found = {name: i for i, name in enumerate(names)}, {}
    for name, i in numbers.items():
        module, _, own = name.rpartition(".")
        bias = f"{module}.{own.replace('weight', 'bias')}" if module else own.replace("weight", "bias")
        if "weight" in own and bias in numbers:
            found[i] = numbers[bias]
    return found


def _padding_row(problem: Problem, parameter: Tensor) -> int | None:
    """Return the row of a table of embeddings that gets no gradient, since it stands for padding."""
    for module in problem.model.modules():
        if isinstance(module, nn.Embedding) and module.weight is parameter and module.padding_idx is not None:
            return module.padding_idx
    return None
