"""A model: functions as modules, which of its parameters, how it is called, inputs of a decoder."""

from __future__ import annotations

import inspect
import re
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import partial
from typing import Any, Literal

from torch import Tensor, nn

from neuromanifold.core.checks import message
from neuromanifold.problem.batches import Batch

ShiftLabels = bool | Literal["auto"]
Selection = str | Sequence[str] | Callable[[str, nn.Parameter], bool] | None

# Classes of transformers whose loss compares the logits at position t with label t + 1.
# XLNet, XLM and Flaubert do not.
_CAUSAL = re.compile(r"^(?!XLNet).*(ForCausalLM|(?<!With)LMHeadModel|ModelWithLMHead|ForConditionalGeneration)$")


class FunctionModule(nn.Module):
    """A function of (parameters, *inputs) as a module; its parameters share memory with the tensors given."""

    def __init__(self, function: Callable[..., Any], parameters: Mapping[str, Tensor]) -> None:
        super().__init__()
        self._function, self._names = function, list(parameters)
        for name, tensor in parameters.items():
            if not isinstance(tensor, Tensor) or not (tensor.is_floating_point() or tensor.is_complex()):
                got = tensor.dtype if isinstance(tensor, Tensor) else type(tensor).__name__
                raise TypeError(message("parameters", "floating-point tensors by name", f"{got} for {name!r}"))
            self._parameters[name] = nn.Parameter(tensor.detach())  # names may have dots, as in a state dict

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function with the parameters first."""
        return self._function({name: self._parameters[name] for name in self._names}, *args, **kwargs)


def as_module(model: object, parameters: object) -> nn.Module:
    """The module itself, or a function together with a dict of its parameters as one."""
    if isinstance(model, nn.Module):
        return model
    if callable(model) and isinstance(parameters, Mapping) and parameters:
        return FunctionModule(model, parameters)
    advice = ""
    if isinstance(getattr(model, "__self__", None), nn.Module):
        advice = "Pass the module itself, not one of its methods."
    elif callable(model):
        advice = "A function f(parameters, inputs) needs parameters={name: tensor, ...}."
    raise TypeError(message("model", "a torch.nn.Module", getattr(model, "__name__", type(model).__name__), advice))


def plain_name(name: str) -> str:
    """A parameter's name without the prefixes of `torch.compile`, FSDP and (Distributed)DataParallel."""
    wrappers = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")
    plain = ".".join([part for part in name.split(".") if part not in wrappers])
    while plain.startswith("module."):
        plain = plain.removeprefix("module.")
    return plain


def select_parameters(model: nn.Module, selection: Selection) -> dict[str, nn.Parameter]:
    """The trainable parameters that match, by plain name; shared ones once, under their first name.

    `selection` is None (all), a pattern such as "encoder.*" or several of them, or a function of name and parameter.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(message("model", "a torch.nn.Module", type(model).__name__))
    if selection is not None and not callable(selection) and not isinstance(selection, str):
        selection = list(selection)
    given = dict(model.named_parameters())
    plain = {name: plain_name(name) for name in given}
    times = Counter(plain.values())
    named = {plain[name] if times[plain[name]] == 1 else name: value for name, value in given.items()}
    for name, parameter in named.items():
        if isinstance(parameter, nn.UninitializedParameter):
            raise ValueError(message("model", "initialised", f"a lazy {name!r}", "Call it once on a batch first."))
    chosen = {name: parameter for name, parameter in named.items() if _matches(selection, name, parameter)}
    trainable = {name: parameter for name, parameter in chosen.items() if parameter.requires_grad}
    for name, parameter in trainable.items():
        if parameter.is_complex():
            advice = "Leave it out, or store it as real numbers with torch.view_as_real."
            raise TypeError(message("parameters", "real", f"{parameter.dtype} for {name!r}", advice))
    if trainable:
        return trainable
    if not named:
        raise ValueError(message("model", "a module with parameters", "one without"))
    if chosen:
        advice = "Call .requires_grad_() on those you want; frozen parameters are left out."
        got = f"{len(chosen)} frozen ones ({next(iter(chosen))}, ...)"
        raise ValueError(message("parameters", "a selection with trainable parameters", got, advice))
    advice = f"The model's names begin with {', '.join(list(named)[:3])}; patterns match whole names, e.g. '*.weight'."
    raise ValueError(message("parameters", "a selection that matches something", repr(selection), advice))


def tied_names(model: nn.Module) -> dict[str, str]:
    """Every further name of a shared parameter, with the first name, which results have it under."""
    first: dict[nn.Parameter, str] = {}
    every = [(plain_name(name), parameter) for name, parameter in model.named_parameters(remove_duplicate=False)]
    held = [(name, first.setdefault(parameter, name)) for name, parameter in every]
    return {name: first_name for name, first_name in held if name != first_name}


def is_sharded(model: nn.Module) -> bool:
    """Whether FSDP2 (`fully_shard`) has divided the model's parameters among processes."""
    kind = _loaded_class("torch.distributed.fsdp", "FSDPModule")
    return bool(kind) and any(isinstance(module, kind) for module in model.modules())


def is_tensor_parallel(model: nn.Module) -> bool:
    """Whether some of the model's parameters are DTensors that FSDP2 has not made."""
    part = _loaded_class("torch.distributed.tensor", "DTensor")
    return bool(part) and not is_sharded(model) and any(isinstance(one, part) for one in model.parameters())


def reshard(model: nn.Module) -> None:
    """Divide again what FSDP2 has left whole, such as the root module's parameters after a forward pass alone."""
    kind = _loaded_class("torch.distributed.fsdp", "FSDPModule")
    for module in model.modules():
        if isinstance(module, kind):
            module.reshard()


def check_whole(model: nn.Module, chosen: Mapping[str, nn.Parameter], *, shards: bool = False) -> None:
    """Refuse parameters of which this process has only a part, or none: their gradients would be wrong, or missing.

    `shards`: the caller can do with those of FSDP2 or tensor parallelism, each process with its part.
    """
    advice = "Use a model that is whole on each process: over several GPUs by device_map, or in parts by `parameters`. "
    advice += "fisher_diagonal and fisher_trace take models in FSDP2 (fully_shard) or tensor parallelism."
    fully, part = is_sharded(model), _loaded_class("torch.distributed.tensor", "DTensor")
    for name, parameter in model.named_parameters():
        divided = isinstance(parameter, part)
        if divided and not shards:
            got = f"{plain_name(name)!r} sharded over processes (fully_shard or tensor parallel)"
            raise ValueError(message("model", "whole on each process", got, advice))
        if shards and fully and not divided and name in chosen:
            expected = "in FSDP2 with all of the chosen parameters"
            raise ValueError(message("model", expected, f"{name!r}, which is whole on each process"))
    older = _loaded_class("torch.distributed.fsdp", "FullyShardedDataParallel")
    if older and any(isinstance(one, older) for one in model.modules()):
        got = "FullyShardedDataParallel, which shards parameters over processes"
        raise ValueError(message("model", "whole on each process", got, advice))
    for name, parameter in chosen.items():
        if parameter.device.type == "meta":
            got = f"{name!r} on the meta device (not loaded, or offloaded to CPU or disk by device_map)"
            advice = (
                "Load the model. fisher_diagonal and fisher_trace take offloaded ones; elsewhere leave them out with "
            )
            advice += "`parameters`."
            raise ValueError(message("parameters", "in memory", got, advice))


def _loaded_class(module: str, name: str) -> Any:
    """A class of a module that takes long to import; () if it has not been imported, so that there is no instance."""
    return getattr(sys.modules.get(module), name, ())


def _matches(selection: Selection, name: str, parameter: nn.Parameter) -> bool:
    if selection is None:
        return True
    if callable(selection):
        return bool(selection(name, parameter))
    patterns = [selection] if isinstance(selection, str) else list(selection)
    if not all(isinstance(pattern, str) for pattern in patterns):
        expected = "None, a pattern, a list of patterns, or a function of name and parameter"
        raise TypeError(message("parameters", expected, repr(selection)))
    return any(fnmatchcase(name, pattern) or fnmatchcase(name, plain_name(pattern)) for pattern in patterns)


def unwrapped(model: nn.Module) -> nn.Module:
    """The model inside of torch.compile's and data-parallel wrappers."""
    while (inner := unwrapped_once(model)) is not model:
        model = inner
    return model


def unwrapped_once(model: nn.Module) -> nn.Module:
    """The model inside of the outermost of these wrappers; itself if there is none."""
    parallel = isinstance(model, nn.parallel.DistributedDataParallel | nn.DataParallel)
    inner = model.module if parallel else getattr(model, "_orig_mod", None)
    return inner if isinstance(inner, nn.Module) else model


def without_ddp(model: nn.Module) -> nn.Module:
    """The model inside of DistributedDataParallel, whose own forward prepares a reduction of gradients; or itself."""
    inner, found = model, model
    while (further := unwrapped_once(inner)) is not inner:
        found = further if isinstance(inner, nn.parallel.DistributedDataParallel) else found
        inner = further
    return found


def base_model(model: nn.Module) -> nn.Module:
    """The model inside of all wrappers, those of PEFT included."""
    inner = None
    while inner is not model:
        inner, model = model, unwrapped(model)
        if hasattr(model, "peft_config") and callable(base := getattr(model, "get_base_model", None)):
            model = base()
    return model


def forward_signature(model: nn.Module) -> inspect.Signature | None:
    """The signature of `forward`; None where it has none, as in scripted modules."""
    inner = unwrapped(model)
    try:
        return inspect.signature(partial(inner._function, None) if isinstance(inner, FunctionModule) else inner.forward)
    except (TypeError, ValueError):
        return None


def only_argument(signature: inspect.Signature | None) -> str | None:
    """The name of the only argument that must be given; None if there are several or any others are accepted."""
    parameters = signature.parameters.values() if signature else ()
    if any(p.kind in (p.VAR_KEYWORD, p.VAR_POSITIONAL) for p in parameters):
        return None
    required = [p.name for p in parameters if p.default is p.empty]
    return required[0] if len(required) == 1 else None


def with_decoder_inputs(
    batch: Batch, model: nn.Module, signature: inspect.Signature | None, ignore_index: int
) -> Batch:
    """The inputs of an encoder–decoder model's decoder, made from the labels where only these are given."""
    labels = batch.labels
    if labels is None or labels.ndim != 2 or labels.is_floating_point() or not batch.kwargs:
        return batch
    if any(key.startswith("decoder_input") for key in batch.kwargs):
        return batch
    prepare = getattr(unwrapped(model), "prepare_decoder_input_ids_from_labels", None)
    if prepare is not None:
        ids = prepare(labels=labels.masked_fill(labels == ignore_index, -100))
        return batch._replace(kwargs={**batch.kwargs, "decoder_input_ids": ids})
    if signature is not None and "decoder_input_ids" in signature.parameters:
        advice = "Add them to each batch: this model has no method that makes them from labels."
        raise ValueError(
            f"Batch {batch.number} of `data`: " + message("decoder_input_ids", "given", "labels only", advice)
        )
    return batch


def call(model: nn.Module, batch: Batch, signature: inspect.Signature | None, label_key: str) -> object:
    """Run the model; where the batch does not fit its `forward`, the error says what to yield instead."""
    try:
        return model(*batch.args, **batch.kwargs)
    except (TypeError, AttributeError) as error:
        wrong = signature and _why_not_callable(signature, batch, label_key, error)
        if not wrong:
            raise
        raise TypeError(f"Batch {batch.number} of `data`: {wrong}") from error


def _why_not_callable(signature: inspect.Signature, batch: Batch, label_key: str, raised: Exception) -> str:
    names = ", ".join(signature.parameters)
    try:
        signature.bind(*batch.args, **batch.kwargs)
    except TypeError as error:
        expected, advice = f"callable with a batch of `data` ({error})", f"Its arguments: {names}. "
        if batch.kwargs:
            got = f"a dict with the keys {', '.join(batch.kwargs)}"
            advice += "The entries of a dict are passed on by name, all but the labels, which are looked for under "
            return message("model", expected, got, advice + f"{label_key!r}: name another key with label_key=.")
        got = f"{len(batch.args)} input(s){'' if batch.labels is None else ' and labels'}"
        advice += "A batch (a, b) means inputs a and labels b. "
        advice += "For a model with several inputs yield ((a, b), labels), or a dict by name."
        return message("model", expected, got, advice)
    if len(batch.args) == 1 and isinstance(batch.args[0], Mapping) and only_argument(signature):
        got = f"{type(raised).__name__}: {raised}"
        expected = f"callable with the dict itself, since none of its keys ({', '.join(batch.args[0])}) is {names!r}"
        return message("model", expected, got, f"Rename a key to {only_argument(signature)!r} if it is the input.")
    return ""


def check_shift_labels(value: ShiftLabels) -> ShiftLabels:
    """The argument, if it is one of the three."""
    if not (isinstance(value, bool) or value == "auto"):
        expected = "'auto' (if the model shifts labels itself), True or False"
        raise ValueError(message("shift_labels", expected, repr(value)))
    return value


def shifts_labels(model: nn.Module) -> bool:
    """Whether this is a causal language model of transformers, whose own loss shifts labels by one.

    Wrappers (`torch.compile`, data parallel, PEFT) are looked into.  Encoder–decoder models do not shift labels: their
    decoder's inputs are the labels shifted already.  Neither do decoders of such models on their own (BartForCausalLM),
    which are told by their `decoder_start_token_id`.
    """
    model = base_model(model)
    config = getattr(model, "config", None)
    if config is None or getattr(config, "is_encoder_decoder", True):
        return False
    if getattr(config, "decoder_start_token_id", None) is not None:
        return False
    return any(_CAUSAL.match(one.__name__) for one in type(model).__mro__)


def virtual_tokens(model: nn.Module) -> int:
    """How many positions a trained prompt of PEFT puts before the inputs; prefixes of keys and values have none."""
    config = getattr(unwrapped(model), "active_peft_config", None)
    if config is None or not getattr(config, "is_prompt_learning", False):
        return 0
    return 0 if "PREFIX" in str(config.peft_type) else int(config.num_virtual_tokens or 0)
