"""The logits in a model's output, their labels, and which positions count."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from neuromanifold.core.checks import is_readable, message
from neuromanifold.problem.batches import Batch


class Outputs(NamedTuple):
    """Logits with the samples first and the classes last, and which of their positions count."""

    logits: Tensor  # [B, ..., C], part of the autograd graph
    labels: Tensor | None  # [B, ...] class labels, or [B, ..., C] targets
    valid: Tensor | None  # [B, ...] bool; None: all
    number: int = 0  # of the batch in the data

    @property
    def samples(self) -> int | Tensor:
        """The number of samples with a position that counts; on a GPU a tensor, which is not waited for."""
        if self.valid is None:
            return len(self.logits)
        return self.valid.flatten(1).any(1).sum() if self.valid.ndim > 1 else self.valid.sum()

    @property
    def positions(self) -> int | Tensor:
        """The number of distributions that count: samples, tokens or pixels; on a GPU a tensor."""
        return self.logits.shape[:-1].numel() if self.valid is None else self.valid.sum()

    def detached(self) -> Outputs:
        """Return the same without the autograd graph, and so without activations."""
        return self._replace(logits=self.logits.detach())

    def select(self, values: Tensor, compact: bool = False) -> Tensor:
        """Flatten values [B, ..., *rest] to rows [R, *rest] of the positions that count.

        For logits [B, C] the rows are all B samples, with zeros for those that do not count, since dropping them would
        wait for a GPU; `compact` drops them all the same.
        """
        rest = values.shape[self.logits.ndim - 1 :]
        if self.valid is None:
            return values.reshape(-1, *rest)
        if self.logits.ndim == 2 and not compact:
            return torch.where(self.valid.view(-1, *[1] * len(rest)), values, 0)
        return values[self.valid]

    def per_sample(self, values: Tensor) -> Tensor:
        """Add values [R] of the rows made by `select` over the positions of each sample, [B]."""
        if self.valid is None:
            return values.view(len(self.logits), self.logits.shape[1:-1].numel()).sum(1)
        if self.logits.ndim == 2:
            return torch.where(self.valid, values, 0)
        owner = self.valid.flatten(1).nonzero()[:, 0]
        return values.new_zeros(len(self.logits)).index_add_(0, owner, values)

    def scatter(self, rows: Tensor) -> Tensor:
        """Rows [R, C] as made by `select`, in a tensor of the logits' shape that is zero elsewhere."""
        shape = self.logits.shape
        if self.valid is None:
            return rows.view(shape)
        if len(shape) == 2 and len(rows) == len(self.valid):
            return torch.where(self.valid[:, None], rows, 0.0)
        values = rows.new_zeros(shape)
        values[self.valid] = rows
        return values


class SamplesElsewhereError(ValueError):
    """The logits have the inputs' samples in another dimension than the one that was named."""


def read_outputs(
    output: object,
    batch: Batch,
    class_dim: int = -1,
    ignore_index: int = -100,
    batch_dim: int = 0,
    scalar: bool = False,
    shift: bool = False,
    virtual: int = 0,
) -> Outputs:
    """Find the logits in a model's output, move samples first and classes last, and work out which positions count.

    `scalar`: outputs of shape [B] are one number for each sample.  `shift`: position t predicts token t + 1, to which
    label and mask t + 1 belong; where they have no such token, positions do not count.  `virtual`: so many positions in
    front belong to a trained prompt, for which there are neither labels nor masks; the last of them predicts a token.
    """
    where, given = f"Batch {batch.number} of `data`: ", _find_logits(output)
    if given.ndim == 1 and scalar:
        _check_samples(given, batch, -1, 0)
        given = given[:, None]
    if given.ndim < 2:
        advice = "Is `data` an iterable of batches, and is the model's first output its logits (and not a loss)?"
        advice += " One number for each sample is for nm.Bernoulli or nm.Gaussian." if given.ndim else ""
        got = f"shape {list(given.shape)}"
        raise ValueError(where + message("logits", "of shape [batch, ..., classes]", got, advice))
    expected = f"a dimension of the logits, which have shape {list(given.shape)}"
    if not -given.ndim <= class_dim < given.ndim:
        raise ValueError(message("class_dim", expected, str(class_dim)))
    if not 0 <= batch_dim < given.ndim and given.ndim > 2:
        raise ValueError(message("batch_dim", expected, str(batch_dim)))
    batch_dim, class_dim = batch_dim if given.ndim > 2 else 0, class_dim % given.ndim
    if class_dim == batch_dim > 0:
        advice = "Say which dimension holds the classes with `class_dim`."
        raise ValueError(message("batch_dim", "another dimension than that of the classes", str(batch_dim), advice))
    if given.ndim > 2:
        _check_samples(given, batch, class_dim, batch_dim)
    logits = _arranged(given, batch_dim, class_dim)
    positions, labels, valid, tokens = logits.shape[:-1], batch.labels, None, None
    if shift and logits.ndim != 3:
        expected, got = "False for logits that are not [batch, positions, classes]", f"True for {list(given.shape)}"
        raise ValueError(message("shift_labels", expected, got))
    if batch_dim and labels is not None and labels.ndim > 1:
        labels = labels.movedim(batch_dim, 0)
    virtual = virtual if virtual and _has_prompt(batch, positions, virtual) else 0
    if labels is not None:
        labels = _after_prompt(labels, positions, virtual, ignore_index)
        if labels.shape not in (positions, logits.shape):
            raise ValueError(where + _wrong_labels(labels, logits, given, class_dim, batch_dim))
        one = logits.shape[-1] == 1  # a single output, whose targets may come without a dimension for it
        labels = labels.reshape(positions) if one else labels
        if labels.shape == positions and not labels.is_floating_point():
            labels = next_labels(labels.long(), ignore_index) if shift else labels.long()
            valid = _unless_all(labels != ignore_index)
            labels = labels if valid is None else torch.where(valid, labels, 0)
        else:
            shift = False  # targets belong to the logits at their own position
        labels = labels[..., None] if one else labels
    mask = attention_mask(batch) if batch.kwargs else None
    if mask is not None and batch_dim and mask.shape != positions and mask.ndim > batch_dim:
        mask = mask.movedim(batch_dim, 0)
    if mask is not None and logits.ndim > 2:
        mask = _after_prompt(mask, positions, virtual, 1)
        if mask.shape == positions:
            if mask.is_floating_point() and not _says_which_count(mask):
                raise ValueError(where + _added_mask(ignore_index))
            tokens = mask.bool()
        elif batch.labels is None or batch.labels.ndim != len(positions):
            raise ValueError(where + _wrong_mask(mask, positions, ignore_index))
    if shift:
        tokens = logits.new_ones(positions, dtype=torch.bool) if tokens is None else tokens
        tokens = has_next(tokens, batch.kwargs.get("position_ids"))
    if virtual and labels is None:
        counted = torch.arange(positions[1], device=logits.device) >= (virtual - 1 if shift else virtual)
        tokens = counted.expand(positions) if tokens is None else tokens & counted
    if tokens is not None:
        valid = _unless_all(tokens if valid is None else valid & tokens)
    return Outputs(logits, labels, valid, batch.number)


def _has_prompt(batch: Batch, positions: torch.Size, virtual: int) -> bool:
    """Whether the logits have so many positions more than the inputs."""
    lengths = (t.shape[1] for t in batch.inputs() if t.ndim > 1 and len(t) == positions[0])
    return len(positions) == 2 and next(lengths, 0) + virtual == positions[1]


def _after_prompt(values: Tensor, positions: torch.Size, virtual: int, fill: int) -> Tensor:
    """Labels or a mask [B, T] with `fill` at the positions of a prompt in front of them."""
    if not virtual or values.shape != (positions[0], positions[1] - virtual):
        return values
    return torch.cat([values.new_full((len(values), virtual), fill), values], 1)


def _check_samples(logits: Tensor, batch: Batch, class_dim: int, batch_dim: int) -> None:
    """Refuse logits that have the inputs' samples in another dimension than `batch_dim`."""
    sizes = {t.shape[batch_dim if t.ndim > 2 else 0] for t in batch.inputs() if t.ndim}
    samples = sizes.pop() if len(sizes) == 1 else None  # graphs, bags and the like have inputs of several lengths
    if samples is None or logits.shape[batch_dim] == samples:
        return
    meant = [
        dim for dim in range(min(2, logits.ndim)) if dim != class_dim != batch_dim and logits.shape[dim] == samples
    ]
    if meant or logits.ndim == 1:
        expected = f"a tensor with the inputs' {samples} samples in dimension {batch_dim}"
        advice = f"Pass batch_dim={meant[0]} if that dimension holds the samples." if meant else ""
        text = message("logits", expected, f"shape {list(logits.shape)}", advice)
        raise SamplesElsewhereError(f"Batch {batch.number} of `data`: {text}")


def _wrong_labels(labels: Tensor, logits: Tensor, given: Tensor, class_dim: int, batch_dim: int) -> str:
    """What is wrong with labels of another shape than the logits' positions, and what may have been meant."""
    shapes = f"{list(logits.shape[:-1])} (class labels) or {list(logits.shape)} (targets)"
    others = (dim for dim in range(given.ndim) if dim not in (batch_dim, class_dim))
    meant = [dim for dim in others if _arranged(given, batch_dim, dim).shape[:-1] == labels.shape]
    if meant:
        advice = f"Of logits {list(given.shape)}, pass class_dim={meant[0]} if that dimension holds the classes."
    elif labels.shape == (*logits.shape[:1], 1, *logits.shape[1:-1]) or labels.shape == (*logits.shape[:-1], 1):
        advice = "Drop their dimension of size 1 with squeeze."
    elif (
        labels.ndim == logits.ndim - 1
        and labels.shape[:1] == logits.shape[:1]
        and labels.numel() < logits[..., 0].numel()
    ):
        advice = "If the model adds positions (virtual tokens), pad the labels there with `ignore_index`."
    elif logits.ndim == 3 and labels.shape[:1] == logits.shape[:1] and labels.ndim == 2:
        advice = "If the model returns the last positions alone (logits_to_keep), give the labels of these."
    else:
        advice = "A batch (a, b) means inputs a and labels b: for a model with two inputs yield ((a, b), labels). "
        advice += "Leave out labels that do not belong to single outputs."
    return message("labels", f"of shape {shapes}", f"shape {list(labels.shape)}", advice)


def _wrong_mask(mask: Tensor, positions: torch.Size, ignore_index: int) -> str:
    """What to do about a mask that does not say which of the logits' positions count, where no labels do either."""
    advice = f"Yield labels of that shape, with {ignore_index} (ignore_index) at positions that do not count, such as "
    advice += "padding and virtual tokens of a prompt; the other labels matter only to estimators that use labels."
    return message(
        "attention_mask", f"of shape {list(positions)}, the logits' positions", f"shape {list(mask.shape)}", advice
    )


def _says_which_count(mask: Tensor) -> bool:
    """Whether a floating-point mask can be 1 where positions count, and not what is added to attention scores.

    Such a mask is 0 there, and negative elsewhere.  While a CUDA graph is captured, no values can be read.
    """
    if not mask.numel() or (mask.is_cuda and torch.cuda.is_current_stream_capturing()):
        return True
    return bool((mask >= 0).all() & (mask > 0).any())


def _added_mask(ignore_index: int) -> str:
    """What to do about a mask that is added to attention scores, from which it cannot be told what was meant."""
    advice = "Pass a bool mask and let the model make the other from it, or rename its argument and yield labels with "
    advice += f"{ignore_index} (ignore_index) at positions that do not count."
    expected = "1 at positions that count and 0 at others"
    return message("attention_mask", expected, "values that are added to attention scores: 0 or negative", advice)


def _arranged(logits: Tensor, batch_dim: int, class_dim: int) -> Tensor:
    """[..., B, ..., C, ...] as [B, ..., C]."""
    if batch_dim == 0 and class_dim == logits.ndim - 1:
        return logits
    if class_dim == batch_dim == 0:
        return logits.movedim(0, -1)
    rest = [dim for dim in range(logits.ndim) if dim not in (batch_dim, class_dim)]
    return logits.permute(batch_dim, *rest, class_dim)


def _unless_all(valid: Tensor) -> Tensor | None:
    """Return None if all positions count and that is known without synchronizing a GPU; else the mask itself."""
    return None if is_readable(valid) and valid.numel() and bool(valid.all()) else valid


def attention_mask(batch: Batch) -> Tensor | None:
    """The attention mask of the outputs: the decoder's where there is one."""
    decodes = any(key.startswith("decoder_") for key in batch.kwargs)
    mask = batch.kwargs.get("decoder_attention_mask" if decodes else "attention_mask")
    return mask if isinstance(mask, Tensor) else None


def _find_logits(output: object) -> Tensor:
    logits = output
    if not isinstance(logits, Tensor) and hasattr(logits, "logits"):
        logits = logits.logits
    elif isinstance(logits, Mapping) and "logits" in logits:
        logits = logits["logits"]
    elif isinstance(logits, (tuple, list)) and logits:
        logits = logits[0]
    if not isinstance(logits, Tensor):
        expected = "a tensor, a tuple that begins with one, or an object with .logits"
        advice = "Wrap the model in a module that returns its logits."
        raise TypeError(message("model's output", expected, type(output).__name__, advice))
    whole: Tensor = logits.full_tensor() if hasattr(logits, "full_tensor") else logits  # of a tensor-parallel model
    return whole


def next_labels(labels: Tensor, fill: int) -> Tensor:
    """Labels [B, T] of tokens as those of positions: label t + 1 at position t, and `fill` at the last one."""
    return torch.cat([labels[:, 1:], labels.new_full((len(labels), 1), fill)], 1)


def has_next(tokens: Tensor, position_ids: object) -> Tensor:
    """Which positions [B, T] predict a token: both t and t + 1 are tokens (and no padding) of the same document.

    A document begins where `position_ids` do not increase, as in packed sequences.
    """
    valid = tokens & next_labels(tokens, 0)
    if isinstance(position_ids, Tensor) and position_ids.shape in (tokens.shape, (1, tokens.shape[1])):
        valid = valid & (next_labels(position_ids, 0) > position_ids)
    return valid
