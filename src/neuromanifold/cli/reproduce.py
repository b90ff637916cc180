"""`neuromanifold reproduce`: the paper's table and figures, on its models or on local ones."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from neuromanifold.cli.display import live
from neuromanifold.core.checks import message
from neuromanifold.experiments.paper import Folder, PaperTask, Settings, Source
from neuromanifold.experiments.paper import reproduce as run_all
from neuromanifold.experiments.paper.speed import ROUNDS
from neuromanifold.experiments.paper.tasks import TASKS, find_tasks
from neuromanifold.hf.models import DTYPES, as_device
from neuromanifold.problem.progress import Observer

_SOURCES, _RUN = "Instead of the hub", "Run"


def reproduce(
    tasks: Annotated[
        list[str] | None, typer.Argument(metavar="[TASK]...", help=f"Some of {', '.join(TASKS)}; by default all.")
    ] = None,
    out: Annotated[
        Path, typer.Option("--out", "-o", help="Folder for everything; made if missing.", rich_help_panel=_RUN)
    ] = Path("paper"),
    model: Annotated[
        list[str] | None,
        typer.Option(
            "--model", "-m", metavar="[TASK=]FOLDER", rich_help_panel=_SOURCES,
            help="A local model (config.json, *.safetensors, tokenizer or preprocessor files), or another hub name.",
        ),
    ] = None,
    data: Annotated[
        list[str] | None,
        typer.Option(
            "--data", "-d", metavar="[TASK=]FILE", rich_help_panel=_SOURCES,
            help="Local data: CSV, TSV, JSONL, Parquet, NPZ ('images' or 'audio', with 'labels'), or a folder with a "
            "folder of images or sounds for each class.",
        ),
    ] = None,
    columns: Annotated[
        str | None,
        typer.Option(
            "--columns", metavar="ROLE=COLUMN,...", rich_help_panel=_SOURCES,
            help="For one task: which column holds what, e.g. text=premise,text_pair=hypothesis,label=class.",
        ),
    ] = None,
    batches: Annotated[
        int, typer.Option("--batches", "-n", min=1, help="How many batches, of rows drawn at random with --seed.",
                          rich_help_panel=_RUN)
    ] = 128,
    batch_size: Annotated[
        int, typer.Option("--batch-size", "-b", min=1, help="Rows in a batch.", rich_help_panel=_RUN)
    ] = 64,
    dtype: Annotated[
        str, typer.Option("--dtype", help=f"Precision of the models: {', '.join(DTYPES)}.", rich_help_panel=_RUN)
    ] = "float32",
    device: Annotated[
        str, typer.Option("--device", help="auto (a GPU if there is one), cpu, cuda, cuda:1, mps.",
                          rich_help_panel=_RUN)
    ] = "auto",
    seed: Annotated[
        int, typer.Option("--seed", min=0, help="Of the rows, of classifiers that are drawn, and of the noise.",
                          rich_help_panel=_RUN)
    ] = 0,
    rounds: Annotated[
        int, typer.Option("--rounds", min=0, help="Of the timing, a few batches for each estimator; 0: no times.",
                          rich_help_panel=_RUN)
    ] = ROUNDS,
    most_probes: Annotated[
        int | None, typer.Option("--most-probes", min=1, help="End the curve of error against passes there; by "
                                 "default at C - 1: in all twice the passes of the exact diagonal and more.",
                                 rich_help_panel=_RUN)
    ] = None,
    exact_only: Annotated[
        bool, typer.Option("--exact-only", help="Keep the exact diagonals alone; those of the estimators take eight "
                           "bytes each for every parameter.", rich_help_panel=_RUN)
    ] = False,
    progress: Annotated[
        bool, typer.Option(help="Show how far it is, on a terminal.", rich_help_panel=_RUN)
    ] = True,
) -> None:  # fmt: skip
    """Redo the paper's table and figures: its estimators and ours against the exact diagonal, on its six networks.

    What is finished is kept in the folder: the same command goes on where it was stopped.  Examples:

        neuromanifold reproduce

        neuromanifold reproduce sst2 --model ./distilbert-sst2 --data sst2.csv --batches 16

        neuromanifold reproduce sst2 mnli --model sst2=./a --data sst2=a.csv --model mnli=./b --data mnli=b.csv
    """
    chosen = find_tasks(tasks or [])
    sources = parse_sources(chosen, model or [], data or [], columns)
    settings = Settings(batches, batch_size, dtype, str(as_device(device)), seed)
    console, folder = Console(stderr=True), Folder(out, settings)

    def tell(text: str) -> None:
        console.print(text, markup=False, highlight=False, soft_wrap=True)

    @contextmanager
    def watch(text: str, total: int) -> Iterator[Observer | None]:
        if console.is_terminal:
            tell(f"{text} ...")
        with live(total, progress) as observer:
            yield observer

    try:
        text = run_all(chosen, folder, settings, sources, tell, watch, not exact_only, rounds, most_probes)
    except KeyboardInterrupt:
        tell(f"Interrupted. What is done is kept in {out}: the same command goes on from there.")
        raise typer.Exit(130) from None
    typer.echo(text)
    typer.echo(f"Tables, figures, diagonals and settings: {out}")


def parse_sources(tasks: list[PaperTask], models: list[str], data: list[str], columns: str | None) -> dict[str, Source]:
    """`TASK=PATH`, or `PATH` alone where there is one task."""
    given: dict[str, dict[str, str]] = {task.name: {} for task in tasks}
    for option, texts in (("model", models), ("data", data), ("columns", [] if columns is None else [columns])):
        for text in texts:
            name, equals, path = text.partition("=")
            if option == "columns" or not equals or name not in TASKS:
                if len(tasks) != 1:
                    expected = f"TASK={text}" if option != "columns" else "left out with several tasks"
                    raise ValueError(message(option, f"{expected}, as there are {len(tasks)} tasks", repr(text)))
                name, path = tasks[0].name, text
            if name not in given:
                raise ValueError(message(option, f"for one of the tasks {', '.join(given)}", repr(text)))
            if option in given[name]:
                raise ValueError(message(option, f"given once for {name}", f"{given[name][option]!r} and {path!r}"))
            given[name][option] = path
    return {name: Source(**options) for name, options in given.items()}
