"""A table of how every kind of the zoo fares: `python -m tests.zoo.survey [FAMILY ...] [--examples 30]`."""

from __future__ import annotations

import argparse
import traceback
import zlib
from collections import Counter

from hypothesis import HealthCheck, Phase, given, seed, settings

import neuromanifold as nm
from tests.zoo.case import Kind, Spec, make, specs
from tests.zoo.families import FAMILIES
from tests.zoo.reference import Verdict, judge_all, judge_mixing


def verdicts(spec: Spec, kinds: dict[str, Kind]) -> dict[str, Verdict]:
    """All of a case's."""
    if make(spec, kinds).mixes:
        return {repr(e): judge_mixing(spec, kinds, e) for e in (None, nm.Exact())} if max(spec.sizes) > 1 else {}
    return judge_all(spec, kinds)


def survey(name: str, kind: str, kinds: dict[str, Kind], examples: int) -> None:
    """Count the outcomes of a kind, and print the first case of each bad one."""
    counts: Counter[str] = Counter()
    shown: dict[str, str] = {}

    @seed(zlib.crc32(kind.encode()))
    @settings(
        max_examples=examples,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(spec=specs(kind, 2 if name == "mixing" else 1))
    def collect(spec: Spec) -> None:
        try:
            found = verdicts(spec, kinds)
        except Exception as error:  # of the zoo itself, or of a type that nobody expects
            counts["broken"] += 1
            last = traceback.extract_tb(error.__traceback__)[-1]
            shown.setdefault("broken", f"{error!r} {last.filename}:{last.lineno} {spec}")
            return
        for call, verdict in found.items():
            counts[verdict.outcome] += 1
            if not verdict.fine:
                sizes = f"B={spec.sizes} T={spec.steps} d={spec.width} C={spec.classes} {spec.dtype}"
                shown.setdefault(
                    verdict.outcome, f"{call}: {verdict.detail} | {sizes} {make(spec, kinds).chosen} seed={spec.seed}"
                )

    collect()
    fine = counts["right"] + counts["refused"] == counts.total()
    print(f"{'ok ' if fine else 'BAD'} {name:12} {kind:45} {dict(counts)}", flush=True)
    for outcome, text in shown.items():
        print(f"      {outcome}: {text[:500]}", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("families", nargs="*")
    parser.add_argument("--examples", type=int, default=30)
    parser.add_argument("--kind", default="")
    arguments = parser.parse_args()
    for family, members in FAMILIES.items():
        for kind in members:
            if (not arguments.families or family in arguments.families) and arguments.kind in kind:
                survey(family, kind, members, arguments.examples)
