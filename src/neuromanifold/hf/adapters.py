"""PEFT adapters: their parameters are the ones whose Fisher information is asked for."""

from __future__ import annotations

from pathlib import Path

from torch import nn

from neuromanifold.core.checks import message
from neuromanifold.hf.errors import LoadError, hub_error, require

_WEIGHTS = "adapter_model.safetensors"
_PREFIX = "base_model.model."


def adapter_names(adapter: str) -> set[str]:
    """The parameters of the model itself that come with the adapter, such as a trained classifier."""
    from safetensors import SafetensorError, safe_open

    path = _weights(adapter)
    try:
        with safe_open(path, framework="pt") as file:
            return {name.removeprefix(_PREFIX) for name in file.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise LoadError(f"`adapter`: the weights {path} are damaged ({error}). Copy or download them again.") from error


def with_adapter(module: nn.Module, adapter: str) -> nn.Module:
    """The model with its adapter; only the adapter's parameters are trainable."""
    peft = require("peft", "peft", "An adapter")
    adapter_names(adapter)
    try:
        adapted: nn.Module = peft.PeftModel.from_pretrained(module, adapter, is_trainable=True)
    except (ValueError, RuntimeError) as error:
        said = " ".join(str(error).split())[:300]
        advice = "Is it made for this model? With a classifier of its own it needs --classes N as in its training."
        raise LoadError(message("adapter", "an adapter that fits the model", f"{adapter} ({said})", advice)) from error
    return adapted


def _weights(adapter: str) -> Path:
    """The file of its weights."""
    folder = Path(adapter).expanduser()
    if folder.is_dir():
        if not (folder / _WEIGHTS).is_file():
            inside = ", ".join(sorted(path.name for path in folder.iterdir())[:6]) or "nothing"
            advice = "Pickles (.bin) are not read: save the adapter with safe_serialization=True."
            raise LoadError(message("adapter", f"a folder with {_WEIGHTS}", f"{adapter} with {inside}", advice))
        return folder / _WEIGHTS
    hub = require("huggingface_hub", "hf", "An adapter on the hub")
    try:
        return Path(hub.hf_hub_download(adapter, _WEIGHTS))
    except (OSError, ValueError) as error:
        raise hub_error("adapter", adapter, error) from error
