"""The diagonal of the Fisher information: a value for each parameter, with its standard error."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

import torch
from torch import Tensor
from typing_extensions import override

from neuromanifold.core.checks import Reduction, check_reduction, listed, message
from neuromanifold.results.comparison import Comparison, compare
from neuromanifold.results.drawing import drawing
from neuromanifold.results.error_bars import ErrorBars, coarser, converted, entry_noise, row_sums
from neuromanifold.results.files import LazyTensors, load, mapped, reads, renamed
from neuromanifold.results.intervals import check_level, interval
from neuromanifold.results.provenance import Provenance
from neuromanifold.results.scaling import Reducible, Scalable
from neuromanifold.results.sharded import SHARD_SIZE, save_result, whole
from neuromanifold.results.summary import HEADER, NOTES, summarize
from neuromanifold.results.table import WIDTH, text_table
from neuromanifold.results.trace import TraceEstimate, Viewed

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_CHUNK = 1 << 24  # entries that are added in float64 at a time


@dataclass(frozen=True, eq=False)
class DiagonalFisher(Reducible, Scalable, Viewed, Mapping[str, Tensor]):
    """The diagonal of F: a mapping from parameter name to a tensor of the parameter's shape, with standard errors.

    What is stored is the *sum* over samples and the number of samples; `reduction` only chooses the view, "mean" (per
    sample), "sum", or "token" (per position that counts, of sequences).  So results do not depend on the batch size,
    and two of them over disjoint data add with `+`.  Standard errors are those of the probes' noise; the data are taken
    as given.  Tied parameters are listed once, under their first name, and found under every name; so are those of a
    wrapped model (`torch.compile`, `DistributedDataParallel`), with the wrapper's prefix or without.

    Example:
        >>> fim = nm.fisher_diagonal(model, data)
        >>> list(fim), fim.count
        (['0.weight', '0.bias', '2.weight', '2.bias'], 32)
        >>> print(f"{fim['2.bias'][0]:.3f} ± {fim.stderr['2.bias'][0]:.3f}")
        0.258 ± 0.043
        >>> halves = nm.fisher_diagonal(model, data[:2]) + nm.fisher_diagonal(model, data[2:], seed=1)
        >>> halves.count
        32
    """

    sums: Mapping[str, Tensor]
    noise: Mapping[str, Tensor]  #: standard errors of the sums, of rows, or none: see `error_bars`
    count: int  #: samples
    positions: int  #: output distributions: as many as samples, or tokens, or pixels
    provenance: Provenance
    reduction: Reduction = "mean"
    noiseless: Mapping[str, Tensor] = field(default_factory=dict)  # the parts of sums that are not random, if any are

    def __getitem__(self, name: str) -> Tensor:
        return self.sums[self.provenance.find(name, self.sums)] / self.divisor

    def __iter__(self) -> Iterator[str]:
        return iter(self.sums)

    def __len__(self) -> int:
        return len(self.sums)

    @property
    def error_bars(self) -> ErrorBars:
        """What has standard errors: True, each entry; "rows", each row of a weight (`rows`); False, nothing."""
        return self.provenance.error_bars

    @property
    def stderr(self) -> Mapping[str, Tensor]:
        """The standard error of each entry, in the same view: a mapping that computes one tensor at a time.

        An error for a weight whose entries have none (`error_bars`).
        """
        return _PerParameter(self, "standard errors", self._noise_of)

    @property
    def rows(self) -> DiagonalFisher:
        """The sums of the rows of each weight, along its first dimension, with standard errors and intervals.

        A linear layer has a row for each output, an embedding one for each token; vectors stay as they are.  With
        `error_bars="rows"` the standard errors are those of the rows; else the sums of their entries', a wide bound.
        """
        kind = coarser(self.error_bars, "rows")
        sums, apart = ({n: row_sums(value) for n, value in d.items()} for d in (self.sums, self.noiseless))
        noise, provenance = (
            converted(self.noise, self.error_bars, kind),
            replace(self.provenance, error_bars=bool(kind)),
        )
        return replace(self, sums=sums, noise=noise, provenance=provenance, noiseless=apart)  # each has error bars

    def interval(self, level: float = 0.95) -> tuple[Mapping[str, Tensor], Mapping[str, Tensor]]:
        """Lower and upper ends of confidence intervals for each entry, in the same view, computed when asked for.

        Those of a scaled χ² (`results.intervals`), which holds where only a few samples contribute to an entry, too;
        F̂ ± 2 stderr does not.  What is `noiseless` is only added.  Where samples were left out (`passes`), they may
        contribute to entries in which nothing seems to be random: the upper end is then that of one sample, and
        infinite where the estimate is zero.
        """
        level = check_level(level)
        lower, upper = (
            _PerParameter(self, f"{end} ends of {100 * level:g} % intervals", partial(self._interval_end, level, i))
            for i, end in enumerate(("lower", "upper"))
        )
        return lower, upper

    def _noise_of(self, name: str) -> Tensor:
        return entry_noise(self.noise, self.sums, name)

    def _interval_end(self, level: float, end: int, name: str) -> Tensor:
        """Return the lower (0) or upper end (1) of the intervals of the sums."""
        sums, noise = self.sums[name], self._noise_of(name)
        found = interval(sums, noise, level, self.noiseless.get(name))[end]
        if end and self.provenance.left_out:
            of_one = interval(sums, sums * math.sqrt(2 / 3), level)[1]
            found = torch.where(noise > 0, found, torch.where(sums > 0, of_one, math.inf))
        return found

    @property
    def per_token(self) -> DiagonalFisher:
        """The view per position that counts, such as the tokens of sequences: sums divided by `positions`."""
        return self._view("token")

    @override
    def _view(self, reduction: Reduction) -> Self:
        return replace(self, reduction=reduction)

    @property
    def trace(self) -> TraceEstimate:
        """Σ_i F_ii.  Its standard error is an upper bound, the sum of the entries'; `nm.fisher_trace` is sharper.

        It is nan if the result has no error bars.
        """
        total, noise = (sum(map(self._total, d.values())) for d in (self.sums, self.noise))
        noise = noise if self.error_bars else math.nan
        return TraceEstimate(total, noise, self.count, self.provenance, self.reduction, self.positions)

    def _total(self, tensor: Tensor) -> float:
        return sum(part.sum(dtype=torch.float64).item() for part in torch.split(tensor.reshape(-1), _CHUNK))

    @property
    def relative_error(self) -> float:
        """Σ standard errors over Σ entries: 0.1 says that an entry is typically known to ten per cent.

        The standard error of an entry is a bound, and for deflated probes a wide one.  On average over entries it is
        known from the outputs how much of it is noise (`provenance.noise_ratio`), which is taken into account here.
        With error bars of rows it is about the sums of rows, which are known better; nan without error bars.
        """
        trace = self.trace
        return self.provenance.noise_ratio * trace.noise / trace.sum if trace.sum else 0.0

    def __add__(self, other: DiagonalFisher) -> DiagonalFisher:
        if not isinstance(other, DiagonalFisher):
            return NotImplemented
        self.provenance.check_like(other.provenance)  # another model is the first thing to say
        shapes, theirs = ({name: t.shape for name, t in d.sums.items()} for d in (self, other))
        if shapes != theirs:
            different = sorted(set(shapes.items()) ^ set(theirs.items()))[0][0]
            raise ValueError(message("other", "a result for the same parameters", f"a difference at {different!r}"))
        provenance = self.provenance.plus(other.provenance)
        mine, others = (converted(d.noise, d.error_bars, provenance.error_bars) for d in (self, other))
        random = [any(bool((value > 0).any()) for value in noise.values()) for noise in (mine, others)]
        combine = torch.add if all(random) and self.provenance.shares_noise_with(other.provenance) else torch.hypot
        exact = [d.noiseless if of_it else d.sums for d, of_it in zip((self, other), random, strict=True)]
        exact = [parts for parts in exact if parts and any(random)]  # all of a result may be, and nothing of another
        apart = mapped(lambda a, *parts: sum(part.to(a) for part in parts), self.sums, *exact) if exact else {}
        return replace(
            self,
            sums=mapped(lambda a, b: a + b.to(a), self.sums, other.sums),
            noise=mapped(lambda a, b: combine(a, b.to(a)), mine, others),
            count=self.count + other.count,
            positions=self.positions + other.positions,
            provenance=provenance,
            noiseless=apart,
        )

    def _times(self, factor: float) -> DiagonalFisher:
        scaled = self._changed(lambda d: mapped(lambda value: value * factor, d))
        return replace(scaled, provenance=self.provenance.times(factor))

    def _changed(self, function: Callable[[Mapping[str, Tensor]], Mapping[str, Tensor]]) -> DiagonalFisher:
        """The result with a function applied to sums, standard errors and parts without noise."""
        sums, noise, apart = (function(d) for d in (self.sums, self.noise, self.noiseless))
        return replace(self, sums=sums, noise=noise, noiseless=apart)

    def to(self, target: torch.device | torch.dtype | str) -> DiagonalFisher:
        """The result on another device, or in float32, float64 or bfloat16 (sums leave the range of float16)."""
        if isinstance(target, torch.dtype) and target not in (torch.float32, torch.float64, torch.bfloat16):
            advice = "Convert single tensors of the mean yourself if you must."
            raise ValueError(message("target", "a device, float32, float64 or bfloat16", str(target), advice))
        return self._changed(lambda d: {name: value.to(target) for name, value in d.items()})

    def filter(self, *patterns: str) -> DiagonalFisher:
        """Only the parameters whose names match one of the patterns, such as "encoder.*"."""
        names = [name for name in self if any(fnmatchcase(name, pattern) for pattern in patterns)]
        if not names:
            raise ValueError(message("patterns", f"such that one of {list(self)[:3]} ... matches", str(patterns)))
        return self._changed(lambda d: renamed(d, {name: name for name in names if name in d}))

    def compare(self, other: Mapping[str, Tensor], epsilon: float = 1e-12) -> Comparison:
        """Return how far this is from `other`, the reference: RelMAE, cosine, rank correlation."""
        if isinstance(other, DiagonalFisher) and other.reduction != self.reduction:
            got = f"{other.reduction} against {self.reduction}"
            raise ValueError(message("other", "in the same view", got, "Use .mean, .sum or .per_token on both."))
        return compare(self, other, epsilon)

    def __str__(self) -> str:
        table = text_table(HEADER, summarize(self).rows(), width=WIDTH)
        return "\n".join([f"{type(self).__name__} ({self.unit})", table, NOTES[self.error_bars], self._footer()])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        html: str = drawing("html")(self)
        return html

    def plot(self, kind: Literal["histograms", "depth"] = "histograms") -> Figure:
        """A matplotlib figure: "histograms" of each component, as in the paper, or every layer along the "depth"."""
        figure: Figure = drawing("plot")(self, kind)
        return figure

    def report(
        self, path: str | Path = "fisher.html", *others: DiagonalFisher, titles: Sequence[str] | None = None
    ) -> Path:
        """Write one HTML page that needs no network: tables, charts and a summary as text; `others` are compared."""
        written: Path = drawing("report")(path, [self, *others], titles)
        return written

    def save(self, path: str | Path, shard_size: str | int = SHARD_SIZE) -> None:
        """Write to a safetensors file with its provenance, all or nothing; `nm.load` reads it.

        What is larger than `shard_size` is written to several files with an index, as Hugging Face does with models:
        fim-00001-of-00002.safetensors, ... and fim.safetensors.index.json, which `nm.load` finds by either name.  Their
        tensors are mapped into memory, and sums of such results are computed a tensor at a time, when they are saved.
        """
        self._save(path, shard_size)

    def _save(self, path: str | Path, shard_size: str | int, divided: bool = False) -> None:
        places = {f"sum/{name}": (self.sums, name) for name in self.sums}
        places |= {f"noise/{name}": (self.noise, name) for name in self.noise}
        places |= {f"noiseless/{name}": (self.noiseless, name) for name in self.noiseless}
        tensors = LazyTensors(lambda place: place[0][place[1]], places)
        numbers = {"count": str(self.count), "positions": str(self.positions), "reduction": self.reduction}
        texts = {"names": json.dumps(list(self.sums)), "provenance": self.provenance.to_json()}
        save_result(path, tensors, "diagonal", {**numbers, **texts}, shard_size, divided)

    def _footer(self) -> str:
        p = self.provenance
        checked = f" ({p.verified} verified)" if p.verified else ""
        out = f" ({p.left_out} left out at random)" if p.left_out else ""
        seen = f"{self.seen}{out}, {p.batches} batches{checked}, {p.passes} passes"
        lines = [f"{seen}; {p.estimator}: {p.target}"]
        scaled = [] if p.scale == 1 else [f"multiplied by {p.scale:g}"]
        scaled += ["position t predicts token t + 1: labels and masks shifted by one"] if p.shift_labels else []
        return "\n".join([*lines, *scaled, *self._squared(), *([p.stopped] if p.stopped else [])])

    def _squared(self) -> list[str]:
        """What was squared for each parameter, where it is not the sample's gradient for all of them."""
        squared: dict[str, list[str]] = {}
        for name in self:
            squared.setdefault(self.provenance.granularity.get(name, ""), []).append(name)
        shown = {how: listed(names, 3) for how, names in squared.items()}
        lines = []
        if "token" in squared:
            lines.append(f"squared per token, with less noise than per {self.provenance.unit}: {shown['token']}")
        if "batch" in squared and len(squared) > 1:
            lines.append(f"squared per batch, with more noise, because no rule covers them: {shown['batch']}")
        return lines


class ShardedFisher(DiagonalFisher):
    """A `DiagonalFisher` whose tensors are DTensors, divided among processes as the parameters of a model are.

    What needs values of all processes (`trace`, `rows`, `save`, `gathered`) is called by all of them.  Results add,
    scale and are filtered in parts; whatever looks at single entries is for the saved result, or the gathered one.
    """

    @override
    def _total(self, tensor: Any) -> float:
        return float(tensor.double().sum().full_tensor())

    @override
    def save(self, path: str | Path, shard_size: str | int = SHARD_SIZE) -> None:
        """Write whole parameters to a file or more for each process, with an index; none has all of them at a time.

        The folder must be one that all processes see.
        """
        self._save(path, shard_size, divided=True)

    def gathered(self) -> DiagonalFisher:
        """Return the whole result on each process, which must have the memory for it."""
        parts = (self.sums, self.noise, self.noiseless)
        sums, noise, apart = ({name: whole(t) for name, t in d.items()} for d in parts)
        return DiagonalFisher(sums, noise, self.count, self.positions, self.provenance, self.reduction, apart)

    def _refuse(self, *_: object, **__: object) -> Any:
        advice = "Save the result and nm.load it in one process, or take fim.gathered() if memory has room for it."
        raise ValueError(message("fim", "whole for intervals, comparisons and pages", "in parts", advice))

    interval = compare = plot = report = _refuse

    @override
    def _repr_html_(self) -> str:
        return f"<pre>{self}</pre>"

    @override
    def __str__(self) -> str:
        here = sum(tensor.to_local().numel() for tensor in self.sums.values())  # type: ignore[attr-defined]
        entries = sum(tensor.numel() for tensor in self.sums.values())
        what = f"{len(self)} parameters, {here:,} of {entries:,} entries in this process"
        return f"{type(self).__name__} ({self.unit}): {what}\n{self._footer()}\nSave it, and nm.load it anywhere."

    __repr__ = __str__


class _PerParameter(Mapping[str, Tensor]):
    """Something about each entry of a diagonal by parameter name, in its view, computed when it is asked for."""

    def __init__(self, result: DiagonalFisher, what: str, of_sums: Callable[[str], Tensor]) -> None:
        self._result, self._what, self._of_sums = result, what, of_sums

    def __getitem__(self, name: str) -> Tensor:
        return self._of_sums(self._result.provenance.find(name, self._result.sums)) / self._result.divisor

    def __iter__(self) -> Iterator[str]:
        return iter(self._result)

    def __len__(self) -> int:
        return len(self._result)

    def __repr__(self) -> str:
        return f"{self._what} of {len(self)} parameters ({self._result.reduction})"


@reads("diagonal")
def diagonal_from_file(tensors: Mapping[str, Tensor], head: dict[str, Any]) -> DiagonalFisher:
    """The diagonal that `DiagonalFisher.save` wrote."""
    names = json.loads(head["names"])  # the file has an order of its own
    provenance = Provenance.from_json(head["provenance"])
    sums = renamed(tensors, {name: f"sum/{name}" for name in names})
    noise = renamed(tensors, {name: f"noise/{name}" for name in names if provenance.error_bars})
    count, positions, reduction = (
        int(head["count"]),
        int(head["positions"]),
        check_reduction(head["reduction"], tokens=True),
    )
    apart = renamed(tensors, {name: f"noiseless/{name}" for name in names if f"noiseless/{name}" in tensors})
    return DiagonalFisher(sums, noise, count, positions, provenance, reduction, apart)


def load_diagonal(path: str | Path) -> DiagonalFisher:
    """Read a diagonal; an error for any other kind of result."""
    result = load(path)
    if not isinstance(result, DiagonalFisher):
        expected = "a diagonal (nm.fisher_diagonal and `neuromanifold estimate` make one)"
        advice = f"`neuromanifold show {path}` prints it."
        raise ValueError(message("path", expected, f"{path}, a {type(result).__name__}", advice))
    return result
