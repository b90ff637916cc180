"""Everything that needs a GPU, in one session of at most eight minutes: checks, tests, timings, ablations.

    PYTHONPATH=src python benchmarks/gpu_session.py --out DIR [--budget 450] [--sections checks times]
                                                    [--only ResNet-50 GPT-2] [--precision fp32 bf16] [--quick]
    PYTHONPATH=src python benchmarks/gpu_session.py --profile DistilBERT-2 bf16

    checks      kernels against float64; whole networks against a float64 loop, in fp32, tf32, bf16 and fp16; CUDA
                graphs against eager runs; language models; several processes and FSDP2; verification in every
                precision; unbiasedness
    tests       the tests that need a GPU, by pytest where it is installed
    times       for each model and precision: time and memory over forward + backward
    ablation    each Triton kernel against torch
    device      the sum of all kernels of a batch
    exact       the exact diagonal over a loop over samples and classes

Nothing ends the session early: what fails costs its row, is printed with its traceback, and makes the exit status 1.
Each section gets its share of the time that is left; rows that no time is left for are listed as not run.  Results are
DIR/gpu.json and DIR/gpu.md, written after each section.  --quick has small networks and runs on a CPU, too (with
NEUROMANIFOLD_KERNELS=interpret TRITON_INTERPRET=1 by the interpreted kernels).
"""

from __future__ import annotations

import argparse
import faulthandler
import sys
import warnings
from collections.abc import Callable

import torch
import transformers
from gpu.ablation import run_ablation
from gpu.behaviour import run_behaviour
from gpu.device import print_profile, run_device
from gpu.exact import run_exact
from gpu.kernels import run_kernels
from gpu.language import run_language
from gpu.models import ARCHITECTURES, PRECISIONS, TASKS
from gpu.networks import run_networks
from gpu.processes import run_processes
from gpu.session import Session
from gpu.suite import run_tests
from gpu.times import run_times

from neuromanifold.kernels.dispatch import wanted_kernels

GRACE = 30.0  # seconds after the budget, after which a session that hangs is killed


def run_checks(session: Session) -> None:
    """Check kernels, networks and behaviour."""
    chosen = session.options.only or list(TASKS)
    architectures = [name for name in ARCHITECTURES if name in {TASKS[task][0] for task in chosen}]
    if session.device.type == "cuda" or wanted_kernels() == "interpret":
        run_kernels(session)
    if any(ARCHITECTURES[architecture].language for architecture in architectures):
        with session.share(0.5):
            run_language(session)
        run_processes(session)
    with session.share(0.6):
        run_networks(session, architectures)
    run_behaviour(session, architectures)


SECTIONS: dict[str, tuple[Callable[[Session], None], float]] = {  # with their shares of the time
    "checks": (run_checks, 140.0),
    "tests": (run_tests, 40.0),
    "times": (run_times, 175.0),
    "ablation": (run_ablation, 60.0),
    "device": (run_device, 20.0),
    "exact": (run_exact, 15.0),
}


def arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", metavar="DIR", help="folder for gpu.json and gpu.md")
    parser.add_argument("--budget", default=450.0, type=float, help="seconds after which no new row begins")
    parser.add_argument("--sections", nargs="+", choices=list(SECTIONS), default=list(SECTIONS))
    parser.add_argument("--only", nargs="+", choices=list(TASKS), metavar="NAME", help=", ".join(TASKS))
    parser.add_argument("--precision", nargs="+", choices=PRECISIONS, default=list(PRECISIONS))
    parser.add_argument("--repeats", default=2, type=int, help="turns of everything that is timed")
    parser.add_argument("--all-rows", action="store_true", help="more estimators, in fp32")
    parser.add_argument("--quick", action="store_true", help="small networks, also on a CPU: does everything run?")
    parser.add_argument("--profile", nargs=2, metavar=("NAME", "PRECISION"), help="print kernels of a batch instead")
    options = parser.parse_args()
    options.repeats = 1 if options.quick else options.repeats
    if options.profile and not (options.profile[0] in TASKS and options.profile[1] in PRECISIONS):
        parser.error(f"--profile takes one of {', '.join(TASKS)} and one of {', '.join(PRECISIONS)}")
    if not options.profile and not options.out:
        parser.error("--out is missing: the folder that results are written to")
    if not torch.cuda.is_available() and not options.quick:
        parser.error("there is no GPU here; --quick runs on a CPU")
    return options


def main() -> int:
    """Run all sections, one after the other, and return the exit status."""
    options = arguments()
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    session = Session(options)
    if options.profile:
        print_profile(session, *options.profile)
        return 0
    faulthandler.dump_traceback_later(options.budget + GRACE, exit=True)
    left = {name: share for name, (_, share) in SECTIONS.items() if name in options.sections}
    for name in list(left):
        with session.share(left[name] / sum(left.values())):
            session.tell(f"== {name}, {session.left:.0f} s")
            session.guarded(name, lambda name=name: SECTIONS[name][0](session))
        del left[name]
        session.free()
        session.write()
    faulthandler.cancel_dump_traceback_later()
    print("\n" + session.text)
    session.tell(f"done: {len(session.failures)} failures, {len(session.not_run)} rows not run")
    return int(bool(session.failures))


if __name__ == "__main__":
    sys.exit(main())
