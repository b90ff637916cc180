"""Language models through the command line: tokens per second of `neuromanifold estimate`, of forward + backward.

    PYTHONPATH=src:benchmarks python -m gpu.command_line --out DIR [--only NAME ...] [--budget 120] [--quick]

For each model: `neuromanifold estimate -m gpu.command_line:model -d gpu.command_line:batches -o FILE`, with no other
option, for a few and for many batches, and forward + backward of the same batches in a process of its own.  A first run
of the few, in which kernels are compiled, is not in the table.  Rows with a range of batches leave out what happens
once a run; the others are what the command prints.  Weights and tokens are random.  Results are DIR/command_line.json
and DIR/command_line.md, written after each model; the log has the seconds of each whole command.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
COUNTS = {"GPT-2": (64, 192), "Qwen-0.5B": (48, 80), "Llama-1B": (48, 72), "Llama-8B": (12, 28)}  # batches
QUICK = (3, 6)
_COUNT, _NAME, _QUICK = "NEUROMANIFOLD_BATCHES", "NEUROMANIFOLD_MODEL", "NEUROMANIFOLD_QUICK"  # for the processes
_TIME = re.compile(r"time: +([\d.e+]+) s, ")


def model() -> Any:
    """Return the model that the environment names; the function that the command line is given."""
    return _made()[0]


def batches() -> list[dict[str, Any]]:
    """Return batches of random tokens, all of one size."""
    import torch

    _, batch = _made()
    generator = torch.Generator().manual_seed(1)
    shape, high = batch["input_ids"].shape, int(batch["input_ids"].max()) + 1
    count = int(os.environ[_COUNT])
    return [{"input_ids": torch.randint(0, high, shape, generator=generator)} for _ in range(count)]


@cache
def _made() -> Any:
    import torch

    from gpu.language import made

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return made(os.environ[_NAME], device, small=os.environ[_QUICK] == "1")


def _baseline() -> None:
    """Print the seconds of forward + backward of a batch, with a cotangent that takes no time to make."""
    import torch
    from common import synchronize

    module, batch = _made()
    device = next(module.parameters()).device
    parameters, cotangent = list(module.parameters()), None

    def turn(count: int) -> float:
        nonlocal cotangent
        start = time.perf_counter()
        for _ in range(count):
            logits = module(**batch).logits
            cotangent = torch.randn_like(logits) if cotangent is None else cotangent
            torch.autograd.grad(logits, parameters, cotangent)
        synchronize(device)
        return (time.perf_counter() - start) / count

    turn(4)
    print(json.dumps({"seconds": turn(12), "tokens": batch["input_ids"].numel()}))


def _run(command: list[str], name: str, count: int, quick: bool, limit: float) -> str:
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT / "benchmarks"), os.environ.get("PYTHONPATH", "")])
    start = time.monotonic()
    own = {_NAME: name, _COUNT: str(count), _QUICK: str(int(quick)), "PYTHONPATH": path, "COLUMNS": "160"}
    done = subprocess.run(
        [sys.executable, "-m", *command], capture_output=True, text=True, cwd=ROOT, env={**os.environ, **own},
        timeout=max(1.0, limit), check=False,
    )  # fmt: skip
    if done.returncode:
        raise RuntimeError(done.stdout[-500:] + done.stderr[-1500:])
    print(f"{done.stdout}\n{name}, {command[0]}: {time.monotonic() - start:.1f} s for all of the command", flush=True)
    return done.stdout


def _measure(name: str, quick: bool, end: float) -> Iterator[dict[str, Any]]:
    found = json.loads(
        _run(["gpu.command_line", "--baseline"], name, 1, quick, end - time.monotonic()).splitlines()[-1]
    )
    few, many = QUICK if quick else COUNTS[name]
    _seconds(name, few, quick, end)  # kernels are compiled
    short = _seconds(name, few, quick, end)
    yield _row(name, str(few), found, short / few)
    long = _seconds(name, many, quick, end)
    yield _row(name, str(many), found, long / many)
    both = f"{few + 1}–{many}"
    if long > short:
        yield _row(name, both, found, (long - short) / (many - few))
    else:
        why = f"{many} batches took {long:.3g} s, {few} took {short:.3g} s: not told apart"
        yield {"model": name, "batches": both, "tokens a batch": found["tokens"], "why": why}


def _seconds(name: str, count: int, quick: bool, end: float) -> float:
    """Return the seconds that `neuromanifold estimate` prints, of a run over so many batches."""
    command = ["neuromanifold", "estimate", "-m", "gpu.command_line:model", "-d", "gpu.command_line:batches"]
    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as folder:
        command += ["-o", f"{folder}/fim.safetensors", "--no-progress"]
        printed = _TIME.search(_run(command, name, count, quick, end - time.monotonic()))
    assert printed is not None, "the command has printed no time"
    return float(printed[1])


def _row(name: str, batches: str, baseline: dict[str, float], seconds: float) -> dict[str, Any]:
    """Of a run that takes so many seconds for a batch."""
    tokens, own = baseline["tokens"], baseline["seconds"]
    of_both = {"forward + backward, tokens/s": tokens / own, "run, tokens/s": tokens / seconds}
    return {"model": name, "batches": batches, "tokens a batch": tokens, **of_both, "ratio of times": seconds / own}


def _write(out: Path, rows: list[dict[str, Any]]) -> None:
    from common import processor, table, versions

    (out / "command_line.json").write_text(json.dumps(rows, indent=1) + "\n")
    header = list(dict.fromkeys(key for row in rows for key in row))
    lines = [
        [f"{v:,.0f}" if isinstance(v, float) and v > 100 else f"{v:.3g}" if isinstance(v, float) else str(v) for v in
         (row.get(key, "") for key in header)] for row in rows
    ]  # fmt: skip
    import torch

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    used = ", ".join(f"{name} {version}" for name, version in versions().items())
    head = f"{datetime.date.today().isoformat()} · `python -m gpu.command_line` · {used} · {processor(device)}"
    text = (
        "`neuromanifold estimate -m module:function -d module:function -o FILE` without further options; bfloat16, "
        "random weights and tokens. Forward + backward: eager, with a given cotangent. Kernels were compiled "
        "in a run before. Rows with a range of batches leave out what happens once a run; the others are what the "
        "command prints."
    )
    (out / "command_line.md").write_text(
        f"# Language models through the command line\n\n{head}\n\n{text}\n\n{table(header, lines)}\n"
    )


def main() -> int:
    """Measure one model after the other, and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", metavar="DIR")
    parser.add_argument("--budget", default=120.0, type=float, help="seconds for everything")
    parser.add_argument("--only", nargs="+", choices=list(COUNTS), default=list(COUNTS))
    parser.add_argument("--quick", action="store_true", help="a small model, also on a CPU: does everything run?")
    parser.add_argument("--baseline", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.baseline:
        _baseline()
        return 0
    if not options.out:
        parser.error("--out is missing: the folder that results are written to")
    end, out, rows, failed = time.monotonic() + options.budget, Path(options.out), list[dict[str, Any]](), False
    out.mkdir(parents=True, exist_ok=True)
    for name in options.only:
        try:
            for row in _measure(name, options.quick, end):
                rows.append(row)
                print({key: round(v, 3) if isinstance(v, float) else v for key, v in row.items()}, flush=True)
        except (RuntimeError, AssertionError, subprocess.TimeoutExpired) as error:
            failed = True
            rows.append({"model": name, "why": f"{type(error).__name__}: {' '.join(str(error).split())[-300:]}"})
            print(f"{name}: {error}", file=sys.stderr, flush=True)
        _write(out, rows)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
