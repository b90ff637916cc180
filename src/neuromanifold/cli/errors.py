"""Errors of the user are one clear line and exit code 2; the library's warnings are lines as well."""

from __future__ import annotations

import errno
import os
import traceback
import warnings
from typing import Any, TextIO

import torch
import typer
from rich.console import Console
from safetensors import SafetensorError
from typer.core import TyperGroup

TRACEBACK = "NEUROMANIFOLD_TRACEBACK"  # set to anything: errors are shown with where they come from


_OF_THE_USER = (
    ValueError,
    TypeError,
    OSError,
    SafetensorError,
    MemoryError,
    torch.OutOfMemoryError,
    ModuleNotFoundError,
)


class FriendlyGroup(TyperGroup):
    """All commands, with errors that a person can act on."""

    def invoke(self, ctx: Any) -> Any:
        """Run a command."""
        with warnings.catch_warnings():
            warnings.showwarning = _show_warning
            try:
                return super().invoke(ctx)
            except KeyboardInterrupt:
                _say("Interrupted; nothing was written.")
                raise typer.Exit(130) from None
            except _OF_THE_USER as error:
                if os.environ.get(TRACEBACK):
                    raise
                _say(f"Error: {_text(error)}")
                raise typer.Exit(2) from None
            except (RuntimeError, LookupError, ArithmeticError, AttributeError, AssertionError, ImportError) as error:
                if isinstance(error, (typer.Exit, typer.Abort)) or os.environ.get(TRACEBACK):
                    raise
                _say(f"Error: {_text(error)} ({_place(error)}; with {TRACEBACK}=1 the way there is shown.)")
                raise typer.Exit(1) from None


def _place(error: Exception) -> str:
    """Of an error inside a model, a function of the user's own, or this library: what and where."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__} in {last.filename}, line {last.lineno}"


def _text(error: Exception) -> str:
    said = " ".join(str(error).split()) or type(error).__name__
    if isinstance(error, MemoryError):
        return f"Out of memory. Take a smaller --batch-size (or auto), or fewer --parameters. ({said})"
    if isinstance(error, torch.OutOfMemoryError):
        return f"Out of memory on the device. Take a smaller --batch-size (or auto), or --dtype bfloat16. ({said})"
    if (isinstance(error, OSError) and error.errno == errno.ENOSPC) or "No space left on device" in said:
        return f"No space left on the disk, so nothing was written. Make room, or write elsewhere. ({said})"
    if isinstance(error, ModuleNotFoundError) and "pip install" not in said:
        return f"{said}. Run from the folder it lies in, or install it."
    return said


def _show_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    del category, filename, lineno, file, line
    _say(f"Note: {' '.join(str(message).split())}")


def _say(text: str) -> None:
    Console(stderr=True).print(text, markup=False, highlight=False, soft_wrap=True)
