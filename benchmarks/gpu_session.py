"""What a Fisher diagonal costs on a GPU, by batches and by samples, over a plain forward and backward pass.

    PYTHONPATH=src python benchmarks/gpu.py [--only ResNet-50 GPT-2] [--precision fp32 bf16] [--repeats 3] [--quick]
                                            [--sections times exact] [--skip-checks] [--budget 450] [--copy FILE]
    PYTHONPATH=src python benchmarks/gpu.py --profile DistilBERT-2 bf16

in one process:

    checks      small and wide networks against float64, and whether the mean over seeds is right (gpu_checks.py)
    exact       the exact diagonal of 8192 samples over a loop over samples and classes (gpu_exact.py)
    times       for each task and precision: by the clock (gpu_times.py), and memory (gpu_memory.py)
    kernels     fused kernels against cuBLAS by layer shape (gpu_kernels.py, where there is one)
    larger      times of transformers in bf16 with four times the samples, if time is left
    device      the main rows of both, without what the host takes: the sum of all kernels (gpu_device.py)

"Plain" is forward and backward of the summed cross-entropy into .grad (eager).  fp32: no TF32 anywhere; tf32: matrix
products and convolutions in TF32; bf16: model and inputs in bfloat16.  An error costs its row only; its traceback goes
to stderr.  The result is written after each section; parts of it (--only, --quick, ...) are printed and do not replace
it.
"""

from __future__ import annotations

import argparse
import warnings

import gpu_checks
import torch
import transformers
from gpu_device import run_device
from gpu_exact import run_exact
from gpu_models import PRECISIONS, TASKS, in_precision, precision
from gpu_profile import print_profile
from gpu_session import SECTIONS, Session
from gpu_times import SAMPLEWISE, run_larger, run_times, works


def run_checks(session: Session, tasks: list[str]) -> None:
    """The section."""
    names = gpu_checks.architectures_of(tasks)
    arguments = (names, session.options.precision, session.device, session.guarded, session.tell)
    text = session.guarded("checks", lambda: gpu_checks.checks(*arguments))
    session.keep("Checks", f"{text}")
    session.free()


def run_kernels(session: Session, tasks: list[str]) -> None:
    """The section; of all tasks together."""
    if len(tasks) < len(TASKS) or session.device.type != "cuda":
        return session.tell("kernels · left out: only for all tasks, on a GPU")
    try:
        from gpu_kernels import kernels
    except ImportError as error:
        return session.tell(f"kernels · left out: {error}")
    session.options.device = session.device
    text = session.guarded("kernels", lambda: kernels(session.options))  # its table; what it prints is only printed
    session.keep("Fused kernels", f"{text}" if text else "See the output.")
    return session.free()


def profile(session: Session, name: str, which: str) -> None:
    """Kernels of a batch, plain and by samples."""
    with precision(which):
        task = in_precision(session.task(name), which)
        functions = works(task, name, which, main=True)
        for row in ("plain", SAMPLEWISE):
            print_profile(session, f"{name} {which} · {row}", task, functions[row])


RUN = {"checks": run_checks, "exact": run_exact, "times": run_times, "kernels": run_kernels, "larger": run_larger}
RUN["device"] = run_device


def arguments() -> argparse.Namespace:
    """Of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=list(TASKS), metavar="NAME", help=", ".join(TASKS))
    parser.add_argument("--precision", nargs="+", choices=PRECISIONS, default=PRECISIONS)
    parser.add_argument("--sections", nargs="+", choices=SECTIONS, default=SECTIONS)
    parser.add_argument("--repeats", default=3, type=int, help="turns of everything that is timed")
    parser.add_argument("--skip-checks", action="store_true")
    parser.add_argument("--main", action="store_true", help="only plain, the main rows and what is replayed")
    parser.add_argument("--quick", action="store_true", help="small networks, also on a CPU: does everything run?")
    parser.add_argument(
        "--profile", nargs=2, metavar=("NAME", "PRECISION"), help="kernels of a sample-wise run instead"
    )
    parser.add_argument("--budget", default=450.0, type=float, help="seconds after which no new row begins")
    parser.add_argument("--copy", metavar="FILE", help="write the result there, too")
    options = parser.parse_args()
    options.repeats = 1 if options.quick else options.repeats
    options.precision, options.sections = tuple(options.precision), tuple(options.sections)
    if options.profile and not (options.profile[0] in TASKS and options.profile[1] in PRECISIONS):
        parser.error(f"--profile takes one of {', '.join(TASKS)} and one of {', '.join(PRECISIONS)}")
    if not torch.cuda.is_available() and not options.quick:
        parser.error("there is no GPU here; --quick runs on a CPU")
    return options


def main() -> None:
    """All sections, one after the other."""
    options = arguments()
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    session = Session(options)
    if options.profile:
        profile(session, *options.profile)
        return
    tasks = [name for name in TASKS if not options.only or name in options.only]
    for section in (section for section in SECTIONS if section in options.sections):
        if not (section == "checks" and options.skip_checks):
            RUN[section](session, tasks)
    print("\n" + session.text)
    session.tell("done" + (", written to benchmarks/results/gpu-h200.md" if session.whole else ""))


if __name__ == "__main__":
    main()
