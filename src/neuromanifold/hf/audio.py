"""Sound: from NPZ arrays, folders, or tables, through the model's feature extractor."""

from __future__ import annotations

import inspect
import io
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from neuromanifold.core.checks import message
from neuromanifold.hf.errors import LoadError, hub_error, require
from neuromanifold.hf.models import LoadedModel

SUFFIXES = (".wav", ".flac", ".ogg", ".mp3")

Clip = NDArray[np.float32]


def audio_inputs(model: LoadedModel, max_length: int | None) -> Callable[[list[Any]], dict[str, Tensor]]:
    """From clips (arrays at the model's rate, paths, or bytes) to the model's inputs; cut to `max_length` values."""
    extractor = _extractor(model)
    rate = int(extractor.sampling_rate)
    padding = inspect.signature(extractor.__call__).parameters.get("padding")
    one_length = padding is None or padding.default == "max_length"  # all that some models take
    arguments = {} if one_length else {"padding": True}

    def inputs(clips: list[Any]) -> dict[str, Tensor]:
        values = [_read(clip, rate)[:max_length] for clip in clips]
        if not all(map(len, values)):
            raise LoadError(message("data", "sounds", "one of length zero", "Remove it."))
        return dict(extractor(values, sampling_rate=rate, return_tensors="pt", **arguments))

    return inputs


def _read(clip: Any, rate: int) -> Clip:
    """One channel at the model's rate."""
    if isinstance(clip, np.ndarray):
        return _plain(clip)
    if isinstance(clip, dict):  # as data sets store them
        clip = clip["path"] if clip.get("bytes") is None else clip["bytes"]
    soundfile = require("soundfile", "hf", "Sound files")
    try:
        values, found = soundfile.read(io.BytesIO(clip) if isinstance(clip, bytes) else str(clip), dtype="float32")
    except (RuntimeError, OSError, TypeError) as error:
        name = str(clip) if isinstance(clip, (str, Path)) else type(clip).__name__
        raise LoadError(message("data", "sound files", f"{name} ({error})", "Remove or repair it.")) from error
    values = values.mean(1) if values.ndim > 1 else values
    if found != rate:
        signal = require("scipy.signal", "hf", f"Sound at {found} Hz for a model at {rate} Hz")
        common = math.gcd(found, rate)
        values = signal.resample_poly(values, rate // common, found // common)
    return np.asarray(values, dtype=np.float32)


def _plain(clip: NDArray[Any]) -> Clip:
    """An array's values, integers as sound files scale them: the largest is one."""
    if clip.ndim != 1:
        shape = " x ".join(map(str, clip.shape))
        raise LoadError(
            message("data", "'audio' [N, values], of one channel", f"clips of shape {shape or 'no length'}")
        )
    if np.issubdtype(clip.dtype, np.signedinteger):
        return clip.astype(np.float32) / -np.float32(np.iinfo(clip.dtype).min)
    if not np.issubdtype(clip.dtype, np.floating):
        raise LoadError(message("data", "'audio' of floats or signed integers", str(clip.dtype)))
    return clip.astype(np.float32, copy=False)


def _extractor(model: LoadedModel) -> Any:
    transformers = require("transformers", "hf", "Sound")
    if model.processor is None:
        raise LoadError(message("processor", "where the feature extractor is", "none", "Give it: --processor FOLDER."))
    try:
        return transformers.AutoFeatureExtractor.from_pretrained(model.processor)
    except (OSError, ValueError) as error:
        if not Path(model.processor).is_dir() and isinstance(error, OSError):
            raise hub_error("processor", model.processor, error) from error
        advice = "It says the sampling rate; name another folder with --processor."
        got = f"{model.processor} ({' '.join(str(error).split())[:200]})"
        raise LoadError(message("processor", "a folder with preprocessor_config.json", got, advice)) from error
