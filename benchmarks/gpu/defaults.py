"""What a call without any option costs on a GPU, in four minutes: tests and checks first, then time and memory.

    PYTHONPATH=src:benchmarks python -m gpu.defaults --out DIR [--budget 240] [--prepare 75] [--only NAME ...] [--quick]

A process for each model compiles the kernels that its runs need, all at the same time, while tests and checks run.
Then the models take turns, with the device to themselves; a process that hangs or fails costs its own rows.

Results are in DIR: defaults.json and defaults.md, written after each turn; checks.md, verdicts of tests and checks;
failures.txt, tracebacks of tests; kernels.txt, profiles; log.txt, what all processes printed.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
MODELS = ("DistilBERT-2", "ResNet-50", "ConvNeXt-tiny", "ViT-B/16", "DeBERTa", "Wav2Vec2", "EfficientNet-B0", "RoBERTa")
LANGUAGE = ("GPT-2", "Qwen-0.5B", "Llama-1B")
LARGE, PROFILE = "Llama-8B", "profile"
ORDER = (*LANGUAGE, *MODELS[:5], LARGE, *MODELS[5:], PROFILE)  # by value: what no time is left for is not run
LIMIT = {"Llama-1B": 20.0, LARGE: 40.0, PROFILE: 30.0}  # seconds of a turn
USUAL = 16.0
CHECKS = {"A": MODELS[:2], "B": (*MODELS[2:5], "GPT-2"), "C": MODELS[5:]}
PROFILED = (("Qwen-0.5B", "bf16"), ("Llama-1B", "bf16"), ("ConvNeXt-tiny", "bf16"))
LONG = 0.04  # seconds of a batch from which on Python does not matter, and few batches do
ALL = 128  # batches of a run, as which its time is stated


# ------------------------------------------------------------------------------------------------- one model: a process


def child(name: str, folder: Path, quick: bool) -> None:
    """Prepare a model, wait for its turn, and measure it."""
    import torch
    import transformers

    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    own = folder / _file_name(name)
    if name not in (LARGE, PROFILE):
        try:
            for which, runs, batch in _cases(name, device, quick, prepare=True):
                for run in runs.values():
                    run([batch] * (2 if quick else 10))
                print(f"{name} {which} is prepared", flush=True)
        except Exception:
            traceback.print_exc()
    from gpu.meter import free

    free(device)
    own.with_suffix(".ready").touch()
    while not own.with_suffix(".go").exists():
        time.sleep(0.02)
    if name == PROFILE:
        _profile(own, device, quick)
    else:
        _measure(name, own.with_suffix(".json"), device, quick)


def _measure(name: str, to: Path, device: Any, quick: bool) -> None:
    from gpu.meter import measure

    rows: list[dict[str, Any]] = []
    for which, runs, batch in _cases(name, device, quick):
        base = None
        for kind, run in runs.items():
            try:
                warm, count = _counts(name, base, quick)
                found = measure(run, batch, warm, count, device)
            except Exception as error:
                traceback.print_exc()
                rows.append(
                    {"model": name, "precision": which, "run": kind, "why": f"{type(error).__name__}: {error}"[:200]}
                )
                if base is None:
                    break
                continue
            base = base or found
            memory = base.peak or 1.0
            rows.append(
                {
                    "model": name, "precision": which, "run": kind, "ms": 1e3 * found.seconds,
                    "ratio": found.seconds / base.seconds, f"ratio, {ALL} batches": found.over(ALL) / base.seconds,
                    "replayed": f"{found.replayed} of {warm + count}", "memory, GiB": found.peak,
                    "memory": found.peak / memory, "first batches": found.first_peak / memory,
                    "reserved, GiB": found.reserved,
                }
            )  # fmt: skip
            to.write_text(json.dumps(rows))
            print({key: round(v, 3) if isinstance(v, float) else v for key, v in rows[-1].items()}, flush=True)
        to.write_text(json.dumps(rows))


def _counts(name: str, base: Any, quick: bool) -> tuple[int, int]:
    """Return how many batches are not timed, and how many are."""
    from gpu.language import SHAPES

    if quick:
        return 2, 2
    if base is None:
        return 4, 8
    if name in SHAPES:
        return SHAPES[name].warm, SHAPES[name].batches
    return (8, 12) if base.seconds > LONG else (20, 24)


def _cases(
    name: str, device: Any, quick: bool, prepare: bool = False
) -> Iterable[tuple[str, dict[str, Callable[[Any], Any]], Any]]:
    """Yield each precision with forward + backward and the runs, as functions of batches, and the batch."""
    from common import BASELINE, forward_backward

    import neuromanifold as nm
    from gpu.language import RUNS, SHAPES, made
    from gpu.models import PRECISIONS, TASKS, full_task, in_precision, precision, small_task

    if name in SHAPES:
        model, batch = made(name, device, layers=2 if prepare else 0, small=quick)
        kinds = ["defaults"] if name == LARGE else ["defaults", "per batch"]
        runs = {kind: partial(nm.fisher_diagonal, model, **RUNS[kind]) for kind in kinds}
        if name == "GPT-2":
            runs["eager"] = partial(nm.fisher_diagonal, model, cuda_graphs=False)
        yield "bf16", {BASELINE: partial(_given_cotangent, model), **runs}, batch
        return
    task = small_task(TASKS[name][0], device) if quick else full_task(name, device)
    for which in PRECISIONS:
        with precision(which):
            task = in_precision(task, which)
            runs = {"defaults": partial(nm.fisher_diagonal, task.model)}
            if which == "bf16" and not prepare:
                runs["eager"] = partial(nm.fisher_diagonal, task.model, cuda_graphs=False)
            yield which, {BASELINE: partial(forward_backward, task.model), **runs}, task.batch
            task.model.zero_grad(set_to_none=True)


def _given_cotangent(model: Any, batches: Iterable[dict[str, Any]]) -> None:
    """Forward and backward passes with a cotangent of the logits that takes no time to make."""
    import torch

    cotangent, parameters = None, list(model.parameters())
    for batch in batches:
        logits = model(**batch).logits
        cotangent = torch.randn_like(logits) if cotangent is None else cotangent
        torch.autograd.grad(logits, parameters, cotangent)


def _profile(own: Path, device: Any, quick: bool) -> None:
    from gpu.meter import free, kernels

    for name, wanted in PROFILED:
        for which, runs, batch in _cases(name, device, quick):
            for kind in list(runs) if which == wanted else []:
                if kind in ("defaults", "per batch"):
                    continue
                text = kernels(runs[kind], batch, 2 if quick else 6, device)
                with own.with_suffix(".txt").open("a") as file:
                    file.write(f"== {name} {which}, {kind}\n{text}\n\n")
        free(device)


# -------------------------------------------------------------------------------------------------- all: the parent


class Process:
    """A process in a session of its own, which can be paused and ended with all that it started."""

    def __init__(self, command: list[str], log: Path, environment: dict[str, str]) -> None:
        self.log = log
        with log.open("w") as file:
            self._popen = subprocess.Popen(
                command, stdout=file, stderr=subprocess.STDOUT, cwd=ROOT, env=environment, start_new_session=True
            )

    @property
    def runs(self) -> bool:
        """Whether it has not ended."""
        return self._popen.poll() is None

    def send(self, what: signal.Signals) -> None:
        """Send a signal to it and to what it started."""
        if self.runs:
            os.killpg(self._popen.pid, what)

    def end(self) -> None:
        """End it, wherever it is."""
        self.send(signal.SIGKILL)
        self._popen.wait()


def main() -> int:
    """Run everything and return the exit status."""
    options = _arguments()
    start, out = time.monotonic(), Path(options.out)
    if options.child:
        child(options.child, out, options.quick)
        return 0
    out.mkdir(parents=True, exist_ok=True)

    def passed() -> float:
        return time.monotonic() - start

    def tell(text: str) -> None:
        print(f"[{passed():6.1f} s] {text}", flush=True)

    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        names = [name for name in ORDER if name in options.only]
        path = os.pathsep.join([str(ROOT / "src"), str(ROOT / "benchmarks"), os.environ.get("PYTHONPATH", "")])
        environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
        begin = partial(_begin, folder=folder, quick=options.quick, environment=environment)
        children = {name: begin(name) for name in names}
        checks = {} if options.no_checks else _begin_checks(folder, options, environment)
        try:
            while passed() < options.prepare:
                ready = [(folder / _file_name(name)).with_suffix(".ready").exists() for name in names]
                if not any(one.runs for one in checks.values()) and all(
                    done or not children[name].runs for name, done in zip(names, ready, strict=True)
                ):
                    break
                time.sleep(0.1)
            for name, one in checks.items():
                if one.runs:
                    tell(f"{name} is stopped")
                one.end()
            for one in children.values():
                one.send(signal.SIGSTOP)  # nobody but the one whose turn it is
            for name in names:
                left = options.budget - passed()
                if left < 6:
                    tell(f"{name}: not run, out of time")
                    continue
                if not children[name].runs:
                    tell(f"{name} ended before its turn, and is begun again")
                    children[name] = begin(name)
                _turn(name, children[name], folder, min(left, LIMIT.get(name, USUAL)), tell)
                _write(out, folder, names, [one.log for one in (*children.values(), *checks.values())])
        finally:
            for one in (*children.values(), *checks.values()):
                one.end()
            _write(out, folder, names, [one.log for one in (*children.values(), *checks.values())])
    print((out / "defaults.md").read_text())
    tell("done")
    return 0


def _begin(name: str, folder: Path, quick: bool, environment: dict[str, str]) -> Process:
    command = [sys.executable, "-m", "gpu.defaults", "--child", name, "--out", str(folder)]
    return Process(command + ["--quick"] * quick, (folder / _file_name(name)).with_suffix(".log"), environment)


def _begin_checks(folder: Path, options: argparse.Namespace, environment: dict[str, str]) -> dict[str, Process]:
    """Begin tests and checks, which keep to the time of preparation by themselves."""
    budget, begun = str(options.prepare - 18), {}  # they are imported first
    command = [sys.executable, str(ROOT / "benchmarks/gpu_session.py"), "--budget", budget]
    command += ["--quick"] * options.quick
    for name, chosen in {"tests": (), **CHECKS}.items():
        where = ["--out", str(folder / f"checks-{name}"), "--sections", "checks" if chosen else "tests"]
        where += ["--only", *chosen] if chosen else []
        begun[name] = Process(command + where, folder / f"{name}.log", environment)
    return begun


def _turn(name: str, one: Process, folder: Path, limit: float, tell: Callable[[str], None]) -> None:
    end = time.monotonic() + limit
    (folder / _file_name(name)).with_suffix(".go").touch()
    one.send(signal.SIGCONT)
    while one.runs and time.monotonic() < end:
        time.sleep(0.05)
    tell(f"{name}: {'stopped' if one.runs else 'done'}")
    one.end()


def _write(out: Path, folder: Path, names: list[str], logs: list[Path]) -> None:
    """Collect what there is so far."""
    from common import table

    files = [(folder / _file_name(name)).with_suffix(".json") for name in names]
    rows = [row for file in files if file.exists() for row in json.loads(file.read_text())]
    (out / "defaults.json").write_text(json.dumps(rows, indent=1))
    header = list(dict.fromkeys(key for row in rows for key in row))
    lines = [[f"{v:.3f}" if isinstance(v := row.get(key, ""), float) else str(v) for key in header] for row in rows]
    (out / "defaults.md").write_text(_head() + table(header, lines) + "\n")
    checks = [file.read_text() for file in sorted(folder.glob("checks-*/gpu.md"))]
    (out / "checks.md").write_text("\n\n".join(checks))
    for source, to in ((folder / "checks-tests/failures.txt", "failures.txt"), (folder / "profile.txt", "kernels.txt")):
        if source.exists():
            (out / to).write_text(source.read_text())
    (out / "log.txt").write_text("\n".join(f"==== {log.stem}\n{log.read_text()[-200_000:]}" for log in logs))


def _head() -> str:
    import datetime
    import platform
    from importlib.metadata import version

    used = ", ".join(f"{name} {version(name)}" for name in ("torch", "triton", "transformers"))
    text = "Wall-clock and memory of runs without any option over forward + backward (eager; of language models with a "
    text += "given cotangent). Memory: the peak of the timed batches over the weights, without the result's own sums; "
    text += "“first batches”: that of the batches before, two of which are verified."
    head = (
        f"{datetime.date.today().isoformat()} · `python -m gpu.defaults` · {used}, Python {platform.python_version()}"
    )
    return f"# Defaults on a GPU\n\n{head}\n\n{text}\n\n"


def _file_name(name: str) -> str:
    return name.replace("/", "-").replace(".", "_")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", required=True, metavar="DIR")
    parser.add_argument("--budget", default=240.0, type=float, help="seconds for everything")
    parser.add_argument("--prepare", default=75.0, type=float, help="of these, seconds for tests, checks and compiling")
    parser.add_argument("--only", nargs="+", choices=ORDER, default=list(ORDER))
    parser.add_argument("--no-checks", action="store_true", help="times and memory only")
    parser.add_argument("--quick", action="store_true", help="small models, also on a CPU: does everything run?")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
