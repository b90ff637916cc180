"""Recording the work on a batch once and replaying it, since on a fast GPU launching operations may take longest.

    batch 1         as always; whatever is found out or compiled only once is done by then
    batch 2         a rehearsal: done as well, and watched for anything that waits for the device
    batch 3         recorded as two CUDA graphs, forward and the rest, then replayed
    batches 4, ...  copied into the recorded batch's memory and replayed, if they have the same shapes

A recording knows nothing of Python: a model that counts its calls, or reads the clock, would be replayed as it was.  So
recorded logits are compared with the model's own in replays number 1, 2, 4, 8, ... and in the last one.  What cannot be
recorded (values that are read back, other shapes, hooks of the user's) is done as always.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from neuromanifold.persample.sums import DiagonalSums, GradientSums, Tally
from neuromanifold.persample.watch import Watch
from neuromanifold.problem.batches import Batch
from neuromanifold.problem.outputs import Outputs
from neuromanifold.problem.validation import Found
from neuromanifold.run.step import Step

_BEFORE = 2  # batches of a kind that are done, and rehearsed, before one is recorded
_RECORDINGS = 8  # at most: each keeps a batch's activations
_REASON = 300  # characters


class NotReplayedWarning(UserWarning):
    """The answer is right, but batches could not be replayed, and take as long as without `replay`."""


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

    @contextmanager
    def rehearsal(self) -> Iterator[list[str]]:
        """What waits for the device inside is noted in the list: it could not be recorded."""
        noted: list[str] = []
        mode = torch.cuda.get_sync_debug_mode()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            try:
                yield noted
            finally:
                torch.cuda.set_sync_debug_mode(mode)
        for one in caught:
            if "called a synchronizing" in str(one.message):
                noted.append(str(one.message))
            elif "Synchronization debug mode" not in str(one.message):
                warnings.warn_explicit(one.message, one.category, one.filename, one.lineno)

    @contextmanager
    def told(self, recorded: bool) -> Iterator[None]:
        """What a model hears that asks whether it is recorded: if it is, it may leave something out, or do more."""
        before = torch.cuda.is_current_stream_capturing
        torch.cuda.is_current_stream_capturing = lambda: recorded
        try:
            yield
        finally:
            torch.cuda.is_current_stream_capturing = before

    def recover(self) -> None:
        """After a recording that has failed: torch ends its bookkeeping, of random numbers too, with another one."""
        torch.cuda.synchronize()
        with suppress(RuntimeError), self.recording():
            torch.zeros(1, device=self._generator.device)


@dataclass
class _Recording:
    """The memory that a batch is copied into, what follows from it, and how."""

    batch: Batch
    outputs: Outputs
    found: Found | None  # whether the outputs are good
    passes: int
    tally: Tally  # samples that the sums count
    forward: Any
    backward: Any
    replayed: int = 0
    compared: int = 0  # the number of the replay whose logits have been compared last


class Replay:
    """A step that replays itself where that is possible."""

    def __init__(self, step: Step, sums: GradientSums, recorder: Any = None) -> None:
        self._step, self._recorder = step, recorder
        possible = isinstance(sums, DiagonalSums) and (recorder is not None or step.device.type == "cuda")
        self._sums = sums if isinstance(sums, DiagonalSums) and possible else None  # None: not replayed (any more)
        if possible and not _plain(step.model):
            self._give_up("modules have hooks, which a replay would not call")
        step.around_model = self._around_model
        self._told = False
        self._times: dict[object, int] = {}
        self._recordings: dict[object, _Recording] = {}
        self.replayed = 0

    def __call__(self, batch: Batch, number: int) -> Outputs:
        """Replay if there is a recording of this kind of batch; make one if it is time to."""
        signature = None if self._sums is None else _signature(tuple(batch[:3]))
        if self._sums is None or signature is None:
            return self._step(batch, number)
        key = signature, self._sums.variant
        if key not in self._recordings and self._times.get(key, 0) >= _BEFORE:
            self._record(key, batch, number, self._sums)
        recording = self._recordings.get(key)
        if recording is None:
            self._times[key] = self._times.get(key, 0) + 1
            rehearses = self._times[key] == _BEFORE
            return self._rehearse(batch, number, self._sums) if rehearses else self._step(batch, number)
        watch = self._step.squares.watch
        if watch is not None and watch.quiet and watch.calls_for_a_trial(watch.quiet):
            return self._step(batch, number)
        return self._replay(recording, batch, number, self._sums)

    def finish(self) -> None:
        """Compare the last replays with the model, where that has not been done."""
        for recording in self._recordings.values():
            if recording.compared < recording.replayed and not self._is_right(recording):
                self._complain("the last batches")

    @property
    def _tape(self) -> Any:
        self._recorder = self._recorder or Recorder(self._step.generator)
        return self._recorder

    @contextmanager
    def _around_model(self) -> Iterator[None]:
        """The model hears the same in all batches, recorded or not, so that it does the same operations."""
        with self._tape.told(self._told) if self._sums is not None else nullcontext():
            yield

    @contextmanager
    def _nothing_read_back(self, sums: DiagonalSums) -> Iterator[list[Found]]:
        """What is looked at now and then is not looked at inside; whether outputs are good, later."""
        watch = self._step.squares.watch or Watch()
        sums.recording, watch.may_wait = True, False
        try:
            with self._step.validation.postponed() as found:
                yield found
        finally:
            sums.recording, watch.may_wait = False, True

    def _rehearse(self, batch: Batch, number: int, sums: DiagonalSums) -> Outputs:
        """As always, but for what is read back between passes; a model that waits for the device is not recorded."""
        with self._nothing_read_back(sums) as found, self._tape.rehearsal() as noted:
            outputs = self._step(batch, number)
        if found:
            self._step.validation.look_later(found[0], number)
        if noted:
            self._impossible(f"the device is waited for: {noted[0]}")
        return outputs

    def _record(self, key: object, batch: Batch, number: int, sums: DiagonalSums) -> None:
        current = {other: kept for other, kept in self._recordings.items() if other[1] == key[1]}  # type: ignore[index]
        if len(current) >= _RECORDINGS:
            return
        step, passes, tally = self._step, self._step.squares.passes, sums.tally()
        recorder = self._tape
        if not self._recordings:
            torch.cuda.empty_cache()  # recordings have memory of their own; what batches have used so far is given back
        own = Batch(*(_copied(part) for part in batch))
        try:
            with self._nothing_read_back(sums), recorder.recording() as forward:
                outputs = step.forward(own, number)
            with self._nothing_read_back(sums) as found, recorder.recording() as backward:
                step.backward(outputs)
        except Exception as error:  # an operation that waits for the device, or that cannot be recorded
            sums.forget()
            recorder.recover()
            self._impossible(f"{type(error).__name__}: {error}")
            return
        finally:
            passes, step.squares.passes = step.squares.passes - passes, passes
            counted = sums.tally()
            sums.set_tally(tally)
        kept = outputs._replace(logits=outputs.logits.detach())
        first = found[0] if found else None
        self._recordings[key] = _Recording(own, kept, first, passes, counted.since(tally), forward, backward)

    def _replay(self, recording: _Recording, batch: Batch, number: int, sums: DiagonalSums) -> Outputs:
        for own, new in zip(_tensors(tuple(recording.batch)), _tensors(tuple(batch)), strict=True):
            own.copy_(new, non_blocking=True)
        recording.forward.replay()
        recording.replayed += 1
        if recording.replayed & (recording.replayed - 1) == 0 and not self._is_right(recording):
            if recording.replayed > _BEFORE:
                self._complain(f"batch {number}")
            self._give_up("the model depends on more than its inputs")  # nothing of this batch has been added yet
            return self._step(batch, number)
        self._step.seed(number)  # the graph reads the generator's seed anew with each replay
        recording.backward.replay()
        self.replayed += 1
        self._step.squares.passes += recording.passes
        sums.set_tally(sums.tally().plus(recording.tally))
        if recording.found is not None:
            self._step.validation.look_later(recording.found.clone(), number)
        return recording.outputs

    @torch.no_grad()
    def _is_right(self, recording: _Recording) -> bool:
        """Whether the recorded logits are the model's own, but for rounding."""
        recording.compared = recording.replayed
        own, found = self._step.outputs(recording.batch).logits, recording.outputs.logits
        error, size = (float(torch.linalg.vector_norm(t.float())) for t in (own - found, own))
        return error <= 4 * torch.finfo(own.dtype).eps * size or math.isnan(error)  # NaN is found elsewhere

    def _impossible(self, reason: str) -> None:
        """Begin again with a model that is told that it is recorded; if it has been told, give up.

        transformers, if not told, look at masks, which waits for the device; if told, they mask even where nothing is
        hidden, and attention with a mask takes longer.
        """
        if self._told:
            self._give_up(reason)
            return
        self.finish()
        self._recordings.clear()
        self._times.clear()
        self._told = True

    def _give_up(self, reason: str) -> None:
        self._sums = None
        text = f"`replay`: batches are done as always, because {' '.join(reason.split())[:_REASON]}"
        warnings.warn(text, NotReplayedWarning, stacklevel=2)

    def _complain(self, where: str) -> None:
        text = f"`data`, {where}: the model does not compute what was recorded of it before; it may depend on more "
        raise RuntimeError(text + "than its inputs. Use replay=False.")


def _plain(model: nn.Module) -> bool:
    """Whether nobody listens to the model's modules: a replay calls no hooks.

    Those that transformers install by themselves only note intermediate outputs, for the output of the same call.
    """
    names = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    found = (hook for module in model.modules() for name in names for hook in getattr(module, name, {}).values())
    return all((getattr(hook, "__module__", None) or "").split(".")[0] == "transformers" for hook in found)


def _signature(value: Any) -> object:
    """What must be the same for a replay: shapes and types of tensors, all else as it is; None: cannot be replayed."""
    if isinstance(value, Tensor):
        plain = value.layout == torch.strided and not value.is_nested
        return (value.shape, value.stride(), value.dtype, value.device) if plain else None
    if isinstance(value, (dict, tuple, list)):
        pairs = value.items() if isinstance(value, dict) else enumerate(value)
        parts = tuple((key, _signature(entry)) for key, entry in pairs)
        return None if any(part is None for _, part in parts) else (type(value), parts)
    return (type(value), value) if isinstance(value, (str, bool, int, float, type(None))) else None


def _copied(value: Any) -> Any:
    return tree_map(lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf, value)


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]
