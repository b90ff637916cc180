"""Inputs that are accepted but look wrong: examined on the first batch of a call, and warned about once."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from neuromanifold.core import Bernoulli, Categorical, Core
from neuromanifold.problem.batches import Batch, dtypes_in_use, sample_dim
from neuromanifold.problem.outputs import Outputs, SamplesElsewhereError
from neuromanifold.problem.unchanged import model_states

if TYPE_CHECKING:
    from neuromanifold.problem.problem import Problem

# Differences that rounding may make, relative to the largest ordinary logit, by the least precise dtype involved.
_ROUNDING = {torch.float64: 1e-8, torch.float32: 1e-3, torch.float16: 3e-2, torch.bfloat16: 1e-1}


_MANY = 16  # numbers that are hardly all between 0 and 1 by chance


class SuspiciousInputWarning(UserWarning):
    """The model, its outputs or the labels are probably not what the call takes them for.

    For instance probabilities where logits are expected, or labels that have been shifted already.  The message says
    what was seen and which argument to change.
    """


class SamplesMixWarning(SuspiciousInputWarning):
    """The logits of a sample change with the other samples of its batch, so that F is no sum over samples.

    Common causes: BatchNorm that normalises by the batch even in eval mode, and `batch_dim` or `class_dim` that do not
    fit.
    """


def probabilities_note(core: Core) -> str:
    """A warning if the logits of a categorical or Bernoulli distribution are probabilities, else "".

    Log-probabilities are logits: they differ by a constant for each row, which the metric ignores.
    """
    if isinstance(core, Categorical) and core.batch_shape.numel():
        rows = core.given.detach()
        off = (rows.sum(-1, dtype=core.dtype) - 1).abs().amax()
        if not bool((off <= 1e-5 + 4 * torch.finfo(rows.dtype).eps) & (rows.amin() >= 0)):  # NaN is none, either
            return ""
        text = "The model's outputs are probabilities: all are >= 0 and each row sums to one. They are taken for "
        text += "logits, of which a softmax is taken once more. Return what the model's last softmax is applied to, "
        return text + "or its log."
    if isinstance(core, Bernoulli) and core.logits.numel() >= _MANY:
        if not bool((core.logits >= 0).all() & (core.logits <= 1).all()):
            return ""
        text = "All of the model's outputs are between 0 and 1, as probabilities are. nm.Bernoulli takes them for "
        return text + "logits. Return what the model's last sigmoid is applied to, unless these are logits by chance."
    return ""


def labels_note(outputs: Outputs, classes: int | None, ignore_index: int) -> str:
    """A warning if some labels are none of the classes, or mark single outputs to leave out, else "".

    `classes`: how many there are; None where labels are no classes.
    """
    if outputs.labels is None or outputs.labels.is_floating_point():
        return ""
    labels = outputs.select(outputs.labels, compact=True)
    if labels.ndim > 1 and bool((labels == ignore_index).any()):
        text = f"{ignore_index} (ignore_index) is among the targets of several outputs: single outputs cannot be left "
        return text + "out, and all count."
    if labels.ndim > 1 or classes is None:
        return ""
    wrong = labels[(labels < 0) | (labels >= classes)]
    if not len(wrong):
        return ""
    text = f"`labels` must be between 0 and {classes - 1} or {ignore_index} (ignore_index), got {int(wrong[0])} for "
    text += f"{len(wrong)} of {len(labels)} positions, which are counted. If that label marks positions to leave out, "
    return text + f"pass ignore_index={int(wrong[0])}; if the classes are in another dimension, pass class_dim."


def token_labels_note(problem: Problem, batch: Batch) -> str:
    """A warning if labels are the input's tokens, one place off from where they are looked for, else ""."""
    labels = batch.labels
    ids = batch.kwargs.get("input_ids", batch.args[0] if batch.args else None)
    if labels is None or not isinstance(ids, Tensor) or labels.shape != ids.shape or labels.ndim != 2:
        return ""
    if labels.is_floating_point() or ids.is_floating_point() or labels.shape[1] < 3:
        return ""
    counts = labels != problem.ignore_index
    here, ahead = (labels == ids)[counts], (labels[:, :-1] == ids[:, 1:])[counts[:, :-1]]
    if problem.predicts_next and len(ahead) > 1 and bool(ahead.all()) and not bool(here.all()):
        text = (
            "The labels are shifted already: label t is token t + 1. Here they are shifted once more, as by the loss "
        )
        text += "of causal models in transformers, so that position t is held against token t + 2. "
        return text + "Give labels that are the tokens themselves, or pass shift_labels=False."
    asks = problem.shift_labels == "auto" and not problem.predicts_next and not problem.takes("labels")
    if asks and len(here) > 1 and bool(here.all()):
        text = "The labels are the input's own tokens, and are taken to belong to the logits at their own position. "
        return text + "If the model predicts the next token, pass shift_labels=True, else shift_labels=False."
    return ""


def shift_note(problem: Problem, batch: Batch, outputs: Outputs) -> str:
    """A warning if the model's own loss compares labels with the logits of other positions than is done here, else "".

    Asked of the model by a forward pass of three samples, where it takes labels and `shift_labels` is "auto".
    """
    labels, samples = batch.labels, len(outputs.logits)
    if problem.shift_labels != "auto" or labels is None or labels.is_floating_point() or not batch.kwargs:
        return ""
    if not problem.takes("labels") or outputs.logits.ndim != 3 or labels.shape != outputs.logits.shape[:2]:
        return ""
    restore, log = model_states(problem.model), logging.getLogger("transformers.modeling_utils")
    disabled, log.disabled = log.disabled, True  # it tells that a model names no type of loss
    try:
        few = batch.cut(samples, torch.arange(min(3, samples))).copied()
        with torch.no_grad():
            output = problem.model(*few.args, **few.kwargs, labels=few.labels)
        loss, logits = float(output.loss), output.logits.double().movedim(-1, 1)
        assert few.labels is not None
        losses = {  # by whether labels are shifted
            False: float(cross_entropy(logits, few.labels, ignore_index=problem.ignore_index)),
            True: float(cross_entropy(logits[..., :-1], few.labels[:, 1:], ignore_index=problem.ignore_index)),
        }
    except Exception:  # whatever a model does with labels; most have no loss
        return ""
    finally:
        restore()
        log.disabled = disabled
    fits = {shift: abs(loss - own) <= 1e-4 * abs(own) for shift, own in losses.items()}
    if fits[problem.predicts_next] or not fits[not problem.predicts_next]:
        return ""
    here, there = ("t", "t + 1") if problem.predicts_next else ("t + 1", "t")
    text = f"The model's own loss compares label {here} with the logits at position t, and this run label {there}. "
    return text + f"Pass shift_labels={not problem.predicts_next} to do as the model does, or say that you mean it."


def order_note(problem: Problem, batch: Batch, outputs: Outputs) -> str:
    """A warning if the samples are in another dimension of the logits, which has the same size by chance, else "".

    Asked of the model by a forward pass without the last sample, where the logits have two dimensions of that size.
    """
    samples, shape = len(outputs.logits), outputs.logits.shape
    if samples < 2 or samples not in shape[1:-1]:
        return ""
    restore = model_states(problem.model)
    try:
        problem.outputs(batch.cut(samples, torch.arange(samples - 1), problem.batch_dim))
    except SamplesElsewhereError as error:
        text = f"Without the last sample of a batch, the logits have other sizes than {list(shape)}: {error} "
        return text + "That both dimensions are as long in the whole batch hides it."
    except Exception:  # whatever a model does with a batch that has been cut
        return ""
    finally:
        restore()
    return ""


def mixing_note(problem: Problem, batch: Batch, outputs: Outputs) -> str:
    """A warning if samples influence each other, else ""."""
    if not samples_influence_each_other(problem, batch, outputs):
        return ""
    text = "The logits of a sample change when it is evaluated without the other samples of its batch, as with a "
    text += "normalisation over the batch. F is then that of p(y | x, other samples of the batch), and depends on how "
    return text + "the data are batched. Batches of one sample give each sample's own."


def samples_influence_each_other(problem: Problem, batch: Batch, outputs: Outputs) -> bool | None:
    """Whether the logits of some samples change if they are evaluated without the others: a forward pass of three.

    Both the first and the last sample of the batch are left out, since samples may depend on those before or after.
    Where a model fails on so few, the others are replaced by copies of these.  None if it cannot be said: a single
    sample, inputs that cannot be sliced, or a model that does not repeat itself.
    """
    samples = len(outputs.logits)
    inputs = batch.inputs()
    if samples < 2 or any(t.ndim and sample_dim(t, samples, problem.batch_dim) is None for t in inputs):
        return None
    few = [torch.arange(1, min(4, samples - 1))] if samples > 2 else [torch.tensor([1]), torch.tensor([0])]
    restore = model_states(problem.model)
    try:
        for rows in few:
            same = _unchanged_alone(problem, batch, outputs, rows)
            restore()  # of two evaluations in a row, a model with a state may repeat itself only in the second
            if not same:
                break
        else:
            return False
        again = problem.outputs(batch).logits
        return True if same_logits(problem, again, outputs.logits, outputs.valid) else None
    except Exception:  # whatever a model does with a batch that has been cut
        return None
    finally:
        restore()


def _unchanged_alone(problem: Problem, batch: Batch, outputs: Outputs, rows: Tensor) -> bool:
    samples, rows = len(outputs.logits), rows.to(outputs.logits.device)
    try:
        alone = problem.outputs(batch.cut(samples, rows, problem.batch_dim)).logits
    except Exception:
        copies = torch.arange(samples, device=rows.device) % len(rows)
        repeated = problem.outputs(batch.cut(samples, rows[copies], problem.batch_dim)).logits
        alone = repeated[: len(rows)]
        if not same_logits(problem, alone[copies], repeated):
            raise
    if len(alone) != len(rows):
        raise ValueError("The inputs were cut along another dimension than the samples'.")
    return same_logits(problem, alone, outputs.logits[rows], None if outputs.valid is None else outputs.valid[rows])


def same_logits(problem: Problem, found: Tensor, expected: Tensor, valid: Tensor | None = None) -> bool:
    """Whether two evaluations agree where positions count, but for rounding.

    Rounding is relative to the ordinary logits: a class that is masked by -1e9 hides nothing.
    """
    if found.shape != expected.shape:
        return False
    if valid is not None:
        found, expected = found[valid], expected[valid]
    if not expected.numel():
        return True
    dtypes = {expected.dtype, *dtypes_in_use(problem.model.parameters(), expected.device)}
    size = expected.abs()
    ordinary = torch.where(expected >= expected.amax(-1, keepdim=True) - 100, size, 0).amax()
    allowed = max(_ROUNDING.get(dtype, 0.0) for dtype in dtypes) * torch.maximum(size, ordinary)
    return bool(((found == expected) | ((found - expected).abs() <= allowed)).all())
