"""What a caller chooses: how a problem is estimated, and how the loop goes through the data."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

from neuromanifold.core.checks import integer_in_range, message, one_of, random_seed
from neuromanifold.estimators import Estimator, SquaredBatchGradient
from neuromanifold.results.error_bars import ErrorBars
from neuromanifold.results.files import index_of
from neuromanifold.results.sharded import remove_parts

CudaGraphs = bool | Literal["auto"]
Granularity = Literal["auto", "batch", "sample"]
OnInterrupt = Literal["raise", "return"]
"""What Ctrl-C does to a run: raise KeyboardInterrupt, or return the result of the batches that are done."""
Distributed = Literal["auto", "own data", False]
"""Whether the processes of a process group share a run, and whether each of them has data of its own."""
LARGE = 2**28
"""With more entries than this, "auto" gives error bars to rows alone: those of entries would take over a gigabyte."""


@dataclass(frozen=True)
class Settings:
    """How a problem is estimated."""

    estimator: Estimator
    granularity: Granularity = "auto"
    seed: int = 0

    @classmethod
    def of(cls, estimator: Estimator, granularity: str, seed: int) -> Settings:
        """Check the arguments; for "batch", use the estimator's variant for whole batches, with independent probes."""
        seed = random_seed(seed)
        level = choose_granularity(estimator, granularity)
        return cls(estimator.for_batches() if level == "batch" else estimator, level, seed)


def choose_granularity(estimator: Estimator, granularity: str) -> Granularity:
    """Return the granularity: "batch" for `nm.SquaredBatchGradient`; refuse one that would not estimate F."""
    if not isinstance(estimator, Estimator):
        advice = "Make one, such as nm.Hutchinson()."
        raise TypeError(message("estimator", "an estimator", repr(estimator), advice))
    one_of(granularity, "granularity", "auto", "batch", "sample")
    whole = isinstance(estimator, SquaredBatchGradient)
    if granularity == "sample" and whole:
        raise ValueError(message("granularity", "'auto' or 'batch' for SquaredBatchGradient", "'sample'"))
    if granularity == "batch" and not (estimator.centred or whole):
        advice = (
            "The gradients of different samples do not cancel on average, so the square of their sum is not a Fisher "
        )
        advice += "information. Use granularity='sample', or nm.SquaredBatchGradient() if that is the number you want."
        raise ValueError(message("granularity", f"'auto' or 'sample' for {estimator}", "'batch'", advice))
    return "batch" if whole else granularity  # type: ignore[return-value]


def choose_error_bars(value: object, entries: int, rtol: float | None) -> ErrorBars:
    """Check `error_bars`, and resolve "auto" by the number of entries alone, so that shards of a run agree."""
    if not isinstance(value, bool) and not (isinstance(value, str) and value in ("rows", "auto")):
        raise ValueError(message("error_bars", "True, False, 'rows' or 'auto'", repr(value)))
    if value == "auto":
        return "rows" if entries > LARGE else True
    if rtol is not None and not value:
        advice = "rtol is a relative standard error."
        raise ValueError(message("error_bars", "True or 'rows' with rtol", "False", advice))
    return value  # type: ignore[return-value]


class RunProgress(NamedTuple):
    """How far a run has come."""

    batches: int  # done so far, those in a resumed checkpoint included
    samples: int
    place: int  # in the data, of the next batch: batches of other shards count, too
    relative_error: float | None  # Σ stderr / Σ F so far; None: nothing is random
    tokens: int = 0  # that count; 0 if the samples are not sequences


Observer = Callable[[RunProgress], None]
"""Called with the progress of a run at most every half second."""


@dataclass(frozen=True)
class Checkpoint:
    """Where a run keeps its state, and how often: pass it as `checkpoint=`.

    A rerun with the same arguments continues from the file.  It stays when the run has ended: a further rerun then only
    goes through the data and gives the same result.  Delete it with `remove()`, which knows the names of all processes'
    files, once the result is saved.

    Args:
        path: the file.  With several processes, each adds its rank to the name.
        every: seconds between two writes; 0 writes after every batch.  By default every 30 seconds, or as rarely as
            writing takes a twentieth of the time.

    Raises:
        TypeError, ValueError: `every` is not a number of seconds.

    Example:
        >>> import tempfile
        >>> checkpoint = nm.Checkpoint(f"{tempfile.mkdtemp()}/run.ckpt", every=60)
        >>> fim = nm.fisher_diagonal(model, data, checkpoint=checkpoint)
        >>> checkpoint.remove()
    """

    path: str | Path
    every: float | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.path, (str, Path)) or not str(self.path):
            raise TypeError(message("checkpoint", "a path or an nm.Checkpoint", repr(self.path)))
        number = not isinstance(self.every, bool) and isinstance(self.every, (int, float))
        if self.every is not None and not (number and 0 <= self.every < math.inf):
            raise ValueError(message("every", "a number of seconds >= 0, or None", repr(self.every)))

    def files(self) -> dict[int, Path]:
        """The files that exist, by the rank of the process that wrote them."""
        path = Path(self.path).resolve()  # follows links
        named = re.compile(re.escape(f"{path.name}.rank") + "([1-9][0-9]*)")
        found = {0: path if path.exists() else index_of(path)}
        found = {rank: path for rank, path in found.items() if path.exists()}
        for entry in path.parent.iterdir() if path.parent.is_dir() else ():
            if rank := named.fullmatch(entry.name):
                found[int(rank[1])] = entry
        return dict(sorted(found.items()))

    def file(self, rank: int) -> Path:
        """The file that the process of this rank writes."""
        path = Path(self.path).resolve()
        return path.with_name(f"{path.name}.rank{rank}") if rank else path

    def remove(self) -> None:
        """Delete the files of all processes."""
        for path in self.files().values():
            path.unlink(missing_ok=True)
        remove_parts(Path(self.path).resolve())


@dataclass(frozen=True)
class LoopOptions:
    """How the loop is run, apart from what it computes."""

    progress: bool | Observer = False
    shard: tuple[int, int] = (0, 1)  # (i, n): batches i, i + n, i + 2n, ... of the data
    checkpoint: Checkpoint | None = None
    on_interrupt: OnInterrupt = "raise"
    cuda_graphs: CudaGraphs = False
    description: str = "Fisher information"  # shown beside the progress bar
    distributed: Distributed = False

    @classmethod
    def of(
        cls,
        progress: bool | Observer,
        shard: tuple[int, int] | None,
        checkpoint: str | Path | Checkpoint | None,
        on_interrupt: OnInterrupt,
        distributed: Distributed,
        cuda_graphs: CudaGraphs = False,
    ) -> LoopOptions:
        """Check the arguments, and bring `shard` and `checkpoint` into the form that the loop takes."""
        if not isinstance(progress, bool) and not callable(progress):
            raise TypeError(message("progress", "True, False, or a function of a RunProgress", repr(progress)))
        if cuda_graphs not in (True, False, "auto"):
            raise ValueError(message("cuda_graphs", "True, False or 'auto'", repr(cuda_graphs)))
        if checkpoint is not None and not isinstance(checkpoint, Checkpoint):
            checkpoint = Checkpoint(checkpoint)
        one_of(on_interrupt, "on_interrupt", "raise", "return")
        one_of(distributed, "distributed", "auto", "own data", False)
        return cls(progress, _shard(shard), checkpoint, on_interrupt, cuda_graphs, distributed=distributed)


def _shard(shard: tuple[int, int] | None) -> tuple[int, int]:
    """Return (i, n) with 0 <= i < n; (0, 1), all of the data, for None."""
    if shard is None:
        return 0, 1
    if not isinstance(shard, (tuple, list)) or len(shard) != 2:
        raise TypeError(message("shard", "a pair (i, n), such as (0, 4) for the first of four", repr(shard)))
    shards = integer_in_range(shard[1], "shard[1]", 1, 2**31, "how many shards there are")
    return integer_in_range(shard[0], "shard[0]", 0, shards - 1, "which of the shards, counted from 0"), shards
