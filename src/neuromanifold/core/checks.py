"""Checks of what a caller hands in.  Public methods check, private functions compute.

Every message has the same four parts: which argument, what was expected, what came, what to do about it.
"""

from __future__ import annotations

import math
import operator
import sys
import warnings
from collections.abc import Sequence
from numbers import Real
from typing import Literal, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")
Reduction = Literal["mean", "sum", "token"]
"""How a result is shown: per sample, summed over samples, or per position of a sequence."""


def message(argument: str, expected: str, got: str, advice: str = "") -> str:
    """One sentence for every error of the library."""
    return f"`{argument}` must be {expected}, got {got}." + (f" {advice}" if advice else "")


def warn(text: str, category: type[Warning] = UserWarning) -> None:
    """Warn, and name the line of code that has called this library."""
    frame, level, inside = sys._getframe(1), 2, ("neuromanifold.", "torch.", "contextlib")
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith(inside):
        frame, level = frame.f_back, level + 1
    warnings.warn(text, category, stacklevel=level)


def listed(names: Sequence[str], most: int) -> str:
    """The first names, and how many more there are: "a, b, c and 4 more"."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def float_tensor(value: object, argument: str) -> Tensor:
    """A floating-point tensor; half precisions are promoted to float32, float32 and float64 are kept."""
    tensor = real_tensor(value, argument)
    return tensor.to(promoted(tensor.dtype))


def promoted(dtype: torch.dtype) -> torch.dtype:
    """The precision to compute in: float64 for float64, float32 for every other dtype."""
    return dtype if dtype in (torch.float32, torch.float64) else torch.float32


def real_tensor(value: object, argument: str) -> Tensor:
    """A floating-point tensor of any precision."""
    if not isinstance(value, Tensor):
        raise TypeError(message(argument, "a torch.Tensor", type(value).__name__, "Convert it with torch.as_tensor."))
    if value.layout != torch.strided:
        raise TypeError(message(argument, "a dense tensor", str(value.layout), "Call .to_dense() on it."))
    if not value.is_floating_point():
        advice = "Labels are not logits; convert integers with .float() if they are meant."
        raise TypeError(message(argument, "a tensor of a real floating-point type", str(value.dtype), advice))
    return value


def batch_of_vectors(value: object, argument: str, least: int, noun: str) -> Tensor:
    """A floating-point tensor [..., C] with C >= least; half precisions are promoted."""
    tensor = real_vectors(value, argument, least, noun)
    return tensor.to(promoted(tensor.dtype))


def real_vectors(value: object, argument: str, least: int, noun: str) -> Tensor:
    """A floating-point tensor [..., C] with C >= least, of any precision."""
    tensor = real_tensor(value, argument)
    if tensor.ndim == 0:
        advice = f"The last dimension holds the {noun}."
        raise ValueError(message(argument, f"of shape [..., C] with C >= {least}", "a 0-d tensor", advice))
    if tensor.shape[-1] < least:
        advice = "A single logit per sample is nm.Bernoulli." if least == 2 else ""
        expected = f"of shape [..., C] with C >= {least} {noun} in the last dimension"
        raise ValueError(message(argument, expected, f"shape {list(tensor.shape)}", advice))
    return tensor


def same_last_dimension(value: object, argument: str, batch_shape: torch.Size, dim: int) -> Tensor:
    """A floating-point tensor [..., C] whose leading dimensions broadcast against the batch."""
    tensor = float_tensor(value, argument)
    expected = f"of shape [..., {dim}] with leading dimensions that broadcast against {list(batch_shape)}"
    if tensor.ndim == 0 or tensor.shape[-1] != dim:
        raise ValueError(message(argument, expected, f"shape {list(tensor.shape)}"))
    try:
        broadcast(tensor.shape[:-1], batch_shape)
    except RuntimeError:
        raise ValueError(message(argument, expected, f"shape {list(tensor.shape)}")) from None
    return tensor


def integer_in_range(value: object, argument: str, least: int, most: int, why: str) -> int:
    """An int in [least, most]; bool and float are refused."""
    if isinstance(value, bool) or not hasattr(value, "__index__") or isinstance(value, Tensor):
        raise TypeError(message(argument, "an int", f"{value!r} ({type(value).__name__})"))
    value = operator.index(value)  # numpy's integers too
    if not least <= value <= most:
        raise ValueError(message(argument, f"between {least} and {most} ({why})", str(value)))
    return value


def one_of(value: T, argument: str, *choices: object) -> T:
    """The value, if it is one of the choices."""
    if value not in choices:
        *others, last = map(repr, choices)
        raise ValueError(message(argument, f"{', '.join(others)} or {last}", repr(value)))
    return value


def check_reduction(reduction: str, tokens: bool = False) -> Reduction:
    """The reduction, if it is "mean" (per sample) or "sum" (over samples), or with `tokens` "token" (per position)."""
    known: tuple[Reduction, ...] = ("mean", "sum", "token") if tokens else ("mean", "sum")
    for one in known:
        if one == reduction:
            return one
    expected = "'mean' (per sample)" + (", 'token' (per position)" if tokens else "") + " or 'sum' (over samples)"
    raise ValueError(message("reduction", expected, repr(reduction)))


def random_seed(value: object) -> int:
    """A seed that torch takes; bool and float are refused."""
    return integer_in_range(value, "seed", 0, 2**63 - 1, "a seed")


def number_of_passes(value: object, argument: str) -> int:
    """A number of probes or labels, each of which takes a backward pass: at least one."""
    return integer_in_range(value, argument, 1, 10**9, "one backward pass each")


def finite_number(value: object, argument: str, *, positive: bool = False, advice: str = "") -> float:
    """The value as a float, if it is a finite number >= 0 (> 0 if `positive`); bool is refused."""
    number = float(value) if isinstance(value, Real) and not isinstance(value, bool) else math.nan
    if not 0 <= number < math.inf or (positive and not number):
        raise ValueError(message(argument, "a number > 0" if positive else "a number >= 0", repr(value), advice))
    return number


def sample_shape(generator: object, shape: object) -> torch.Size:
    """The arguments of `sample`: a generator or None, and a tuple of sizes."""
    if generator is not None and not isinstance(generator, torch.Generator):
        advice = "Name the shape: sample(generator, shape=(5,))."
        raise TypeError(message("generator", "a torch.Generator or None", type(generator).__name__, advice))
    sizes = tuple(shape) if isinstance(shape, (tuple, list)) else (shape,)
    if not isinstance(shape, (tuple, list)) or any(isinstance(n, bool) or not isinstance(n, int) for n in sizes):
        raise TypeError(message("shape", "a tuple of ints such as (5,)", repr(shape)))
    if any(n < 0 for n in sizes):
        raise ValueError(message("shape", "a tuple of sizes >= 0", repr(shape)))
    return torch.Size(sizes)


def broadcast(*shapes: torch.Size) -> torch.Size:
    """torch.broadcast_shapes, which has no type annotations."""
    return torch.Size(torch.broadcast_shapes(*shapes))  # type: ignore[no-untyped-call]


def is_readable(values: Tensor) -> bool:
    """Whether values can be read without waiting for a GPU, and are there at all (fake tensors have none)."""
    return values.device.type == "cpu" and not torch._C._len_torch_dispatch_stack()
