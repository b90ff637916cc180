"""A result in sentences: what it is, where the information sits, what is zero, and how far to trust it.

Every sentence is a fact about the numbers at hand.  Names stand in `backticks`.
"""

from __future__ import annotations

import re

from neuromanifold.report.formats import NO_BREAK, brief, counted, percent
from neuromanifold.results import Comparison
from neuromanifold.results.summary import Statistics, Summary

_HEAD = re.compile(r"classif|head|score|logits|output|decoder|^fc|\.fc", re.IGNORECASE)
_TABLE = re.compile(r"embed|wte|wpe", re.IGNORECASE)


def reading(summary: Summary, beside: bool = False) -> list[str]:
    """Sentences about a result, the most important first; `beside` another result, only what may differ."""
    if not summary.everything.entries:
        return [nature(summary), "It has no entries."]
    if not summary.everything.total:
        return [nature(summary), "Every entry is exactly zero: for these data the outputs depend on nothing."]
    more = [] if beside else [_concentration(summary), *_zero_entries(summary)]
    found = [_where(summary), *more, *_error(summary), *_granularity(summary)]
    stopped = summary.result.provenance.stopped
    ended = f"The accuracy asked for was not reached: {stopped}." if "not reached" in stopped else f"The run {stopped}."
    return [nature(summary), *found, *([ended] if stopped else [])]


def nature(summary: Summary) -> str:
    """What the numbers are: exact, unbiased, a bound, biased, or not a Fisher estimate at all."""
    p = summary.result.provenance
    noisy = summary.everything.noise > 0 or not p.error_bars
    made = f"`{brief(p.estimator)}`, {counted(p.passes, 'backward pass')} over {counted(summary.result.count, p.unit)}"
    if p.target.startswith("not a Fisher"):
        return f"Not a Fisher estimate: the squared gradients of whole batches ({made})."
    for part, bound in (("Upper(", "upper"), ("Lower(", "lower")):
        if part in p.estimator:
            kind = "An" if bound == "upper" else "A"
            estimated = "estimated without bias" if noisy else "computed exactly"
            return f"{kind} {bound} bound of the Fisher diagonal, {estimated} ({made}): biased for the diagonal itself."
    if p.target.startswith("biased"):
        why = p.target.partition("(")[2].rstrip(")") or "see its documentation"
        return f"A biased estimate of the Fisher diagonal: {why}. More data do not remove the bias ({made})."
    if p.target == "exact":
        return f"The exact Fisher diagonal over these data ({made})."
    if p.target == "unbiased" and not noisy:
        return f"An unbiased estimate of the Fisher diagonal that had no noise here, so it is exact ({made})."
    return f"An {p.target} estimate of the Fisher diagonal ({made})."


def comparison_sentence(title: str, first: str, found: Comparison | None) -> str:
    """How far a result is from the first, over the parameters that both have; None if there are none."""
    if found is None:
        return f"`{title}` and `{first}` have no parameter in common: only the shapes of their charts compare."
    if not found.positive:
        return f"`{first}` is zero on all parameters that `{title}` shares with it."
    return (
        f"`{title}` has {found.mean_ratio:.3g} times the trace of `{first}`; a positive entry differs by "
        f"{percent(found.relmae_positive)} on average, and their cosine is {found.cosine:.4f} "
        f"({found.entries:,} entries in common)."
    )


def role(name: str, summary: Summary) -> str:
    """A component's name, preceded by "the head" or "the embedding" if the name says that it is one."""
    if summary.components[-1].name == name and _HEAD.search(name):
        return f"the head `{name}`"
    return f"the embedding `{name}`" if _TABLE.search(name.rpartition(".")[2]) else f"`{name}`"


def _where(summary: Summary) -> str:
    parts = sorted(summary.components, key=lambda one: -one.total)
    entries = summary.everything.entries
    text = role(parts[0].name, summary)
    text = f"{text[0].upper()}{text[1:]} has {percent(parts[0].share)} of the trace"
    text += f" with {percent(parts[0].entries / entries)} of the parameters"
    others = [f"{role(one.name, summary)} {percent(one.share)}" for one in parts[1:3] if one.share >= 0.01]
    return text + (f"; next come {' and '.join(others)}." if others else ".")


def _concentration(summary: Summary) -> str:
    halves = summary.everything.halves
    number = max(1, round(halves * summary.everything.entries))
    which = "single largest entry holds" if number == 1 else f"{number:,} largest entries hold"
    return f"Half of the trace sits in {percent(halves)} of all entries: the {which} as much as the rest together."


def _zero_entries(summary: Summary) -> list[str]:
    everything = summary.everything
    if not everything.zeros:
        return ["No entry is exactly zero."]
    text = f"{percent(everything.zero_share)} of all entries are exactly zero"
    dead = [one for one in summary.parameters if one.entries and one.zeros == one.entries]
    tables = [one for one in summary.parameters if one.zeros and one not in dead and _is_table(one)]
    unused = {one: int((summary.result.sums[one.name] == 0).all(1).sum()) for one in tables}  # rows zero throughout
    rows = [
        f"{n:,} of {one.shape[0]:,} rows of `{one.name}`, {_looked_up(one.name)} that the data never use"
        for one, n in sorted(unused.items(), key=lambda pair: -pair[1])[:2]
        if n
    ]
    sentences = [f"{text}{': ' if rows else ''}{'; '.join(rows)}."]
    if dead:
        are = "is" if len(dead) == 1 else "are"
        names = _listed([one.name for one in dead])
        sentences.append(f"{names} {are} zero throughout: the outputs for these data do not depend on {_them(dead)}.")
    return sentences


def _error(summary: Summary) -> list[str]:
    everything, p = summary.everything, summary.result.provenance
    biased = p.target.startswith(("biased", "not")) or "Upper(" in p.estimator or "Lower(" in p.estimator
    if not p.error_bars:
        return ["The run kept no error bars (error_bars=False), so how exact these numbers are is not known."]
    if not everything.noise:
        beware = "that says nothing about the bias" if biased else "with other data they would differ"
        return [f"Nothing in these numbers is random, so there are no error bars; {beware}."]
    what = "The sum of a row" if p.error_bars == "rows" else "An entry"
    text = f"{what} is typically known to ±{NO_BREAK}{percent(everything.relative_error)} (one standard error)"
    known = [one for one in summary.components if one.total and one.share >= 0.001]
    if len(known) > 1:
        best, worst = (pick(known, key=lambda one: one.relative_error) for pick in (min, max))
        text += f", best in `{best.name}` (±{NO_BREAK}{percent(best.relative_error)})"
        text += f", least in `{worst.name}` (±{NO_BREAK}{percent(worst.relative_error)})"
    about = "they do not contain the bias" if biased else "with other data the values would differ, too"
    return [f"{text}. Error bars show the noise of the random probes; {about}."]


def _granularity(summary: Summary) -> list[str]:
    squared: dict[str, list[str]] = {}
    for one in summary.parameters:
        squared.setdefault(one.granularity, []).append(one.name)
    p = summary.result.provenance
    if p.target.startswith("not") or set(squared) <= {"", "sample"}:
        return []
    if set(squared) == {"batch"}:
        return ["The gradients of whole batches were squared (granularity “batch”), which is noisier than per sample."]
    sentences = []
    if fine := squared.get("token"):
        were = "was" if len(fine) == 1 else "were"
        sentences.append(f"{_listed(fine)} {were} squared per token, with less noise than per {p.unit}.")
    if coarse := squared.get("batch"):
        were = "was" if len(coarse) == 1 else "were"
        sentences.append(f"{_listed(coarse)} {were} squared per batch, with more noise: no per-sample rule applies.")
    if slow := squared.get("sample, one by one"):
        sentences.append(f"{_listed(slow)} took one backward pass for each sample: no per-sample rule applies.")
    return sentences


def _them(parameters: list[Statistics]) -> str:
    return "it" if len(parameters) == 1 else "them"


def _is_table(one: Statistics) -> bool:
    return len(one.shape) == 2 and bool(_TABLE.search(one.name))


def _looked_up(name: str) -> str:
    """What the rows of an embedding stand for according to its name, else "rows"."""
    kinds = {"pos|wpe": "positions", "type": "types", "word|tok|wte": "tokens"}
    return next((noun for pattern, noun in kinds.items() if re.search(pattern, name, re.IGNORECASE)), "rows")


def _listed(names: list[str]) -> str:
    shown = [f"`{name}`" for name in names[:3]]
    if len(names) > 3:
        return f"{', '.join(shown)} and {len(names) - 3:,} more"
    return " and ".join([", ".join(shown[:-1]), shown[-1]]) if len(shown) > 1 else shown[0]
