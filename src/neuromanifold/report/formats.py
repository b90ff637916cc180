"""Numbers, shares and estimators as people write them."""

from __future__ import annotations

import dataclasses
import math
import re

from neuromanifold import estimators

NO_BREAK = "\u00a0"  # a space at which no line breaks
_SUPERSCRIPT = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


def number(value: float, digits: int = 3) -> str:
    """A number with three digits: 0.0123, 1,072, 1.84×10⁻⁵; a dash if it is not finite."""
    if not math.isfinite(value):
        return "–"
    if value == 0:
        return "0"
    exponent = math.floor(math.log10(abs(value)))
    if -4 < exponent < 6:
        rounded = float(f"{value:.{digits - 1}e}")
        return f"{rounded:,.{max(0, digits - 1 - exponent)}f}"
    mantissa, power = f"{value:.{digits - 1}e}".split("e")
    return f"{mantissa}×{power_of_ten(int(power))}"


def power_of_ten(exponent: int) -> str:
    """10⁻⁵ for -5: the label of a tick on a logarithmic axis."""
    return f"10{str(exponent).translate(_SUPERSCRIPT)}"


def coordinate(value: float) -> str:
    """A position in a chart, to two decimals and without trailing zeros."""
    return f"{value:.2f}".rstrip("0").rstrip(".") or "0"


def percent(share: float) -> str:
    """A share with two digits; never rounded to nothing, nor to everything."""
    if share == 0 or not math.isfinite(share):
        return f"0{NO_BREAK}%" if share == 0 else "–"
    if 0.9995 < share < 1:
        return f">{NO_BREAK}99.9{NO_BREAK}%"
    if share < 0.0001:
        return f"<{NO_BREAK}0.01{NO_BREAK}%"
    digits = 1 if 0.985 <= share < 1 else 0
    return (f"{100 * share:.{digits}f}" if share >= 0.0995 else f"{100 * share:.2g}") + f"{NO_BREAK}%"


def error(share: float) -> str:
    """A relative standard error; a dash where nothing is random, since 0 % would look like accuracy."""
    return percent(share) if share else "–"


def counted(n: int, noun: str) -> str:
    """A number with its noun in singular or plural: 1 sample, 2 samples, 2 batches."""
    return f"{n:,} {noun}" + ("" if n == 1 else "es" if noun.endswith(("s", "ch")) else "s")


def brief(estimator: str) -> str:
    """An estimator as code, without the arguments that have their default value."""
    kind = getattr(estimators, estimator.partition("(")[0], None)
    if not (isinstance(kind, type) and dataclasses.is_dataclass(kind)):
        return estimator
    defaults = {f"{f.name}={getattr(kind(), f.name)!r}" for f in dataclasses.fields(kind)}
    given = re.split(r", (?=\w+=)", estimator.partition("(")[2].removesuffix(")"))
    return f"{kind.__name__}({', '.join(one for one in given if one not in defaults)})"
