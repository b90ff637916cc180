"""Recording the work on a batch once and replaying it, since on a fast GPU launching operations may take longest.

    batches 1, 2    as always; whatever is found out or compiled only once is done by then
    batch 3         recorded as two CUDA graphs, forward and the rest, then replayed
    batches 4, ...  copied into the recorded batch's memory and replayed, if they have the same shapes

A recording knows nothing of Python: a model that counts its calls, or reads the clock, would be replayed as it was.  So
recorded logits are compared with the model's own in replays number 1, 2, 4, 8, ...  What cannot be recorded (values
that are read back, other shapes, hooks of the user's) is done as always.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from neuromanifold.pullback.sums import GradientSums
from neuromanifold.run.batches import Batch, Outputs
from neuromanifold.run.step import Step

_BEFORE = 2  # batches of a kind that are done as always, before one is recorded
_RECORDINGS = 8  # at most: each keeps a batch's activations


class Recorder:
    """CUDA graphs on a stream of their own, which share their memory."""

    def __init__(self, generator: torch.Generator) -> None:
        self._generator = generator
        self._stream: Any = torch.cuda.Stream(generator.device)  # type: ignore[no-untyped-call]
        self._pool = torch.cuda.graph_pool_handle()

    @contextmanager
    def recording(self) -> Iterator[Any]:
        """What is launched inside is recorded, and not done."""
        graph = torch.cuda.CUDAGraph()
        graph.register_generator_state(self._generator)
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            graph.capture_begin(self._pool, capture_error_mode="thread_local")
            try:
                yield graph
            finally:
                graph.capture_end()
        torch.cuda.current_stream().wait_stream(self._stream)


class _Recording(NamedTuple):
    """The memory that a batch is copied into, what follows from it, and how."""

    batch: list[Tensor]
    outputs: Outputs
    good: Tensor | None  # whether the outputs are finite
    passes: int
    forward: Any
    backward: Any


class Replay:
    """A step that replays itself where that is possible."""

    def __init__(self, step: Step, sums: GradientSums, recorder: Any = None) -> None:
        self._step, self._sums = step, sums
        self._wanted = sums.replays and (recorder is not None or step.device.type == "cuda") and _plain(step.model)
        self._recorder = recorder
        self._times: dict[object, int] = {}
        self._recordings: dict[object, _Recording] = {}
        self.replayed = 0

    def __call__(self, batch: Batch, number: int) -> Outputs:
        """Replay if there is a recording of this kind of batch; make one if it is time to."""
        key = (_signature(tuple(batch)), self._sums.weight)
        if self._wanted and key not in self._recordings and self._times.get(key, 0) >= _BEFORE:
            self._record(key, batch, number)
        recording = self._recordings.get(key)
        if recording is None or not self._wanted:
            self._times[key] = self._times.get(key, 0) + 1
            return self._step(batch, number)
        return self._replay(recording, batch, number)

    def _record(self, key: object, batch: Batch, number: int) -> None:
        if len(self._recordings) >= _RECORDINGS:
            return
        step, before = self._step, self._step.squares.passes
        recorder = self._recorder = self._recorder or Recorder(step.generator)
        if not self._recordings:
            torch.cuda.empty_cache()  # recordings have memory of their own; what batches have used so far is given back
        own = Batch(*(_copied(part) for part in batch))
        try:
            with recorder.recording() as forward:
                outputs = step.forward(own, number)
            with recorder.recording() as backward, step.validation.postponed() as good:
                step.backward(outputs, number)
        except Exception:  # an operation that waits for the device, or that cannot be recorded
            self._wanted = False
            step.squares.passes = before
            return
        passes, step.squares.passes = step.squares.passes - before, before
        kept = outputs._replace(logits=outputs.logits.detach())
        self._recordings[key] = _Recording(_tensors(tuple(own)), kept, good.get("good"), passes, forward, backward)

    def _replay(self, recording: _Recording, batch: Batch, number: int) -> Outputs:
        for own, new in zip(recording.batch, _tensors(tuple(batch)), strict=True):
            own.copy_(new, non_blocking=True)
        recording.forward.replay()
        self.replayed += 1
        if self.replayed & (self.replayed - 1) == 0 and not self._is_right(recording, batch):
            if self.replayed > _BEFORE:
                text = f"Batch {number} of `data`: the model does not compute what was recorded of it before; it may "
                raise RuntimeError(text + "depend on more than its inputs. Use replay=False.")
            self._wanted = False
            return self._step(batch, number)
        recording.backward.replay()
        self._step.squares.passes += recording.passes
        if recording.good is not None:
            self._step.validation.look_later(recording.good.clone(), None, number)
        return recording.outputs

    @torch.no_grad()
    def _is_right(self, recording: _Recording, batch: Batch) -> bool:
        """Whether the recorded logits are the model's own, but for rounding."""
        own, found = self._step.outputs(batch).logits, recording.outputs.logits
        eps = torch.finfo(own.dtype).eps
        error, size = (float(torch.linalg.vector_norm(t.float())) for t in (own - found, own))
        return error <= 16 * eps * size or math.isnan(error)  # NaN is another matter, and found elsewhere


def _plain(model: nn.Module) -> bool:
    """Whether nobody listens to the model's modules: a replay calls no hooks."""
    names = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return not any(getattr(module, name, None) for module in model.modules() for name in names)


def _signature(value: Any) -> object:
    """What must be the same for a replay: shapes and types of tensors, and everything else as it is."""
    if isinstance(value, Tensor):
        return value.shape, value.stride(), value.dtype, value.device
    if isinstance(value, dict):
        return tuple((key, _signature(entry)) for key, entry in value.items())
    if isinstance(value, (tuple, list)):
        return type(value), tuple(_signature(entry) for entry in value)
    try:
        hash(value)
    except TypeError:
        return object()  # like nothing else: never replayed
    return type(value), value


def _copied(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.clone()
    if isinstance(value, dict):
        return {key: _copied(entry) for key, entry in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_copied(entry) for entry in value))
    if isinstance(value, (tuple, list)):
        return type(value)(_copied(entry) for entry in value)
    return value


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, (tuple, list)) else ()
    return [tensor for part in parts for tensor in _tensors(part)]
