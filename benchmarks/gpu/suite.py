"""The tests that need a GPU, or that do more where there is one, by pytest in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

from gpu.session import Missing, Row, Session

ROOT = Path(__file__).parents[2]
FILES = (
    *("run/test_checkpoint.py", "run/test_shards.py"),  # some of them need a GPU
    *("core/test_devices.py", "run/test_devices.py", "results/test_summary.py"),  # on every device
    "estimators/test_probe_kernel.py",  # compiled there
)
CHOSEN = "cuda or gpu or probe_kernel"
MODULES = ("pytest", "hypothesis")
PROCESSES = 8


def run_tests(session: Session) -> None:
    """Run the tests; failures of theirs are one failure of the session."""
    rows: list[Row] = []
    missing = [name for name in MODULES if find_spec(name) is None]
    if missing:
        session.not_run.append(f"tests: {', '.join(missing)} not installed")
        return session.add("Tests", [{"tests": CHOSEN, "verdict": session.not_run[-1]}])
    found = session.guarded("tests", lambda: _pytest(session))
    if isinstance(found, Missing):
        return session.add("Tests", [{"tests": CHOSEN, "verdict": found.reason}])
    session.checked("tests", {"tests": CHOSEN, "summary": found[1]}, found[0] == 0, rows)
    return session.add("Tests", rows)


def _pytest(session: Session) -> tuple[int, str] | Missing:
    """Return pytest's exit status and last line; what it said of failures goes to stderr."""
    command = [sys.executable, "-m", "pytest", "-q", "--tb=long", "-m", "not slow", "-k", CHOSEN]
    command += ["-p", "no:cacheprovider", "-p", "no:benchmark", "-p", "gpu.failures"]
    command += ["-W", "ignore::DeprecationWarning", "-W", "ignore::FutureWarning"]
    command += [f"tests/{name}" for name in FILES]
    if find_spec("xdist") is not None:
        command += ["-n", str(min(PROCESSES, os.cpu_count() or 1)), "--dist", "worksteal"]
    folders = (str(ROOT / "src"), str(ROOT), str(ROOT / "benchmarks"), os.environ.get("PYTHONPATH"))
    path = os.pathsep.join(filter(None, folders))
    interpreted = "0" if session.device.type == "cuda" else "1"
    environment = {**os.environ, "PYTHONPATH": path, "TRITON_INTERPRET": interpreted}
    environment["FAILURES"] = str(Path(session.options.out).resolve() / "failures.txt")
    limit = max(1.0, session.left)
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, cwd=ROOT, env=environment, timeout=limit, check=False
        )
    except subprocess.TimeoutExpired as error:
        print((error.stdout or b"").decode()[-2000:], file=sys.stderr, flush=True)
        session.not_run.append(f"tests: stopped after {limit:.0f} s")
        return Missing(session.not_run[-1])
    print(done.stdout[-2000:], done.stderr[-2000:], file=sys.stderr, flush=True)
    return done.returncode, (done.stdout.strip().splitlines() or [f"exit status {done.returncode}"])[-1].strip("= ")
