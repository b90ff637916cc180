"""What a batch is: inputs for the model, perhaps labels; and how logits are read off a model's output.

tensor                 model(tensor)
(inputs, labels)       model(inputs), or model(**inputs) where inputs is a dict; labels kept apart
{..., "labels": y}     model(**rest); labels kept apart
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from neuromanifold.core.checks import message


class Batch(NamedTuple):
    """One batch, ready for the model."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    labels: Tensor | None

    def to(self, device: torch.device) -> Batch:
        """Move every tensor, however deep, to a device."""
        return Batch(_move(self.args, device), _move(self.kwargs, device), _move(self.labels, device))


class Outputs(NamedTuple):
    """Logits with the classes last, and which of their positions count."""

    logits: Tensor  # [B, ..., C], part of the autograd graph
    labels: Tensor | None  # [B, ...] class labels, or [B, ..., C] targets
    valid: Tensor | None  # [B, ...] bool; None: all
    labels_fit: bool = True  # whether the labels have one of these shapes

    @property
    def samples(self) -> int | Tensor:
        """How many samples count: those with a position that does.  A tensor is not waited for."""
        return (
            len(self.logits)
            if self.valid is None
            else self.valid.flatten(1).any(1).sum()
            if self.valid.ndim > 1
            else self.valid.sum()
        )

    @property
    def positions(self) -> int | Tensor:
        """How many output distributions count: samples, or tokens, or pixels.  A tensor is not waited for."""
        return self.logits[..., 0].numel() if self.valid is None else self.valid.sum()


def read_batch(item: object, number: int) -> Batch:
    """Understand what the data set yields."""
    if isinstance(item, Tensor):
        return Batch((item,), {}, None)
    if isinstance(item, Mapping):
        kwargs = dict(item)
        return Batch((), kwargs, _labels(kwargs.pop("labels", None), number))
    if isinstance(item, (tuple, list)) and len(item) in (1, 2):
        inputs, labels = item[0], item[1] if len(item) == 2 else None
        if isinstance(inputs, Mapping):
            return Batch((), dict(inputs), _labels(labels, number))
        return Batch(tuple(inputs) if isinstance(inputs, (tuple, list)) else (inputs,), {}, _labels(labels, number))
    got = f"{type(item).__name__}" + (f" of length {len(item)}" if isinstance(item, (tuple, list)) else "")
    expected = "a tensor, a tuple (inputs, labels) or a dict with the labels under 'labels'"
    raise TypeError(f"Batch {number} of `data`: " + message("batch", expected, got))


def read_outputs(output: object, batch: Batch, class_dim: int, ignore_index: int, batch_dim: int = 0) -> Outputs:
    """Find the logits in a model's output, move the classes last, and work out which positions count."""
    logits = _find_logits(output)
    if logits.ndim < 2:
        advice = "Is `data` an iterable of batches, and is the model's first output its logits (and not a loss)?"
        raise ValueError(message("logits", "of shape [batch, ..., classes]", f"shape {list(logits.shape)}", advice))
    if not -logits.ndim <= class_dim < logits.ndim:
        expected = f"a dimension of the logits, which have shape {list(logits.shape)}"
        raise ValueError(message("class_dim", expected, str(class_dim)))
    if not 0 <= batch_dim < logits.ndim and logits.ndim > 2:
        expected = f"a dimension of the logits, which have shape {list(logits.shape)}"
        raise ValueError(message("batch_dim", expected, str(batch_dim)))
    if batch_dim and logits.ndim > 2:
        logits = _samples_first(logits, batch_dim, class_dim)
        class_dim = -1
    else:
        logits = logits.movedim(class_dim, -1)
    positions, labels, valid = logits.shape[:-1], batch.labels, None
    if batch_dim and labels is not None and labels.ndim > 1:
        labels = labels.movedim(batch_dim, 0)
    if labels is not None and labels.shape == positions and logits.shape[-1] == 1:
        labels = labels[..., None]  # one output and one target a sample, without a dimension for it
    index = labels is not None and labels.shape == positions and not labels.is_floating_point()
    if labels is not None and index:
        labels = labels.long()
        valid = _unless_all(labels != ignore_index)
        labels = labels if valid is None else torch.where(valid, labels, 0)
    mask = _mask(batch.kwargs)  # of the inputs' layout where it is not [B, T] already
    if mask is not None and batch_dim and mask.shape != positions and mask.ndim > batch_dim:
        mask = mask.movedim(batch_dim, 0)
    if mask is not None and logits.ndim > 2 and mask.shape == positions:
        valid = _unless_all(mask.bool() if valid is None else valid & mask.bool())
    return Outputs(logits, labels, valid, labels is None or index or labels.shape == logits.shape)


def _unless_all(valid: Tensor) -> Tensor | None:
    """None if all positions count, where asking costs nothing: not on a GPU, which would be waited for.

    Samples without any position do not count.
    """
    can_be_asked = valid.device.type == "cpu" and not torch._C._len_torch_dispatch_stack()
    return None if can_be_asked and valid.numel() and bool(valid.all()) else valid


def _samples_first(logits: Tensor, batch_dim: int, class_dim: int) -> Tensor:
    """[..., B, ..., C, ...] as [B, ..., C]."""
    class_dim %= logits.ndim
    if class_dim == batch_dim:
        advice = "Tell which dimension holds the classes with `class_dim`."
        raise ValueError(message("batch_dim", "another dimension than that of the classes", str(batch_dim), advice))
    rest = [dim for dim in range(logits.ndim) if dim not in (batch_dim, class_dim)]
    return logits.permute(batch_dim, *rest, class_dim)


def _mask(kwargs: dict[str, Any]) -> Tensor | None:
    """The attention mask of the outputs: the decoder's where there is one."""
    decodes = any(key.startswith("decoder_") for key in kwargs)
    mask = kwargs.get("decoder_attention_mask" if decodes else "attention_mask")
    return mask if isinstance(mask, Tensor) else None


def model_device(model: nn.Module) -> torch.device:
    """Where the model is: the device of its first parameter or buffer."""
    for tensor in (*model.parameters(), *model.buffers()):
        return tensor.device
    return torch.device("cpu")


def _find_logits(output: object) -> Tensor:
    found = output
    if not isinstance(found, Tensor) and hasattr(found, "logits"):
        found = found.logits
    elif isinstance(found, Mapping) and "logits" in found:
        found = found["logits"]
    elif isinstance(found, (tuple, list)) and found:
        found = found[0]
    if not isinstance(found, Tensor):
        expected = "a tensor, a tuple that begins with one, or an object with .logits"
        advice = "Wrap the model in a module that returns its logits."
        raise TypeError(message("model's output", expected, type(output).__name__, advice))
    return found


def _labels(labels: object, number: int) -> Tensor | None:
    if labels is None or isinstance(labels, Tensor):
        return labels
    raise TypeError(f"Batch {number} of `data`: " + message("labels", "a tensor", type(labels).__name__))


def _move(value: Any, device: torch.device) -> Any:
    if isinstance(value, Tensor):
        return value.to(device, non_blocking=True)
    if isinstance(value, Mapping):
        return {key: _move(entry, device) for key, entry in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_move(entry, device) for entry in value))
    if isinstance(value, (tuple, list)):
        return type(value)(_move(entry, device) for entry in value)
    return value
