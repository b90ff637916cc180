"""The tests that need a GPU, or that do more where there is one, by pytest in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

from gpu.session import Missing, Row, Session

ROOT = Path(__file__).parents[2]
ON_EVERY_DEVICE = ("core/test_devices.py", "run/test_devices.py")
COMPILED = ("estimators/test_probe_kernel.py", "estimators/test_lower_kernel.py")  # kernels as they run on a GPU
NEED_A_GPU = ("run/test_checkpoint.py", "run/test_shards.py")
MODULES = ("pytest", "hypothesis")


def run_tests(session: Session) -> None:
    """Run the tests; what fails or cannot be run is a row."""
    missing = [name for name in MODULES if find_spec(name) is None]
    rows: list[Row] = []
    jobs = {"devices": (*ON_EVERY_DEVICE, "-k", "cuda"), "need a GPU": (*NEED_A_GPU, "-k", "gpu"), "kernels": COMPILED}
    for name, arguments in jobs.items():
        if missing:
            rows.append({"tests": name, "verdict": f"not run: {', '.join(missing)} not installed"})
            session.not_run.append(f"tests, {name}")
            continue
        found = session.guarded(f"tests, {name}", lambda arguments=arguments: _pytest(session, arguments))
        if isinstance(found, Missing):
            rows.append({"tests": name, "verdict": found.reason})
        else:
            code, summary = found
            session.checked(f"tests, {name}", {"tests": name, "summary": summary}, code in (0, 5), rows)  # 5: none
    session.add("Tests", rows)


def _pytest(session: Session, arguments: tuple[str, ...]) -> tuple[int, str]:
    """Return pytest's exit status and last line; what it said of failures goes to stderr."""
    paths = [f"tests/{one}" if one.endswith(".py") else one for one in arguments]
    command = [sys.executable, "-m", "pytest", "-q", "--tb=short", "-p", "no:cacheprovider", "-m", "not slow", *paths]
    command += ["-W", "ignore::DeprecationWarning", "-W", "ignore::FutureWarning"]
    if find_spec("xdist") is not None:
        command += ["-n", str(min(8, os.cpu_count() or 1))]
    path = os.pathsep.join(filter(None, [str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH")]))
    interpreted = "0" if session.device.type == "cuda" else "1"
    environment = {**os.environ, "PYTHONPATH": path, "TRITON_INTERPRET": interpreted}
    limit = max(1.0, session.left)
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, cwd=ROOT, env=environment, timeout=limit, check=False
        )
    except subprocess.TimeoutExpired:
        session.not_run.append(f"the rest of {' '.join(paths)}")
        return 0, f"stopped after {limit:.0f} s"
    if done.returncode not in (0, 5):
        print(done.stdout[-8000:], done.stderr[-2000:], file=sys.stderr, flush=True)
    return done.returncode, (done.stdout.strip().splitlines() or [f"exit status {done.returncode}"])[-1].strip("= ")
