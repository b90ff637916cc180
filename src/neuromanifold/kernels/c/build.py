"""Compiles C kernels with this machine's compiler, once; libraries are cached in the user's cache folder.

The name of a library is a hash of the source, the flags, and the macros that the compiler defines for this processor.
It is written to another name and renamed, so that several processes may compile at once.  Any failure means that there
is no kernel.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import shlex
import subprocess
import tempfile
from pathlib import Path

import torch

_FLAGS = ("-O3", "-shared", "-fPIC")
_THIS_PROCESSOR = (("-march=native",), ("-mcpu=native",), ())  # the first that the compiler knows
_LIMIT = 60.0  # seconds
_SEAL = ".digest"


def kernel(source: Path, function: str, threads: int = 1) -> ctypes.CDLL | None:
    """Return a compiled kernel, or None if it cannot be compiled here, or not be run in so many of torch's threads.

    Its function gets a job, OpenMP's function to run one in several threads, and their number; it returns whether the
    job is done.
    """
    return None if threads > 1 and parallel() is None else _library(source, function)


@functools.cache
def _library(source: Path, function: str) -> ctypes.CDLL | None:
    try:
        return _load_or_build(source, function, shlex.split(os.environ.get("CC") or "cc"))
    except Exception:  # no compiler, none that knows what it needs, no place to write to
        return None


@functools.cache
def parallel() -> ctypes.c_void_p | None:
    """Return `GOMP_parallel` of the OpenMP library that torch uses, whose threads exist already; None without it."""
    try:
        return ctypes.cast(ctypes.CDLL(torch._C.__file__).GOMP_parallel, ctypes.c_void_p)
    except (OSError, AttributeError):
        return None


def _load_or_build(source: Path, function: str, compiler: list[str]) -> ctypes.CDLL:
    flags, processor = _for_this_processor(tuple(compiler))
    made_from = (source.read_bytes(), " ".join([*compiler, *flags]).encode(), processor)
    name = f"{source.stem}-{hashlib.blake2b(b'|'.join(made_from), digest_size=12).hexdigest()}.so"
    try:
        kept = _cache() / name
        if _is_whole(kept):
            return _load(kept, function)
    except (OSError, RuntimeError, ValueError, AttributeError):
        pass  # no home, no file, or not a library: compile it again
    command = [*compiler, *flags, str(source), "-lm"]
    try:
        _cache().mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".building-", dir=_cache()) as folder:
            return _compile(command, function, Path(folder) / name, _cache() / name)
    except (OSError, RuntimeError):
        with tempfile.TemporaryDirectory(prefix="neuromanifold-", ignore_cleanup_errors=True) as folder:
            return _compile(command, function, Path(folder) / name, None)


def _compile(command: list[str], function: str, made: Path, kept: Path | None) -> ctypes.CDLL:
    """Compile and load a library; keep it with a digest of its contents if it loads."""
    _output_of([*command, "-o", str(made)])
    found = _load(made, function)
    if kept is not None:
        seal = made.with_suffix(_SEAL)
        seal.write_text(_digest(made))
        made.replace(kept)
        seal.replace(kept.with_suffix(_SEAL))
    return found


def _is_whole(kept: Path) -> bool:
    """Whether a cached library is complete: loading a truncated one may crash the process."""
    return kept.with_suffix(_SEAL).read_text() == _digest(kept)


def _digest(path: Path) -> str:
    return hashlib.blake2b(path.read_bytes(), digest_size=16).hexdigest()


@functools.cache
def _for_this_processor(compiler: tuple[str, ...]) -> tuple[tuple[str, ...], bytes]:
    """Return flags, and the macros that a compiler defines with them: its version, and the processor's features."""
    for own in _THIS_PROCESSOR:
        try:
            return (*_FLAGS, *own), _output_of([*compiler, *own, "-dM", "-E", "-x", "c", os.devnull])
        except subprocess.CalledProcessError:
            continue
    raise OSError("The compiler does not work.")


def _load(path: Path, function: str) -> ctypes.CDLL:
    found = ctypes.CDLL(str(path))
    kernel = getattr(found, function)
    kernel.argtypes, kernel.restype = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint), ctypes.c_int
    return found


def _output_of(command: list[str]) -> bytes:
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, check=True, timeout=_LIMIT)
    return done.stdout


def _cache() -> Path:
    base = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if Path(base).is_absolute() else Path.home() / ".cache") / "neuromanifold"
