"""Capture the work on a batch as CUDA graphs, since on a fast GPU launching kernels may take longer than running them.

    batch 0         eagerly; whatever is decided or compiled only once is done by then
    batch 1         eagerly as well, timed, and watched for anything that waits for the device
    batch 2         captured as two CUDA graphs, forward and backward, then replayed
    batches 3, ...  copied into the captured batch's memory and replayed, if they have the same shapes

"auto" captures only what pays: if Python launches batch 1 in less than `_LAUNCHING` of the time that the device takes
for it, the device does not wait for Python, and graphs would only take memory.  Graphs whose replays take longer than
batch 1 did are dropped.

A captured graph knows nothing of Python: a model that counts its calls or reads the clock would be replayed as it was.
So replayed logits are compared with the model's own in replays number 1, 2, 4, 8, ... and in the last one; and batches
whose per-sample gradients have to be verified run eagerly.  What cannot be captured (values that are read back, other
shapes, hooks of the user's) runs eagerly, too.
"""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from neuromanifold.core.checks import warn
from neuromanifold.persample.accumulate import DiagonalSums, GradientSums, Tally
from neuromanifold.problem.batches import Batch
from neuromanifold.problem.cotangents import Validity
from neuromanifold.problem.outputs import Outputs
from neuromanifold.run.methods import Method
from neuromanifold.run.settings import CudaGraphs

_EAGER = 2  # batches of a kind that run eagerly before one is captured
_GRAPHS = 8  # at most: each keeps a batch's activations
_ROOM = 2.0  # times the memory that is used so far must be free, for "auto"
_LAUNCHING = 0.7  # of a batch's time that Python must take to launch it, for "auto"
_SLOWER = 1.03  # times an eager batch that a replay may take, for "auto"
_TIMED = (3, 5, 6)  # replays of which the shortest counts; in none of them logits are compared
_REASON = 300  # characters


class NotCapturedWarning(UserWarning):
    """Batches could not be captured as CUDA graphs: the result is right, and takes as long as without them.

    The message names the operation that does not allow it.  `cuda_graphs="auto"`, the default, falls back without a
    warning.
    """


class GraphRecorder:
    """Captures CUDA graphs on a stream of their own; they share their memory."""

    def __init__(self, generator: torch.Generator) -> None:
        self._generator = generator
        self._stream: Any = torch.cuda.Stream(generator.device)  # type: ignore[no-untyped-call]
        self._pool = torch.cuda.graph_pool_handle()

    @contextmanager
    def capture(self) -> Iterator[Any]:
        """Capture what is launched inside, instead of running it."""
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
    def timed(self) -> Iterator[list[float]]:
        """Note the seconds until all that is inside has been launched, and until the device is done with it."""
        seconds: list[float] = []
        torch.cuda.synchronize(self._generator.device)
        start = time.perf_counter()
        yield seconds
        seconds.append(time.perf_counter() - start)
        torch.cuda.synchronize(self._generator.device)
        seconds.append(time.perf_counter() - start)

    @contextmanager
    def watch_synchronization(self) -> Iterator[list[str]]:
        """Note in the list what waits for the device inside: it could not be captured."""
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
    def reported_as(self, capturing: bool) -> Iterator[None]:
        """Set what `torch.cuda.is_current_stream_capturing` returns: models that ask may do more, or less.

        Models ask this function itself, so that there is no argument that would do.
        """
        before = torch.cuda.is_current_stream_capturing
        torch.cuda.is_current_stream_capturing = lambda: capturing
        try:
            yield
        finally:
            torch.cuda.is_current_stream_capturing = before

    def recover(self) -> None:
        """End torch's bookkeeping after a capture that has failed: the next one does that.

        If that fails, too, generators go on taking themselves for captured, and draw nothing any more, the default one,
        which is the user's, included.  Copies of their states know of no capture.
        """
        torch.cuda.synchronize()
        device = self._generator.device
        with suppress(RuntimeError), self.capture():
            torch.zeros(1, device=device)
        for generator in (self._generator, torch.cuda.default_generators[device.index]):
            try:
                torch.empty(1, device=device).uniform_(generator=generator)
            except RuntimeError:
                generator.graphsafe_set_state(generator.clone_state())


@dataclass
class _CapturedBatch:
    """The memory that a batch is copied into, what follows from it, and the graphs."""

    batch: Batch
    outputs: Outputs
    found: Validity | None  # whether the outputs are finite
    passes: int
    tally: Tally  # samples that the sums count
    forward: Any
    backward: Any
    replayed: int = 0
    compared: int = 0  # the number of the replay whose logits have been compared last
    seconds: float = math.inf  # of a replay


class CapturedSteps:
    """Does batches by replaying CUDA graphs of a method where that is possible."""

    def __init__(self, method: Method, sums: GradientSums, wanted: CudaGraphs = True, recorder: Any = None) -> None:
        self._method, self._all_sums, self._recorder, self._wanted = method, sums, recorder, wanted
        on_gpu = recorder is not None or method.problem.device.type == "cuda"
        self._sums = sums if isinstance(sums, DiagonalSums) and wanted and on_gpu else None  # None: nothing is captured
        if self._sums is not None and not _has_no_hooks(method.problem.model):
            self._give_up("modules have hooks, which a replay would not call")
        self._reported = False  # as capturing, to the model
        self._times: dict[object, int] = {}
        self._graphs: dict[object, _CapturedBatch] = {}
        self._eager_seconds: dict[object, float] = {}
        self._not_worth: set[object] = set()  # kinds of batches that "auto" runs eagerly
        self.replayed = 0

    def __call__(self, batch: Batch) -> Outputs:
        """Replay if there is a graph for this kind of batch; capture one if it is time to."""
        if self._sums is not None and self._method.verifies_every_batch:
            self._give_up("samples cannot be followed through the model, so that every batch is verified")
        signature = None if self._sums is None else _signature((batch.args, batch.kwargs, batch.labels))
        if self._sums is None or signature is None or self._method.must_run_eagerly:
            return self._eagerly(batch)
        key = signature, self._sums.variant
        if key in self._not_worth:
            return self._eagerly(batch)
        if key not in self._graphs and self._times.get(key, 0) >= _EAGER:
            self._capture(key, batch, self._sums)
        captured = self._graphs.get(key)
        if captured is not None:
            outputs = self._replay(captured, batch, self._sums)
            if captured.replayed == _TIMED[-1] and captured.seconds > _SLOWER * self._eager_seconds.get(key, math.inf):
                self._compare_last(captured)
                del self._graphs[key]
                self._not_worth.add(key)
            return outputs
        self._times[key] = self._times.get(key, 0) + 1
        return self._watched(key, batch, self._sums) if self._times[key] == _EAGER else self._eagerly(batch)

    def synchronize(self) -> None:
        """Compare the last replays with the model, where that has not been done."""
        for captured in self._graphs.values():
            self._compare_last(captured)

    def _compare_last(self, captured: _CapturedBatch) -> None:
        """Graphs share their memory, so that others may have written over the logits: forward is replayed once more."""
        if captured.compared < captured.replayed:
            captured.forward.replay()
            if not self._is_right(captured):
                self._raise_changed("the last batches")

    @property
    def _tape(self) -> Any:
        self._recorder = self._recorder or GraphRecorder(self._method.generator)
        return self._recorder

    def _timed(self) -> AbstractContextManager[list[float]]:
        """Time what is inside, if that decides anything."""
        return self._tape.timed() if self._wanted == "auto" else nullcontext([])

    def _eagerly(self, batch: Batch) -> Outputs:
        if self._sums is None:
            return self._method(batch, self._all_sums)
        outputs = self._passes(batch, self._sums)
        self._method.end_batch(batch)
        return outputs

    def _passes(self, batch: Batch, sums: DiagonalSums) -> Outputs:
        with self._tape.reported_as(self._reported):  # the same in all batches, so that a model does the same
            outputs = self._method.forward(batch)
        self._method.seed(batch.number)
        self._method.backward(outputs, sums)
        return outputs

    @contextmanager
    def _nothing_read_back(self, sums: DiagonalSums) -> Iterator[list[Validity]]:
        """Postpone what is read back now and then; whether outputs are finite is given out."""
        with sums.without_synchronization(), self._method.validation.postponed() as found:
            yield found

    def _watched(self, key: object, batch: Batch, sums: DiagonalSums) -> Outputs:
        """Run eagerly, without reading anything back; a model that waits for the device is not captured."""
        watched = self._tape.watch_synchronization()
        with self._nothing_read_back(sums) as found, self._timed() as seconds, watched as noted:
            outputs = self._passes(batch, sums)
        self._method.end_batch(batch)
        if seconds:
            launched, self._eager_seconds[key] = seconds
            if launched < _LAUNCHING * self._eager_seconds[key]:
                self._not_worth.add(key)
        if found:
            self._method.validation.check_later(found[0], batch.number)
        if noted:
            self._cannot_capture(f"the model waits for the device: {noted[0]}")
        return outputs

    def _capture(self, key: object, batch: Batch, sums: DiagonalSums) -> None:
        current = [other for other in self._graphs if other[1] == key[1]]  # type: ignore[index]
        if len(current) >= _GRAPHS or not self._has_room():
            return
        method, recorder = self._method, self._tape
        passes, tally = method.passes, sums.tally()
        if not self._graphs:
            torch.cuda.empty_cache()  # graphs have memory of their own; what batches have used so far is given back
        own = batch._replace(**{name: _copied(getattr(batch, name)) for name in ("args", "kwargs", "labels")})
        try:
            with self._nothing_read_back(sums), recorder.capture() as forward, recorder.reported_as(self._reported):
                outputs = method.forward(own)
            with self._nothing_read_back(sums) as found, recorder.capture() as backward:
                method.backward(outputs, sums)
        except Exception as error:  # an operation that waits for the device, or that cannot be captured
            sums.discard_batch()
            recorder.recover()
            self._cannot_capture(f"{type(error).__name__}: {error}")
            return
        finally:
            passes, method.passes = method.passes - passes, passes
            counted = sums.tally()
            sums.set_tally(tally)
        first = found[0] if found else None
        self._graphs[key] = _CapturedBatch(
            own, outputs.detached(), first, passes, counted.since(tally), forward, backward
        )

    def _has_room(self) -> bool:
        """Whether there is memory for the activations of one more batch; always, if graphs are asked for."""
        if self._wanted is True or self._method.problem.device.type != "cuda":
            return True
        free, _ = torch.cuda.mem_get_info(self._method.problem.device)
        return free > _ROOM * torch.cuda.max_memory_allocated(self._method.problem.device)

    def _replay(self, captured: _CapturedBatch, batch: Batch, sums: DiagonalSums) -> Outputs:
        for own, new in zip(_tensors(captured.batch), _tensors(batch), strict=True):
            own.copy_(new, non_blocking=True)
        captured.replayed += 1
        with self._timed() if captured.replayed in _TIMED else nullcontext([]) as seconds:
            captured.forward.replay()
            if captured.replayed & (captured.replayed - 1) == 0 and not self._is_right(captured):
                if captured.replayed > _EAGER:
                    self._raise_changed(f"batch {batch.number}")
                self._give_up("the model depends on more than its inputs")  # nothing of this batch has been added yet
                return self._method(batch, self._all_sums)
            self._method.seed(batch.number)  # the graph reads the generator's seed anew with each replay
            captured.backward.replay()
        captured.seconds = min([captured.seconds, *seconds[1:]])
        self.replayed += 1
        self._method.passes += captured.passes
        self._method.release()
        sums.set_tally(sums.tally().plus(captured.tally))
        if captured.found is not None:
            self._method.validation.check_later(captured.found.clone(), batch.number)
        with self._tape.reported_as(self._reported):
            self._method.verify_late(batch)
        return captured.outputs

    def _is_right(self, captured: _CapturedBatch) -> bool:
        """Whether the replayed logits are the model's own, but for rounding."""
        captured.compared = captured.replayed
        with self._tape.reported_as(self._reported):
            own, found = self._method.problem.outputs(captured.batch).logits, captured.outputs.logits
        error, size = (float(torch.linalg.vector_norm(t.float())) for t in (own - found, own))
        return error <= 4 * torch.finfo(own.dtype).eps * size or math.isnan(error)  # NaN is found elsewhere

    def _cannot_capture(self, reason: str) -> None:
        """Begin again with a model that is told that it is captured; if it has been told, give up.

        transformers, if not told, look at masks, which waits for the device; if told, they mask even where nothing is
        hidden, and attention with a mask takes longer.
        """
        if self._reported:
            self._give_up(reason)
            return
        self.synchronize()
        self._graphs.clear()
        self._times.clear()
        self._reported = True

    def _give_up(self, reason: str) -> None:
        self._sums = None
        if self._wanted == "auto":
            return
        text = f"`cuda_graphs`: falls back to eager, because {' '.join(reason.split())[:_REASON]}"
        warn(text, NotCapturedWarning)

    def _raise_changed(self, where: str) -> None:
        text = f"`data`, {where}: the model does not compute what was captured of it before; it may depend on more "
        raise RuntimeError(text + "than its inputs. Use cuda_graphs=False.")


def _has_no_hooks(model: nn.Module) -> bool:
    """Whether no hooks are on the model's modules: a replay calls none.

    Those that transformers install by themselves only note intermediate outputs, for the output of the same call.
    """
    names = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    found = (hook for module in model.modules() for name in names for hook in getattr(module, name, {}).values())
    return all((getattr(hook, "__module__", None) or "").split(".")[0] == "transformers" for hook in found)


def _signature(value: Any) -> object:
    """What must be the same for a replay: shapes and types of tensors, all else as it is; None: cannot be captured."""
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


def _tensors(batch: Batch) -> list[Tensor]:
    return [leaf for leaf in tree_leaves((batch.args, batch.kwargs, batch.labels)) if isinstance(leaf, Tensor)]
