"""Fingerprints: whether two models, batches or functions are the same, without keeping them."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Mapping
from contextlib import suppress
from types import CodeType, FunctionType, MethodType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

OF_A_BATCH = 2**13
"""How many numbers of each tensor of a batch are looked at."""

_PLAIN = (str, int, float, complex, bytes, type(None), torch.dtype, torch.device)


class Thinned(NamedTuple):
    """Some numbers of a tensor, evenly spread; its fingerprint is that of the tensor with as many numbers at most."""

    shape: torch.Size
    numbers: Tensor

    @classmethod
    def of(cls, value: Tensor, most: int) -> Thinned:
        """Copy at most so many numbers of a dense tensor to the CPU."""
        return cls(value.shape, _thinned(value.detach().reshape(-1), most).cpu().clone())


def fingerprint(*named: tuple[str, object], most: int | None = None) -> str:
    """Hash names and values: the bytes of tensors, numbers and texts as they are, whatever else by what is in it.

    Of tensors with more than `most` numbers only so many are looked at, evenly spread.  Of functions the code counts,
    and what they hold; objects of other kinds count by their type alone.
    """
    found, seen = hashlib.blake2b(digest_size=16), set[int]()
    for name, value in named:
        _add(found, name, value, most, seen)
    return found.hexdigest()


def _add(found: Any, name: str, value: object, most: int | None, seen: set[int]) -> None:
    """`seen`: functions that have come before; they may hold each other, and themselves."""
    found.update(f"{name}\n".encode())
    if isinstance(value, np.ndarray) and value.dtype.kind in "biuf":
        value = torch.from_numpy(np.ascontiguousarray(value))
    if isinstance(value, Thinned):
        found.update(f"{list(value.shape)} {value.numbers.dtype}\n".encode())
        found.update(_bytes(value.numbers))
    elif isinstance(value, Tensor):
        _add_tensor(found, value, most)
    elif isinstance(value, _PLAIN):
        found.update(f"{value!r}\n".encode())
    else:
        found.update(f"{type(value).__name__}\n".encode())
        parts = _parts(value).items() if id(value) not in seen else ()
        if callable(value):
            seen.add(id(value))
        for key, part in parts:
            _add(found, str(key), part, most, seen)


def _add_tensor(found: Any, value: Tensor, most: int | None) -> None:
    dense = value.detach()
    if dense.is_nested or dense.is_quantized:
        dense = torch.nested.to_padded_tensor(dense, 0.0) if dense.is_nested else dense.int_repr()
    dense = dense if dense.layout == torch.strided else dense.to_dense()
    found.update(f"{list(dense.shape)} {dense.dtype}\n".encode())
    if dense.device.type == "meta" or hasattr(dense, "placements"):  # whose values are elsewhere, or in other processes
        return
    found.update(_bytes(_thinned(dense.reshape(-1), most)))


def _thinned(flat: Tensor, most: int | None) -> Tensor:
    """At most so many numbers, with an odd step, since widths are even."""
    return flat if most is None or flat.numel() <= most else flat[:: -(-flat.numel() // most) | 1]


def _bytes(flat: Tensor) -> memoryview:
    return flat.resolve_conj().resolve_neg().cpu().contiguous().view(torch.uint8).numpy().data


def _parts(value: object) -> Mapping[Any, object]:
    """Return what the fingerprint of a container, function or callable object is made of, by name."""
    if isinstance(value, Mapping):
        return value
    if isinstance(value, (list, tuple)):
        return dict(enumerate(value))
    if isinstance(value, functools.partial):
        return {"function": value.func, "arguments": value.args, "options": value.keywords}
    if isinstance(value, FunctionType):
        code, around = value.__code__, value.__globals__
        held = [cell.cell_contents for cell in value.__closure__ or () if _is_filled(cell)]
        names = [name for name in code.co_names if name in around and isinstance(around[name], (*_PLAIN, Tensor))]
        used = {name: around[name] for name in names}
        return {"code": code, "held": held, "used": used, "defaults": (value.__defaults__, value.__kwdefaults__)}
    if isinstance(value, CodeType):
        return {"code": value.co_code, "names": value.co_names, "constants": value.co_consts}
    if isinstance(value, MethodType):
        return {"function": value.__func__, **_open(value.__self__)}
    if isinstance(value, type):
        return {"name": value.__qualname__}
    return _open(value) if callable(value) else {}


def _open(value: object) -> dict[str, object]:
    """The attributes that are not private: those may be counters and the like."""
    return {name: part for name, part in getattr(value, "__dict__", {}).items() if not name.startswith("_")}


def _is_filled(cell: Any) -> bool:
    """A function that has been defined may not have been assigned yet."""
    with suppress(ValueError):
        return cell.cell_contents is not None
    return False
