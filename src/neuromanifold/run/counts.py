"""What a run has seen so far."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from neuromanifold.problem.progress import RunProgress


@dataclass
class Counts:
    """What a run has seen."""

    samples: int = 0
    positions: int = 0
    batches: int = 0
    passes: int = 0
    verified: int = 0  # batches whose per-sample gradients were compared with autograd's
    dtype: str = ""
    stopped: str = ""
    methods: list[str] = field(default_factory=list)  # how each parameter was done
    first: str = ""  # a fingerprint of batch 0 of the data, whichever shard this is
    next: int = 0  # the number, in the data, of the batch after the last one
    running_samples: int | Tensor = 0  # perhaps still on their way on a GPU
    running_positions: int | Tensor = 0

    def synchronize(self) -> None:
        """Wait for what is still on a GPU."""
        self.samples, self.positions = int(self.running_samples), int(self.running_positions)

    def progress(self, relative_error: float | None) -> RunProgress:
        """Return how far the run has come; waits for a GPU."""
        return RunProgress(self.batches, int(self.running_samples), self.next, relative_error)
