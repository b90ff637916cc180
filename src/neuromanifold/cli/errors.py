"""User errors are one clear line and exit code 2; the library's warnings are lines as well."""

from __future__ import annotations

import errno
import os
import traceback
import warnings
from typing import Any

import torch
import typer
from safetensors import SafetensorError
from typer.core import TyperGroup

from neuromanifold.cli.console import note
from neuromanifold.cli.launched import this_rank, world_size
from neuromanifold.run.processes import ProcessError

TRACEBACK = "NEUROMANIFOLD_TRACEBACK"  # set to anything: errors are shown with their traceback
_USER_ERRORS = (
    ValueError,
    TypeError,
    OSError,
    SafetensorError,
    MemoryError,
    torch.OutOfMemoryError,
    ModuleNotFoundError,
)
_OTHER_ERRORS = (RuntimeError, LookupError, ArithmeticError, AttributeError, AssertionError, ImportError)


class FriendlyGroup(TyperGroup):
    """The group of all commands, which turns exceptions into messages and exit codes."""

    def invoke(self, ctx: Any) -> Any:
        """Run a command: exit code 2 for a user error, 1 for one inside a model or the library, 130 for Ctrl-C."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # of libraries, to those who write code with them
            warnings.showwarning = lambda message, *_, **__: (
                None if this_rank() else note(f"Note: {_one_line(message)}")
            )
            try:
                return super().invoke(ctx)
            except (typer.Exit, typer.Abort):
                raise
            except KeyboardInterrupt:
                note("Interrupted; nothing was written.")
                raise typer.Exit(130) from None
            except (*_USER_ERRORS, *_OTHER_ERRORS) as error:
                if os.environ.get(TRACEBACK):
                    raise
                users, where = isinstance(error, _USER_ERRORS), f"Rank {this_rank()}: " if world_size() > 1 else ""
                place = "" if users or isinstance(error, ProcessError) else f" ({_place(error)})"
                note(f"{where}Error: {_text(error)}{place}")
                raise typer.Exit(2 if users else 1) from None


def _place(error: Exception) -> str:
    """Return where an error inside a model, a user's function or this library was raised."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__} in {last.filename}, line {last.lineno}; {TRACEBACK}=1 shows the traceback."


def _text(error: Exception) -> str:
    """Return the error's message, with advice where it has none."""
    text = _one_line(error) or type(error).__name__
    if isinstance(error, MemoryError):
        return f"Out of memory. Use a smaller --batch-size (or auto), or fewer --parameters. ({text})"
    if isinstance(error, torch.OutOfMemoryError):
        return f"Out of memory on the device. Use a smaller --batch-size (or auto), or --dtype bfloat16. ({text})"
    if isinstance(error, OSError) and error.errno == errno.ENOSPC and "Make room" in str(error.strerror):
        return f"{error.strerror}."
    if (isinstance(error, OSError) and error.errno == errno.ENOSPC) or "No space left on device" in text:
        return f"No space left on the disk, so nothing was written. Make room, or write elsewhere. ({text})"
    if isinstance(error, ModuleNotFoundError) and "pip install" not in text:
        return f"{text}. Run from the folder that contains it, or install it."
    return text


def _one_line(text: object) -> str:
    return " ".join(str(text).split())
