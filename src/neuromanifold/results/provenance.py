"""Where a result comes from: enough to repeat it, and to know what it is."""

from __future__ import annotations

import json
import math
import warnings
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

import torch

from neuromanifold.core.checks import message


@dataclass(frozen=True)
class Provenance:
    """What was estimated, how, on what, and with which versions."""

    estimator: str  # the estimator as code, e.g. "Hutchinson(probes=1, ...)"
    target: str  # what it is right for: "exact", "unbiased", "biased (...)"
    likelihood: str = "Categorical"
    granularity: dict[str, str] = field(default_factory=dict)  # parameter: "sample", "batch", "sample, one by one"
    seeds: list[int] = field(default_factory=list)
    batches: int = 0
    passes: int = 0  # backward passes altogether
    model: str = ""
    data: str = ""
    dtype: str = ""
    device: str = ""
    stopped: str = ""  # why a run ended before its data did
    versions: dict[str, str] = field(default_factory=lambda: {"torch": str(torch.__version__)})
    parts: int = 1  # how many runs have been added
    draws: list[list[int]] = field(default_factory=list)  # [seed, start, stop, step]: whose batches' noise was drawn
    weights: str = ""  # a fingerprint of the parameters

    def plus(self, other: Provenance) -> Provenance:
        """The provenance of a sum over disjoint data; the two must have estimated the same thing in the same way."""
        for name in ("estimator", "likelihood", "model"):
            mine, theirs = getattr(self, name), getattr(other, name)
            if mine != theirs:
                advice = "Only results of the same estimator and model over disjoint data add up."
                raise ValueError(message("other", f"a result with {name} {mine!r}", repr(theirs), advice))
        if self.weights and other.weights and self.weights != other.weights:
            advice = "Only results of the same weights over disjoint data add up; are they from two steps of training?"
            raise ValueError(message("other", "a result of the same weights", "one of others", advice))
        return replace(
            self,
            batches=self.batches + other.batches,
            passes=self.passes + other.passes,
            granularity={**self.granularity, **_coarser(self.granularity, other.granularity)},
            seeds=sorted({*self.seeds, *other.seeds}),
            data=self.data if self.data == other.data else f"{self.data} + {other.data}",
            stopped=self.stopped or other.stopped,
            parts=self.parts + other.parts,
            draws=[*self.draws, *other.draws] if self.draws and other.draws else [],
        )

    def shares_noise_with(self, other: Provenance) -> bool:
        """Whether the two runs drew the same random numbers: then their errors do not cancel.  Warns if so.

        The noise of a batch depends on the seed and on the batch's number in the data: shards of one run share none.
        """
        if not set(self.seeds) & set(other.seeds):
            return False
        if self.draws and other.draws and not any(_overlap(a, b) for a in self.draws for b in other.draws):
            return False
        text = (
            "Both results were made with the same seed, so their noise is the same, too, and their standard errors add."
        )
        advice = " Give each part of the data a seed of its own, such as seed=rank, or run it as shard=(rank, ranks)."
        warnings.warn(text + advice, stacklevel=4)
        return True

    def to_json(self) -> str:
        """As JSON text."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Provenance:
        """From JSON text."""
        return cls.from_dict(json.loads(text))

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Provenance:
        """From its fields; those that a later version has added are left out."""
        known = {f.name for f in fields(cls)}
        return cls(**{key: value for key, value in values.items() if key in known})


def _coarser(a: dict[str, str], b: dict[str, str]) -> dict[str, str]:
    """How parameters were done in the part that did them less well."""
    return {name: "batch" for name in a if "batch" in (a[name], b.get(name))}


def _overlap(a: list[int], b: list[int]) -> bool:
    """Whether two [seed, start, stop, step] have a batch in common."""
    common = math.gcd(a[3], b[3])
    if a[0] != b[0] or (a[1] - b[1]) % common:
        return False
    first, second = range(*a[1:]), range(*b[1:])
    skipped = max(0, -(-(b[1] - a[1]) // a[3]))  # of the first, what comes before the second
    return any(number in second for number in first[skipped:][: b[3] // common])  # one of these is, or none
