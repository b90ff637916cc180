"""Errors of loading: what is wrong with a model or data, and what to do."""

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


class LabelError(LoadError):
    """A label in the data that is none of the model's classes."""


def require(package: str, extra: str, what: str) -> ModuleType:
    """Import an optional package, or raise a LoadError that says how to install it."""
    try:
        return importlib.import_module(package)
    except ModuleNotFoundError as error:
        name = package.split(".")[0]
        if (error.name or "").split(".")[0] != name:
            raise
        raise LoadError(f"{what} needs {name}: pip install 'neuromanifold[{extra}]'.") from None


def short(error: BaseException, length: int = 300) -> str:
    """Return the error's message on one line of at most `length` characters."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= length else text[:length] + " ..."


def hub_error(argument: str, source: str, error: Exception) -> LoadError:
    """Return the error for a name that the hub does not have or that cannot be fetched, with how to use local files."""
    return LoadError(
        f"`{argument}`: {source!r} is no local path, and could not be fetched from the hub ({short(error)}). If the "
        f"name is right and the hub cannot be reached: {_LOCAL[argument]}; or fetch it where there is a network "
        f"(hf download {source}{' --repo-type dataset' if argument == 'data' else ''}), copy that cache, point HF_HOME "
        "at it and set HF_HUB_OFFLINE=1."
    )
