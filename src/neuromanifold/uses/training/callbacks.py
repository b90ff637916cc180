"""Record the Fisher information along training: with the Trainer of transformers, with Lightning, or by hand.

Neither library is imported before it is asked for.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from torch import nn

from neuromanifold.core.checks import integer_in_range, message
from neuromanifold.hf.errors import require
from neuromanifold.run.fisher import fisher_diagonal

__all__ = ["FisherRecorder", "lightning_callback", "record_with_trainer"]


class FisherRecorder:
    """Computes the Fisher diagonal every so many steps of training, and keeps its trace and error.

    The model is not changed.  Cost: that of `fisher_diagonal` on the data, for each record.

    Args:
        data: a few fixed batches, so that steps can be compared.
        every: steps between two records.
        folder: where each result is saved, as step-N.safetensors; None saves none.
        arguments: those of `fisher_diagonal`, such as `parameters` and `passes`.

    Raises:
        TypeError, ValueError: data that can be read only once, or an argument that `fisher_diagonal` does not have.
        NotADirectoryError: `folder` is a file.

    Example:
        >>> from neuromanifold.uses.training.callbacks import FisherRecorder
        >>> recorder = FisherRecorder(data, every=10)
        >>> for step in range(1, 21):
        ...     if recorder.is_due(step):  # after the step of the optimizer
        ...         metrics = recorder.record(model, step)
        >>> [record["step"] for record in recorder.history]
        [10, 20]
    """

    def __init__(
        self, data: Iterable[object], every: int = 100, folder: str | Path | None = None, **arguments: Any
    ) -> None:
        if iter(data) is data:
            advice = "It is iterated over several times. Pass list(data)."
            raise TypeError(message("data", "a list, a DataLoader or another iterable", "an iterator", advice))
        inspect.signature(fisher_diagonal).bind(None, data, **arguments)  # fails now, not in the middle of training
        self.data, self.arguments = data, arguments
        self.every = integer_in_range(every, "every", 1, 2**62, "steps of training")
        self.folder = None if folder is None else Path(folder)
        if self.folder is not None and self.folder.exists() and not self.folder.is_dir():
            raise NotADirectoryError(message("folder", "a folder, or a new one", f"{self.folder}, a file"))
        self.history: list[dict[str, float]] = []
        """For each record the step, `fisher/trace`, its `fisher/stderr` and the result's `fisher/relative_error`."""

    def is_due(self, step: int) -> bool:
        """Return whether to record after this step, counted from 1; a step is recorded once."""
        return step % self.every == 0 and not (self.history and self.history[-1]["step"] == step)

    def record(self, model: nn.Module, step: int) -> dict[str, float]:
        """Compute the diagonal, save it as FOLDER/step-N.safetensors, and return what there is to log."""
        fim = fisher_diagonal(model, self.data, **self.arguments)
        if self.folder is not None:
            self.folder.mkdir(parents=True, exist_ok=True)
            fim.save(self.folder / f"step-{step}.safetensors")
        trace = fim.trace
        found = {"trace": trace.value, "stderr": trace.stderr, "relative_error": fim.relative_error}
        metrics = {f"fisher/{name}": float(value) for name, value in found.items()}
        self.history.append({"step": step, **metrics})
        return metrics


def record_with_trainer(
    trainer: Any, data: Iterable[object], every: int = 100, folder: str | Path | None = None, **arguments: Any
) -> FisherRecorder:
    """Record during `trainer.train()` of transformers, log to all of its loggers, and return the recorder."""
    transformers = require("transformers", "hf", "Recording with a Trainer")
    if not isinstance(trainer, transformers.Trainer):
        raise TypeError(message("trainer", "a transformers.Trainer", type(trainer).__name__))
    recorder = FisherRecorder(data, every, folder, **arguments)

    class Callback(transformers.TrainerCallback):  # type: ignore[misc, name-defined]
        def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **rest: Any) -> None:
            del args, control, rest
            if state.is_world_process_zero and recorder.is_due(state.global_step):
                trainer.log(recorder.record(model, state.global_step))

    trainer.add_callback(Callback())
    return recorder


def lightning_callback(
    data: Iterable[object], every: int = 100, folder: str | Path | None = None, **arguments: Any
) -> Any:
    """Return a callback for Lightning's Trainer that records, and logs to all of its loggers.

    The module's `forward` must return logits.  The callback's `recorder` is the `FisherRecorder`.
    """
    lightning = require("lightning.pytorch", "lightning", "Recording with Lightning")
    recorder_of_callback = FisherRecorder(data, every, folder, **arguments)

    class Callback(lightning.Callback):  # type: ignore[misc, name-defined]
        recorder = recorder_of_callback

        def on_train_batch_end(self, trainer: Any, pl_module: Any, *rest: Any) -> None:
            del rest
            step = trainer.global_step
            if trainer.is_global_zero and step and self.recorder.is_due(step):
                metrics = self.recorder.record(pl_module, step)
                for logger in trainer.loggers:
                    logger.log_metrics(metrics, step=step)

    return Callback()
