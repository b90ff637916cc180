"""A plugin of pytest that writes each failure to the file FAILURES at once: also in a run that is stopped."""

from __future__ import annotations

import os
from pathlib import Path

import pytest


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Append the traceback of a failure."""
    if report.failed and os.environ.get("FAILURES") and not os.environ.get("PYTEST_XDIST_WORKER"):
        path = Path(os.environ["FAILURES"])
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a") as file:
            file.write(f"==== {report.nodeid} ({report.when})\n{report.longreprtext}\n\n")
