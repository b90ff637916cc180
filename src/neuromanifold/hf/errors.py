"""What can go wrong when something is loaded, said so that it can be put right."""

from __future__ import annotations

import importlib
from types import ModuleType

_LOCAL = {
    "model": "copy the model's folder (config.json, *.safetensors, tokenizer or preprocessor files) and give its path",
    "adapter": "copy the adapter's folder (adapter_config.json, adapter_model.safetensors) and give its path",
    "processor": "copy the files of the tokenizer or preprocessor and give their folder",
    "data": "save the data as CSV, JSONL, Parquet or NPZ, or copy the data set's folder, and give the path",
}


class LoadError(ValueError):
    """A model or data that cannot be loaded; the message says which, why, and what to do."""


def require(package: str, extra: str, what: str) -> ModuleType:
    """Import an optional package, or say how to install it."""
    try:
        return importlib.import_module(package)
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] != package.split(".")[0]:
            raise
        name = package.split(".")[0]
        raise LoadError(f"{what} needs {name}: pip install 'neuromanifold[{extra}]'.") from None


def hub_error(argument: str, source: str, error: Exception) -> LoadError:
    """A hub that cannot be reached, or does not have it: how to do without."""
    said = " ".join(str(error).split())
    said = said if len(said) <= 300 else said[:300] + " ..."
    return LoadError(
        f"`{argument}`: {source!r} is no local path, and could not be had from the hub ({said}). If the name is right "
        f"and the hub cannot be reached: {_LOCAL[argument]}; or fetch it where there is a network (hf download {source}"
        f"{' --repo-type dataset' if argument == 'data' else ''}), copy that cache, point HF_HOME at it and set "
        "HF_HUB_OFFLINE=1."
    )
