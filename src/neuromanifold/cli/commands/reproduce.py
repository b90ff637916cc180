"""`neuromanifold reproduce`: the paper's table and figures, on its models or on local ones."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from neuromanifold.cli.console import note, progress_bar
from neuromanifold.cli.options import Device, NoProgress, option, run_option
from neuromanifold.cli.parsing import check_creatable
from neuromanifold.core.checks import message
from neuromanifold.experiments.paper import Folder, PaperRun, PaperSettings, PaperTask, Source, reproduce
from neuromanifold.experiments.paper.folder import TIMING_ROUNDS
from neuromanifold.experiments.paper.tasks import TASKS, find_tasks
from neuromanifold.hf.models import DTYPES, as_device
from neuromanifold.run.settings import Observer

_SOURCES = "Local models and data"


def reproduce_command(
    tasks: Annotated[
        list[str] | None, typer.Argument(metavar="[TASK]...", help=f"Some of {', '.join(TASKS)}. Default: all.")
    ] = None,
    out: Annotated[Path, run_option("Folder for all files; created if missing.", "--out", "-o")] = Path("paper"),
    model: Annotated[
        list[str] | None,
        option(
            _SOURCES,
            "A local model (config.json, *.safetensors, tokenizer or preprocessor files), or another hub name.",
            "--model", "-m", metavar="[TASK=]FOLDER",
        ),
    ] = None,
    data: Annotated[
        list[str] | None,
        option(
            _SOURCES,
            "Local data: CSV, TSV, JSON, JSONL, Parquet, NPZ ('images' or 'audio', with 'labels'), or a folder with a "
            "folder of images or audio files for each class.",
            "--data", "-d", metavar="[TASK=]FILE",
        ),
    ] = None,
    columns: Annotated[
        str | None,
        option(
            _SOURCES,
            "Columns by role, for a single task, such as text=premise,text_pair=hypothesis,label=class.",
            metavar="ROLE=COLUMN,...",
        ),
    ] = None,
    batches: Annotated[int, run_option("Number of batches, of random rows.", "--batches", "-n", min=1)] = 128,
    batch_size: Annotated[int, run_option("Rows in a batch.", "--batch-size", "-b", min=1)] = 64,
    dtype: Annotated[str, run_option(f"Precision of the models: {', '.join(DTYPES)}.")] = "float32",
    device: Device = "auto",
    seed: Annotated[int, run_option("Random seed of rows, new classifiers and probes.", min=0)] = 0,
    rounds: Annotated[
        int, run_option("Rounds of timing, over a few batches with each estimator; 0: no timing.", min=0)
    ] = TIMING_ROUNDS,
    most_probes: Annotated[
        int | None,
        run_option(
            "Last point of the curve of error against passes. Default: C - 1, in all more than twice the passes of the "
            "exact diagonal.",
            min=1,
        ),
    ] = None,
    exact_only: Annotated[
        bool,
        run_option("Keep only the exact diagonals; each of the others takes 8 bytes per parameter.", "--exact-only"),
    ] = False,
    no_progress: NoProgress = False,
) -> None:  # fmt: skip
    """Reproduce the paper's table and figures: its estimators and ours against the exact diagonal, on six networks.

    Finished steps are kept in the folder: the same command resumes where it was stopped.  Examples:

        neuromanifold reproduce

        neuromanifold reproduce sst2 --model ./distilbert-sst2 --data sst2.csv --batches 16

        neuromanifold reproduce sst2 mnli --model sst2=./a --data sst2=a.csv --model mnli=./b --data mnli=b.csv
    """
    chosen = find_tasks(tasks or [])
    sources = parse_sources(chosen, model or [], data or [], columns)
    settings = PaperSettings(batches, batch_size, dtype, str(as_device(device)), seed)
    check_creatable(out / "settings.json")

    @contextmanager
    def named_bar(name: str, data: object) -> Iterator[Observer | bool]:
        if Console(stderr=True).is_terminal:
            note(f"{name} ...")
        with progress_bar(data, not no_progress) as progress:
            yield progress

    run = PaperRun(Folder(out, settings), note, named_bar, not exact_only, rounds, most_probes)
    try:
        text = reproduce(run, chosen, sources)
    except KeyboardInterrupt:
        note(f"Interrupted. Finished steps are kept in {out}: the same command resumes there.")
        raise typer.Exit(130) from None
    typer.echo(text)
    typer.echo(f"Tables, figures, diagonals and settings: {out}")


def parse_sources(tasks: list[PaperTask], models: list[str], data: list[str], columns: str | None) -> dict[str, Source]:
    """Return the local sources of each task from texts `TASK=PATH`, or `PATH` alone for a single task."""
    given: dict[str, dict[str, str]] = {task.name: {} for task in tasks}
    for option_name, texts in (("model", models), ("data", data), ("columns", [] if columns is None else [columns])):
        for text in texts:
            name, equals, path = text.partition("=")
            if option_name == "columns" or not equals or name not in TASKS:
                if len(tasks) != 1:
                    expected = f"TASK={text}" if option_name != "columns" else "left out with several tasks"
                    raise ValueError(message(option_name, f"{expected}, as there are {len(tasks)} tasks", repr(text)))
                name, path = tasks[0].name, text
            if name not in given:
                raise ValueError(message(option_name, f"for one of the tasks {', '.join(given)}", repr(text)))
            if option_name in given[name]:
                both = f"{given[name][option_name]!r} and {path!r}"
                raise ValueError(message(option_name, f"given once for {name}", both))
            given[name][option_name] = path
    return {name: Source(**options) for name, options in given.items()}
