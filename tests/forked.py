"""Processes of their own that need not import everything again: copies of this one."""

import os
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable
from typing import IO


def start(function: Callable[[], object], stdout: IO[str] | int, stderr: IO[str] | int) -> int:
    """The id of a copy of this process that calls the function, and ends as Python would."""
    if child := os.fork():
        return child
    code: object = 1
    try:
        for number, target in ((1, stdout), (2, stderr)):
            os.dup2(target if isinstance(target, int) else target.fileno(), number)
        sys.stdout, sys.stderr = (os.fdopen(number, "w", closefd=False) for number in (1, 2))
        function()
        code = 0
    except SystemExit as error:
        code = error.code
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code if isinstance(code, int) else 1)


def returncode(process: int) -> int:
    """Wait for it; the number of the signal that has killed it, negated, or its exit status."""
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])


def run(function: Callable[[], object]) -> subprocess.CompletedProcess[str]:
    """What the function prints in a process of its own, and how that ends."""
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        code = returncode(start(function, out, err))
        texts = [file.read() for file in (out, err) if not file.seek(0)]
    return subprocess.CompletedProcess([], code, *texts)


def command(*arguments: object) -> Callable[[], object]:
    """The command line with these arguments, as `python -m neuromanifold` calls it."""

    def call() -> object:
        from neuromanifold.cli import main

        sys.argv[1:] = [str(argument) for argument in arguments]
        return main()

    return call
