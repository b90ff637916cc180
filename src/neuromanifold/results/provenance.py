"""Where a result comes from: enough to repeat it, to know what it is, and to refuse a sum that would be wrong."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, fields, replace
from difflib import get_close_matches
from typing import Any

import torch

from neuromanifold.core.checks import message, warn
from neuromanifold.problem.model import plain_name
from neuromanifold.results.error_bars import ErrorBars, coarser


class UnknownParameterError(KeyError):
    """A name that a result has no values for; the message says why, and which names are near."""

    __str__ = Exception.__str__  # KeyError shows its argument in quotes, with escapes


@dataclass(frozen=True)
class Provenance:
    """What was estimated, how, on what, and with which versions: `result.provenance` of every result.

    Results with different models, weights, estimators or likelihoods do not add up, and say which of them differs.

    Example:
        >>> provenance = nm.fisher_diagonal(model, data).provenance
        >>> provenance.target, provenance.batches, provenance.passes, provenance.verified
        ('unbiased', 4, 4, 2)
        >>> provenance.granularity["2.weight"]
        'sample'
    """

    estimator: str  #: the estimator as code, e.g. "Hutchinson(probes=1, ...)"
    target: str  #: what it is right for: "exact", "unbiased", "biased (...)"
    likelihood: str = "Categorical"
    unit: str = "sample"  #: what is counted, and what "per-sample" means: "sequence" where outputs are [B, T, C]
    granularity: dict[str, str] = field(
        default_factory=dict
    )  #: parameter: "sample", "token", "batch", "sample, one by one"
    seeds: list[int] = field(default_factory=list)  #: of the probes' noise; empty: nothing is random
    noise_factor: float = 1.0  #: c with Var(g²) <= c E[g⁴] for one pass of the estimator; 1 holds for any
    noise_ratio: float = 1.0  #: how large the noise is on average, as a share of the standard errors, which are bounds
    batches: int = 0
    passes: int = 0  #: backward passes altogether
    left_out: int = 0  #: samples without a pass, for which others have larger weights
    verified: int = 0  #: batches whose per-sample gradients were compared with autograd's
    model: str = ""
    data: str = ""
    dtype: str = ""
    device: str = ""
    stopped: str = ""  #: why a run ended before its data did
    shift_labels: bool = False  #: position t predicts token t + 1: labels and masks were shifted by one
    versions: dict[str, str] = field(default_factory=lambda: {"torch": str(torch.__version__)})
    processes: int = 1  #: that have shared the run
    parts: int = 1  #: how many runs have been added
    draws: list[list[int]] = field(default_factory=list)  #: of each run: [seed, start, stop, step] of its batches
    data_fingerprints: list[str] = field(default_factory=list)  #: of each run: that of batch 0 of all its data
    weights: str = ""  #: a fingerprint of the parameters
    scale: float = 1.0  #: what the result was multiplied by
    error_bars: ErrorBars = True  #: what has standard errors: each entry, each row of a weight ("rows"), or nothing
    frozen: list[str] = field(default_factory=list)  #: parameters that were left out because they are not trainable
    tied: dict[str, str] = field(default_factory=dict)  #: other names of shared parameters: the name in the result

    @property
    def position(self) -> str:
        """What a position of a sample is called: "token" in a sequence."""
        return "token" if self.unit == "sequence" else "position"

    def plus(self, other: Provenance) -> Provenance:
        """The provenance of a sum over disjoint data; the two must have estimated the same thing in the same way."""
        self.check_like(other)
        if other is self or self._shares_data_with(other):
            got = "one that has seen the same batches" + (" with the same seed" if self.seeds and other.seeds else "")
            advice = (
                "Their sum would count these twice. Results add up over shards of one run, and over different data."
            )
            raise ValueError(message("other", "a result over other data", got, advice))
        known = bool(self.draws and other.draws)
        seen = known and bool(self.data_fingerprints and other.data_fingerprints)
        return replace(
            self,
            batches=self.batches + other.batches,
            passes=self.passes + other.passes,
            left_out=self.left_out + other.left_out,
            verified=self.verified + other.verified,
            processes=max(self.processes, other.processes),
            granularity={**self.granularity, **_coarser(self.granularity, other.granularity)},
            seeds=sorted({*self.seeds, *other.seeds}),
            noise_factor=max(self.noise_factor, other.noise_factor),
            noise_ratio=max(self.noise_ratio, other.noise_ratio),
            data=self.data if self.data == other.data else f"{self.data} + {other.data}",
            stopped=self.stopped or other.stopped,
            parts=self.parts + other.parts,
            error_bars=coarser(self.error_bars, other.error_bars),
            draws=[*self.draws, *other.draws] if known else [],
            data_fingerprints=[*self.data_fingerprints, *other.data_fingerprints] if seen else [],
        )

    def named(self, model: str, data: str) -> Provenance:
        """The provenance under the names that model and data have for the user, such as paths."""
        return replace(self, model=model, data=data)

    def times(self, factor: float) -> Provenance:
        """The provenance of a result that was multiplied by a factor."""
        return replace(self, scale=self.scale * factor)

    def find(self, name: str, names: Iterable[str]) -> str:
        """The one of `names` that a parameter goes by, whichever of its names is given.

        Parameters that are tied to each other have one set of values, under the first name; prefixes of wrappers
        (`torch.compile`, `DistributedDataParallel`) do not count.
        """
        names = names if isinstance(names, (dict, list)) else list(names)
        for candidate in (name, plain_name(name)) if isinstance(name, str) else (name,):
            for held in (candidate, self.tied.get(candidate)):
                if held in names:
                    return str(held)
        raise UnknownParameterError(f"No parameter {name!r} in this result: {self._why_not(str(name), list(names))}")

    def _why_not(self, name: str, names: list[str]) -> str:
        name = plain_name(name)
        if name in self.frozen:
            return "it is frozen. Call .requires_grad_() on it before the run, if you want it."
        if name in self.tied:
            return f"it is tied to {self.tied[name]!r}, which was not selected."
        if name in self.granularity:
            return "it was filtered out."
        near = get_close_matches(name, [*names, *self.tied, *self.frozen], 3, 0.5)
        if near:
            return f"did you mean {' or '.join(map(repr, near))}?"
        return f"there are {len(names)}, such as {', '.join(map(repr, names[:3]))}."

    def shares_noise_with(self, other: Provenance) -> bool:
        """Whether the two runs drew the same random numbers: then their errors do not cancel.  Warns if so.

        The noise of a batch depends on the seed and on the batch's number in the data: shards of one run share none.
        """
        if not set(self.seeds) & set(other.seeds):
            return False
        pairs = [(a, b) for a in self.draws for b in other.draws]
        if pairs and not any(a[0] == b[0] and _overlap(a, b) for a, b in pairs):
            return False
        text = "Both results were made with the same seed, so their noise is the same and their standard errors add."
        advice = " Give each part of the data a seed of its own, such as seed=rank, or run it as shard=(rank, ranks)."
        warn(text + advice)
        return True

    def check_like(self, other: Provenance) -> None:
        """Refuse a sum of different things, with what differs most first: model, weights, then how it was done."""
        same = "Only results of the same model and estimator over disjoint data add up."
        if self.model != other.model:
            raise ValueError(message("other", f"a result of the model {self.model!r}", repr(other.model), same))
        selected = self.granularity.keys() == other.granularity.keys()  # else weights cannot be compared
        if selected and self.weights and other.weights and self.weights != other.weights:
            advice = f"{same} Are they from two steps of training?"
            raise ValueError(message("other", "a result of the same weights", "one of other weights", advice))
        for name in ("likelihood", "estimator", "shift_labels"):
            mine, theirs = getattr(self, name), getattr(other, name)
            if mine != theirs:
                raise ValueError(message("other", f"a result with {name} {mine!r}", repr(theirs), same))
        if not math.isclose(self.scale, other.scale):
            got = f"one that was multiplied by {other.scale:g}"
            advice = "Add first and scale then, or combine the tensors of both yourself."
            raise ValueError(message("other", f"multiplied by {self.scale:g} like this one", got, advice))

    def _shares_data_with(self, other: Provenance) -> bool:
        """Whether a batch is in both: of the same data, with the same number, and without noise of its own."""
        mine, theirs = (list(zip(p.data_fingerprints, p.draws, strict=False)) for p in (self, other))
        random = bool(self.seeds and other.seeds)
        return any(
            data == others and not (random and a[0] != b[0]) and _overlap(a, b)
            for data, a in mine
            for others, b in theirs
        )

    def to_json(self) -> str:
        """The fields as JSON text."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Provenance:
        """The provenance that `to_json` wrote."""
        return cls.from_dict(json.loads(text))

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Provenance:
        """The provenance with these fields; those that a later version has added are left out."""
        known = {f.name for f in fields(cls)}
        return cls(**{key: value for key, value in values.items() if key in known})


def _coarser(a: dict[str, str], b: dict[str, str]) -> dict[str, str]:
    """The parameters that were squared more coarsely in the other part: per batch, or per sample and not per token."""
    return {
        name: b[name] for name in a if name in b and (b[name] == "batch" or (a[name] == "token" and b[name] != "token"))
    }


def _overlap(a: list[int], b: list[int]) -> bool:
    """Whether two [seed, start, stop, step] have a batch number in common."""
    first, second = range(*a[1:]), range(*b[1:])
    skipped = max(0, -(-(b[1] - a[1]) // a[3]))  # of the first, what comes before the second
    return any(number in second for number in first[skipped:][: b[3]])  # one of these is, or none
