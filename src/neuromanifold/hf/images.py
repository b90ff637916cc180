"""Images: from NPZ arrays, folders, or tables, through the model's image processor."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from neuromanifold.core.checks import message
from neuromanifold.hf.errors import LoadError, hub_error, require
from neuromanifold.hf.models import LoadedModel

SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".webp", ".gif", ".tif", ".tiff")
_RGB = 3
_SIXTEEN = 257  # the largest number of 16 bits over that of 8


def image_inputs(model: LoadedModel) -> Callable[[list[Any]], dict[str, Tensor]]:
    """From images (arrays, paths, or bytes) to the model's inputs."""
    process, mode = _processor(model), "L" if getattr(model.config, "num_channels", _RGB) == 1 else "RGB"

    def inputs(images: list[Any]) -> dict[str, Tensor]:
        return {"pixel_values": process([_open(image, mode) for image in images])}

    return inputs


def _open(image: Any, mode: str) -> Any:
    """An image of pillow."""
    pillow = require("PIL.Image", "hf", "Images")
    if isinstance(image, dict):  # as data sets store them
        image = image["path"] if image.get("bytes") is None else image["bytes"]
    try:
        if isinstance(image, np.ndarray):
            opened = pillow.fromarray(image[..., 0] if image.ndim == 3 and image.shape[-1] == 1 else image)
        else:
            opened = pillow.open(io.BytesIO(image) if isinstance(image, bytes) else image)
        if opened.mode.startswith("I;16"):
            opened = pillow.fromarray((np.asarray(opened) / _SIXTEEN).round().astype(np.uint8))
        if opened.mode in ("I", "F"):
            raise ValueError("neither 8 nor 16 bits")  # what is white is not known; pillow would cut at 255
        return opened.convert(mode)
    except (OSError, TypeError, ValueError, AttributeError) as error:
        if isinstance(image, np.ndarray):
            got = f"{image.dtype} of shape {' x '.join(map(str, image.shape))} ({error})"
            raise LoadError(message("data", "'images' of uint8, each height x width x 3", got)) from error
        name = str(image) if isinstance(image, (str, Path)) else type(image).__name__
        raise LoadError(message("data", "images", f"{name} ({error})", "Remove or repair it.")) from error


def _processor(model: LoadedModel) -> Callable[[list[Any]], Tensor]:
    transformers = require("transformers", "hf", "Images")
    require("PIL.Image", "hf", "Images")
    if model.processor is None:
        raise LoadError(message("processor", "where the image processor is", "none", "Give it: --processor FOLDER."))
    try:
        numbers, _ = transformers.ImageProcessingMixin.get_image_processor_dict(model.processor)
    except OSError as error:
        if not Path(model.processor).is_dir():
            raise hub_error("processor", model.processor, error) from error
        advice = "It says size, image_mean and image_std; name another folder with --processor."
        got = f"{model.processor} without it"
        raise LoadError(message("processor", "a folder with preprocessor_config.json", got, advice)) from error
    try:
        processor = transformers.AutoImageProcessor.from_pretrained(model.processor)
    except (ImportError, ValueError, KeyError):  # one that needs torchvision, or that has no name
        return by_numbers(numbers)
    return lambda images: torch.as_tensor(np.asarray(processor(images=images, return_tensors="np")["pixel_values"]))


def by_numbers(numbers: dict[str, Any]) -> Callable[[list[Any]], Tensor]:
    """Resize, crop, rescale and normalise as preprocessor_config.json says."""
    mean, std = (np.asarray(numbers.get(key, default), dtype=np.float32)
                 for key, default in (("image_mean", 0.0), ("image_std", 1.0)))  # fmt: skip
    scale = np.float32(numbers.get("rescale_factor", 1 / 255) if numbers.get("do_rescale", True) else 1)
    normalise = numbers.get("do_normalize", "image_mean" in numbers)

    def process(images: list[Any]) -> Tensor:
        arrays = [np.asarray(_cropped(_resized(image, numbers), numbers), dtype=np.float32) for image in images]
        if len({array.shape for array in arrays}) > 1:
            shapes = ", ".join(sorted({"x".join(map(str, array.shape)) for array in arrays})[:4])
            advice = "Give a size in preprocessor_config.json."
            raise LoadError(message("data", "images of one size", shapes, advice))
        stack = np.stack([array if array.ndim == 3 else array[..., None] for array in arrays]) * scale
        stack = (stack - mean) / std if normalise else stack
        return torch.as_tensor(np.ascontiguousarray(stack.transpose(0, 3, 1, 2)))  # [B, 3, H, W]

    return process


def _resized(image: Any, numbers: dict[str, Any]) -> Any:
    size = numbers.get("size")
    if size is None or not numbers.get("do_resize", True):
        return image
    width, height = image.size
    if isinstance(size, int) or "shortest_edge" in size:
        edge = size if isinstance(size, int) else size["shortest_edge"]
        ratio = edge / min(width, height)
        target = (round(width * ratio), round(height * ratio)) if not isinstance(size, int) else (edge, edge)
    else:
        target = (size["width"], size["height"])
    return image.resize(target, resample=numbers.get("resample", 2))


def _cropped(image: Any, numbers: dict[str, Any]) -> Any:
    size = numbers.get("crop_size")
    if size is None or not numbers.get("do_center_crop", False):
        return image
    width, height = (size, size) if isinstance(size, int) else (size["width"], size["height"])
    left, top = (image.width - width) // 2, (image.height - height) // 2
    return image.crop((left, top, left + width, top + height))
