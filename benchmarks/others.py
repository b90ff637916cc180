"""What other tools give for the diagonal of a Fisher information, each behind one small function.

    pip install --no-deps -r benchmarks/others-requirements.txt  # see there
    python benchmarks/others.py [--only MLP]

checks every tool on small versions of the benchmark's networks against a float64 loop over samples (and classes) and
prints right, wrong (by how much, where) or fails (why).  Two quantities, both sums over the samples of a batch:

    per sample   Σ_n (∂ℓ_n/∂θ)², the empirical Fisher of given labels
    exact        Σ_n Σ_c p_c (∂ log p_c/∂θ)², the Fisher

An adapter gets (model, inputs, labels, classes), prepares what a user would prepare once, and returns the function
that does the work: a dict of name -> tensor.  Models map one tensor to logits (`tensor_model` wraps those that do not).
"""

from __future__ import annotations

import argparse
import copy
import importlib.metadata
import math
import warnings
from collections.abc import Callable
from typing import NamedTuple

import torch
from common import keep, setting, table
from models import NETWORKS, Task, task
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, log_softmax

Diagonal = dict[str, Tensor]
Work = Callable[[], Diagonal]
Adapter = Callable[[nn.Module, Tensor, Tensor, int], Work]


class Wrapped(nn.Module):
    """A Hugging Face classifier as a function of token ids alone."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor) -> Tensor:
        """Logits."""
        return self.model(input_ids=ids).logits


def tensor_model(task: Task) -> tuple[nn.Module, Tensor]:
    """A model that maps one tensor to logits, which all tools take, and that tensor.  The model is a copy."""
    model = copy.deepcopy(task.model)
    return (Wrapped(model), task.inputs["input_ids"]) if isinstance(task.inputs, dict) else (model, task.inputs)


# ------------------------------------------------------------------------------------------------ PyTorch by itself


def loop(model: nn.Module, inputs: Tensor, labels: Tensor, classes: int, samples: int | None = None) -> Work:
    """One backward pass for each sample; `samples`: only so many of them."""
    del classes
    return lambda: _loop(model, inputs[:samples], lambda scores, n: scores[labels[n]].unsqueeze(0))


def loop_exact(model: nn.Module, inputs: Tensor, labels: Tensor, classes: int, samples: int | None = None) -> Work:
    """One backward pass for each sample and class; `samples`: only so many of them."""
    del labels, classes
    return lambda: _loop(model, inputs[:samples], lambda scores, n: scores * (scores.detach() / 2).exp())  # noqa: ARG005


def _loop(model: nn.Module, inputs: Tensor, targets: Callable[[Tensor, int], Tensor]) -> Diagonal:
    named = dict(model.named_parameters())
    total = {name: torch.zeros_like(parameter) for name, parameter in named.items()}
    for n in range(len(inputs)):
        values = targets(log_softmax(model(inputs[n : n + 1]), -1)[0], n)
        for value in values:
            gradients = torch.autograd.grad(value, list(named.values()), retain_graph=True)
            for name, gradient in zip(named, gradients, strict=True):
                total[name].addcmul_(gradient, gradient)
    return total


def func(model: nn.Module, inputs: Tensor, labels: Tensor, classes: int) -> Work:
    """torch.func: vmap(grad) over samples, which holds a gradient for each of them."""
    chosen = nn.functional.one_hot(labels, classes)  # [B, C]; inside vmap a label could not be an index
    return lambda: _squares(model, inputs, chosen, lambda scores, one_hot: (scores * one_hot).sum())


def func_exact(model: nn.Module, inputs: Tensor, labels: Tensor, classes: int, first: int | None = None) -> Work:
    """torch.func: vmap(grad) over samples, for one class after the other; `first`: only so many of them."""
    del labels

    def target(scores: Tensor, one_hot: Tensor) -> Tensor:
        return (scores * (scores.detach() / 2).exp() * one_hot).sum()

    def work() -> Diagonal:
        total: Diagonal = {}
        for row in torch.eye(classes)[:first]:
            part = _squares(model, inputs, row.expand(len(inputs), -1), target)
            total = {name: total[name] + value for name, value in part.items()} if total else part
        return total

    return work


def _squares(model: nn.Module, inputs: Tensor, chosen: Tensor, target: Callable[[Tensor, Tensor], Tensor]) -> Diagonal:
    parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}
    buffers = dict(model.named_buffers())

    def score(parameters: Diagonal, x: Tensor, one_hot: Tensor) -> Tensor:
        logits = torch.func.functional_call(model, (parameters, buffers), (x.unsqueeze(0),))
        return target(log_softmax(logits[0], -1), one_hot)

    gradients = torch.func.vmap(torch.func.grad(score), (None, 0, 0))(parameters, inputs, chosen)
    return {name: gradient.square().sum(0) for name, gradient in gradients.items()}


# ------------------------------------------------------------------------------------------------------ other tools


def backpack(model: nn.Module, inputs: Tensor, labels: Tensor, classes: int) -> Work:
    """BackPACK's SumGradSquared."""
    from backpack import extensions

    del classes
    return _backpack(model, inputs, labels, extensions.SumGradSquared(), convert=False)


def backpack_exact(model: nn.Module, inputs: Tensor, labels: Tensor, classes: int) -> Work:
    """BackPACK's DiagGGNExact, after BackPACK's own converter for networks that are no chain of modules."""
    from backpack import extensions

    del classes
    return _backpack(model, inputs, labels, extensions.DiagGGNExact(), convert=not _is_chain(model))


def _is_chain(model: nn.Module) -> bool:
    return isinstance(model, nn.Sequential) and not any(list(module.children()) for module in model)


def _backpack(model: nn.Module, inputs: Tensor, labels: Tensor, extension: object, convert: bool) -> Work:
    import backpack

    names = {id(parameter): name for name, parameter in model.named_parameters()}
    model = backpack.extend(model, use_converter=convert)
    if convert:  # a traced copy, of which BackPACK says that it may reorder parameters: names are those of the trace
        names = {id(parameter): name for name, parameter in model.named_parameters()}
    loss = backpack.extend(nn.CrossEntropyLoss(reduction="sum"))

    def work() -> Diagonal:
        model.zero_grad(set_to_none=True)
        with backpack.backpack(extension):
            loss(model(inputs), labels).backward()
        found = {}
        for parameter in model.parameters():
            if hasattr(parameter, extension.savefield):
                found[names[id(parameter)]] = getattr(parameter, extension.savefield)
                delattr(parameter, extension.savefield)
        return found

    return work


def opacus(model: nn.Module, inputs: Tensor, labels: Tensor, classes: int) -> Work:
    """Opacus' gradient for each sample, squared and added.

    Opacus only looks at modules in training mode: those with parameters are put there, which changes no output except
    for BatchNorm; that one stays in eval mode, as the network demands.
    """
    from opacus import GradSampleModule

    del classes
    for module in model.modules():
        if list(module.parameters(recurse=False)) and not isinstance(module, nn.BatchNorm2d):
            module.training = True
    wrapped = GradSampleModule(model, loss_reduction="sum", strict=False)  # strict refuses buffers, whatever they hold

    def work() -> Diagonal:
        wrapped.zero_grad(set_to_none=True)
        cross_entropy(wrapped(inputs), labels, reduction="sum").backward()
        found = {}
        for name, parameter in model.named_parameters():
            if getattr(parameter, "grad_sample", None) is not None:
                found[name] = parameter.grad_sample.square().sum(0)
                parameter.grad_sample = None
        return found

    return work


def asdl(model: nn.Module, inputs: Tensor, labels: Tensor, classes: int) -> Work:
    """ASDL's empirical Fisher, diagonal."""
    del classes
    return _asdl(model, inputs, labels, "fisher_emp")


def asdl_exact(model: nn.Module, inputs: Tensor, labels: Tensor, classes: int) -> Work:
    """ASDL's exact Fisher, diagonal."""
    del classes
    return _asdl(model, inputs, labels, "fisher_exact")


def _asdl(model: nn.Module, inputs: Tensor, labels: Tensor, kind: str) -> Work:
    from asdl import FisherConfig, get_fisher_maker

    maker = get_fisher_maker(model, FisherConfig(kind, ["diag"], loss_type="cross_entropy", data_size=1))
    logits = maker.setup_model_call(model, inputs)
    maker.setup_loss_call(cross_entropy, logits, labels, reduction="sum")

    def work() -> Diagonal:
        maker.forward_and_backward()
        found = {}
        for name, module in model.named_modules():
            diagonal = getattr(getattr(module, "fisher", None), "diag", None)
            for key in ("weight", "bias"):
                if getattr(diagonal, key, None) is not None:
                    found[f"{name}.{key}"] = getattr(diagonal, key)
        return found

    return work


def nngeometry(model: nn.Module, inputs: Tensor, labels: Tensor, classes: int) -> Work:
    """NNGeometry's PMatDiag of log p(y)."""
    from nngeometry.backend import TorchHooksJacobianBackend
    from nngeometry.layercollection import LayerCollection
    from nngeometry.object import PMatDiag

    del classes
    layers = LayerCollection.from_model(model)

    def function(x: Tensor, y: Tensor) -> Tensor:
        return log_softmax(model(x), -1).gather(1, y.unsqueeze(1))

    def work() -> Diagonal:
        generator = TorchHooksJacobianBackend(model, function, layer_collection=layers)
        return _by_layer(model, layers, len(inputs) * PMatDiag(generator, examples=(inputs, labels)).get_diag())

    return work


def nngeometry_exact(model: nn.Module, inputs: Tensor, labels: Tensor, classes: int) -> Work:
    """NNGeometry's FIM as a PMatDiag: one backward pass for all but one of the classes."""
    from nngeometry.layercollection import LayerCollection
    from nngeometry.metrics import FIM
    from nngeometry.object import PMatDiag
    from torch.utils.data import DataLoader, TensorDataset

    del classes
    layers = LayerCollection.from_model(model)
    loader = DataLoader(TensorDataset(inputs, labels), batch_size=len(inputs))
    return lambda: _by_layer(
        model, layers, len(inputs) * FIM(model, loader, PMatDiag, layer_collection=layers).get_diag()
    )


def _by_layer(model: nn.Module, layers: object, flat: Tensor) -> Diagonal:
    found, modules = {}, dict(model.named_modules())
    for name in layers.layers:
        start = layers.p_pos[name]
        for key, parameter in modules[name].named_parameters(recurse=False):  # weight, then bias
            found[f"{name}.{key}"] = flat[start : start + parameter.numel()].view_as(parameter)
            start += parameter.numel()
    return found


def curvlinops(model: nn.Module, inputs: Tensor, labels: Tensor, classes: int) -> Work:
    """curvlinops' hutchinson_diag of its empirical Fisher, one product: a random estimate."""
    from curvlinops import EFLinearOperator

    del classes
    return _curvlinops(EFLinearOperator, model, inputs, labels)


def curvlinops_exact(model: nn.Module, inputs: Tensor, labels: Tensor, classes: int) -> Work:
    """curvlinops' hutchinson_diag of its GGN, one product: a random estimate."""
    from curvlinops import GGNLinearOperator

    del classes
    return _curvlinops(GGNLinearOperator, model, inputs, labels)


def _curvlinops(kind: type, model: nn.Module, inputs: Tensor, labels: Tensor) -> Work:
    from curvlinops import hutchinson_diag
    from torch.nn.attention import SDPBackend, sdpa_kernel

    named = dict(model.named_parameters())
    loss = nn.CrossEntropyLoss(reduction="sum")
    operator = kind(model, loss, list(named.values()), [(inputs, labels)], check_deterministic=False)

    def work() -> Diagonal:
        with sdpa_kernel(SDPBackend.MATH):  # fused attention has no forward-mode derivative, which curvlinops takes
            flat = hutchinson_diag(operator, num_matvecs=1)
        pieces = flat.split([parameter.numel() for parameter in named.values()])
        return {name: piece.view_as(named[name]) for name, piece in zip(named, pieces, strict=True)}

    return work


class Tool(NamedTuple):
    """The distribution it comes in, and an adapter for each quantity it has."""

    distribution: str
    per_sample: Adapter
    exact: Adapter | None
    random: bool = False  # an estimate, to be judged by its spread


TOOLS = {
    "loop": Tool("torch", loop, loop_exact),
    "torch.func": Tool("torch", func, func_exact),
    "BackPACK": Tool("backpack-for-pytorch", backpack, backpack_exact),
    "Opacus": Tool("opacus", opacus, None),
    "ASDL": Tool("asdfghjkl", asdl, asdl_exact),
    "NNGeometry": Tool("nngeometry", nngeometry, nngeometry_exact),
    "curvlinops": Tool("curvlinops-for-pytorch", curvlinops, curvlinops_exact, random=True),
}


def version(tool: str) -> str | None:
    """Its version, or None where it is not installed.  Imports nothing: that takes long, and memory.

    By the name of the distribution, since ASDL shares its import name with another package.
    """
    try:
        return importlib.metadata.version(TOOLS[tool].distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


# ------------------------------------------------------------------------------------------------------------ check


def reference(small: Task, exact: bool) -> Diagonal:
    """The loop in float64."""
    model, inputs = tensor_model(small)
    inputs = inputs.double() if inputs.is_floating_point() else inputs
    return (loop_exact if exact else loop)(model.double(), inputs, small.labels, small.classes)()


def check(tool: str, name: str, exact: bool, draws: int = 100) -> str:
    """Right, wrong or fails, in one line, on the small version of a network."""
    adapter = TOOLS[tool].exact if exact else TOOLS[tool].per_sample
    if adapter is None:
        return "not offered"
    small = task(name, small=True)
    truth = reference(small, exact)
    try:
        work = adapter(*tensor_model(small), small.labels, small.classes)
        if TOOLS[tool].random:
            return _spread(truth, [work() for _ in range(draws)])
        found = {key: value.detach().clone() for key, value in work().items()}
        again = work()  # a second batch must not remember the first
    except Exception as error:
        return failure(error)
    verdict = compare(truth, found)
    second = compare(truth, again)
    return verdict if second.split(" (")[0] == verdict.split(" (")[0] else f"{verdict}; second call: {second}"


def failure(error: Exception) -> str:
    """An exception in one line."""
    return f"fails: {type(error).__name__}: {' '.join(str(error).split())[:160]}"


def compare(truth: Diagonal, found: Diagonal) -> str:
    """Per parameter, the largest error over the largest entry (one that is zero but for rounding counts as zero)."""
    floor = 1e-6 * max(value.max().item() for value in truth.values())
    errors = {}
    for name, value in found.items():
        if name not in truth or value.shape != truth[name].shape:
            return f"wrong: {name} is no parameter, or has another shape"
        error = (value.double() - truth[name]).abs().max().item() / max(truth[name].max().item(), floor)
        errors[name] = error if math.isfinite(error) else math.inf
    bad = {name: error for name, error in errors.items() if error > 1e-3}
    missing = [name for name in truth if name not in found]
    worst = max(errors, key=errors.__getitem__, default="")
    parts = []
    if missing:
        parts.append(f"{len(missing)} of {len(truth)} parameters left out ({', '.join(missing[:2])}, ...)")
    if bad:
        parts.append(
            f"{len(bad)} of {len(truth)} parameters wrong ({', '.join(list(bad)[:2])}, ...), up to {bad[worst]:.2g}"
        )
    if parts:
        return "wrong: " + "; ".join(parts)
    return f"right ({errors[worst]:.0e})"


def _spread(truth: Diagonal, draws: list[Diagonal]) -> str:
    """For a random estimate: is its mean right, by z-scores, and how far off is one draw?"""
    flat = torch.stack([torch.cat([draw[name].flatten() for name in truth]) for draw in draws]).double()
    exact = torch.cat([value.flatten() for value in truth.values()])
    counted = exact > 1e-6 * exact.max()
    deviation = flat.std(0)[counted]
    z = (flat.mean(0)[counted] - exact[counted]) / (deviation / math.sqrt(len(draws)))
    relative = (deviation / exact[counted]).median().item()
    negative = (flat[:, counted] < 0).double().mean().item()
    verdict = "unbiased" if z.square().mean().sqrt() < 1.5 else "biased"
    return f"{verdict} estimate; relative spread of one draw {relative:.1f} (median entry), {negative:.0%} negative"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=NETWORKS, help="one network instead of all")
    parser.add_argument("--tool", choices=list(TOOLS), help="one tool instead of all")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    rows = []
    for tool in [options.tool] if options.tool else TOOLS:
        number = version(tool)
        for name in [options.only] if options.only else NETWORKS:
            for quantity in ("per sample", "exact"):
                verdict = "not installed" if number is None else check(tool, name, quantity == "exact")
                rows.append([f"{tool} {number or ''}".strip(), name, quantity, verdict.replace("|", "\\|")])
                print(" · ".join(rows[-1]), flush=True)
    text = table(["tool", "network (small)", "quantity", "against a float64 loop"], rows)
    head = setting("python benchmarks/others.py", torch.device("cpu"))
    text = "\n\n".join(["# What other tools give, against a float64 loop over samples and classes", head, text])
    if options.only or options.tool:
        print(f"\n{text}")  # a part of the result does not replace it
    else:
        keep("others", text)


if __name__ == "__main__":
    main()
