"""The diagonal of a Fisher information by other libraries: an adapter for each, as in `others_torch.py`."""

from __future__ import annotations

from others_torch import Diagonal, Work
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, log_softmax


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
