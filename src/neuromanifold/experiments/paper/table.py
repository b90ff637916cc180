"""The table: as text for people, as CSV for programs, as LaTeX in the paper's layout."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from neuromanifold.core.checks import listed
from neuromanifold.experiments.paper.columns import BASELINE, COLUMNS, EXACT, OURS, PAPER, Column, curve
from neuromanifold.experiments.paper.folder import Folder
from neuromanifold.experiments.paper.tasks import TASKS, PaperTask
from neuromanifold.results.files import save_text
from neuromanifold.results.table import aligned, text_table

_GROUPS = {"all": "all parameters", "rest": "all but embeddings", "embeddings": "embeddings"}
_HEADS = {"all": "RelMAE", "rest": "but emb.", "embeddings": "embeddings"}
_QUANTITIES = ("relmae", "relmae_positive", "mae", "mean_ratio", "cosine", "rank_correlation", "entries", "positive")
NOTES = """\
RelMAE: mean of |estimate - F|/(F + 1e-12) over all entries, F the exact diagonal summed over the samples.
×: speed, the time for a batch of the squared batch gradient over the estimator's (larger is faster), medians.
eFIM (table): the squared gradient of a whole batch, the only "empirical FIM" that one backward for each batch can give.
eFIM (text): the sum of the samples' squared gradients, as the paper defines it.
paper: as printed there, for the paper's networks and data.  *: with --model or --data, perhaps other ones.
"""


@dataclass(frozen=True)
class TaskNumbers:
    """What a folder holds of a task."""

    task: PaperTask
    about: dict[str, Any]
    facts: dict[str, Any]
    columns: dict[str, dict[str, Any]]  # by key, those that are finished
    seconds: dict[str, float]  # for a batch, by key
    device: str

    def relmae(self, column: Column, group: str = "all") -> float | None:
        """The error of a column for a group of parameters; None where it was not measured."""
        errors = self.columns.get(column.key, {}).get("errors", {}).get(group)
        return None if errors is None else errors["relmae"]

    def speed(self, column: Column) -> float | None:
        """The speed of a column relative to the paper's empirical FIM; None where it was not timed."""
        own = self.seconds.get(column.key)
        return self.seconds[BASELINE.key] / own if own else None

    @property
    def row(self) -> str:
        """The paper's name for the task, with a mark where model or data may be others than the paper's."""
        return self.task.row + (" *" if self.about["own"] else "")

    @property
    def groups(self) -> list[str]:
        """Groups of parameters: embeddings and the rest apart, where there are embeddings."""
        has = "embeddings" in self.columns[EXACT.key]["errors"]
        return [group for group in _GROUPS if group == "all" or has]

    @property
    def finished(self) -> list[Column]:
        """The table's columns, and those of the curve, as far as they are finished."""
        found = [EXACT, *COLUMNS, *curve(self.about["classes"])[1:]]
        return [column for column in found if column.key in self.columns]


def read_numbers(folder: Folder) -> list[TaskNumbers]:
    """The numbers of all tasks whose exact diagonal is finished, in the paper's order."""
    found = []
    for name, task in TASKS.items():
        about = folder.task(name)
        if about is None or folder.numbers(name, EXACT.key) is None:
            continue
        keys = [column.key for column in (EXACT, *COLUMNS, *curve(about["classes"]))]
        columns = {key: numbers for key in keys if (numbers := folder.numbers(name, key)) is not None}
        speed = folder.numbers(name, "speed") or {"seconds": {}, "device": ""}
        facts = folder.numbers(name, "facts") or {}
        found.append(TaskNumbers(task, about, facts, columns, speed["seconds"], speed["device"]))
    return found


def write_tables(folder: Folder) -> str:
    """Write table.txt, table.csv and table.tex; returns the text."""
    tasks = read_numbers(folder)
    text = as_text(tasks)
    for suffix, contents in (("txt", text), ("csv", as_csv(tasks)), ("tex", as_latex(tasks))):
        save_text(folder.path / f"table.{suffix}", contents)
    return text


def as_text(tasks: Sequence[TaskNumbers]) -> str:
    """The paper's layout first, then everything about each task."""
    parts = [_overview(tasks, "all")]
    if any("rest" in one.groups for one in tasks):
        parts.append(_overview([one for one in tasks if "rest" in one.groups], "rest"))
    return "\n".join([*parts, NOTES, *(_details(one) for one in tasks)])


def as_csv(tasks: Sequence[TaskNumbers]) -> str:
    """A line for each task, group of parameters and estimator."""
    out = io.StringIO()
    head = ["task", "group", "column", "estimator", "per", "target", "passes", *_QUANTITIES]
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow([*head, "seconds_per_batch", "speed", "paper_relmae", "paper_speed"])
    for one in tasks:
        for column in one.finished:
            numbers = one.columns[column.key]
            what = [numbers["estimator"], column.per, numbers["target"], numbers["passes"]]
            times = [one.seconds.get(column.key), one.speed(column), *one.task.printed.get(column.key, (None, None))]
            for group, errors in numbers["errors"].items():
                measured = [errors[quantity] for quantity in _QUANTITIES]
                writer.writerow([one.task.name, group, column.key, *what, *measured, *times])
    return out.getvalue()


def as_latex(tasks: Sequence[TaskNumbers]) -> str:
    """For `booktabs`; the least error of a row is bold, as in the paper, whose own rows stand below ours in grey."""
    heads = " & ".join(f"${column.latex}$" for column in COLUMNS)
    lines = [
        r"% needs \usepackage{amssymb, booktabs, xcolor}",
        rf"\begin{{tabular}}{{l{'r' * len(PAPER)}|{'r' * len(OURS)}}}",
        r"\toprule",
        rf"& \multicolumn{{{len(PAPER)}}}{{c}}{{the paper's}} & \multicolumn{{{len(OURS)}}}{{c}}{{per sample}} \\",
        rf"& {heads} \\",
        r"\midrule",
    ]
    for one in tasks:
        for group in one.groups[:2]:
            name = one.row if group == "all" else r"\quad but embeddings"
            lines.append(rf"{name} & {' & '.join(_latex_cells(one, group))} \\")
        printed = (one.task.printed.get(column.key) for column in COLUMNS)
        cells = (rf"\color{{gray}}{p.relmae:g}\,($\times{p.speed:.2f}$)" if p else "" for p in printed)
        lines.append(rf"\quad\color{{gray}}the paper & {' & '.join(cells)} \\")
    return "\n".join([*lines, r"\bottomrule", r"\end{tabular}", ""])


def _latex_cells(one: TaskNumbers, group: str) -> list[str]:
    errors = [one.relmae(column, group) for column in COLUMNS]
    least = min((_shown(error) for error in errors if error is not None), key=float)
    cells = []
    for column, error in zip(COLUMNS, errors, strict=True):
        text, speed = _shown(error), one.speed(column)
        bold = rf"\mathbf{{{text}}}" if text == least else text
        factor = rf"\,($\times{speed:.2f}$)" if speed is not None and group == "all" else ""
        cells.append("--" if error is None else f"${bold}${factor}")
    return cells


def _overview(tasks: Sequence[TaskNumbers], group: str) -> str:
    rows = [["", *(column.text for column in COLUMNS)], ["", *(f"per {column.per}" for column in COLUMNS)]]
    for one in tasks:
        pairs = [(_shown(one.relmae(column, group)), one.speed(column)) for column in COLUMNS]
        rows.append([one.row, *(e if e == "-" or speed is None else f"{e} ×{speed:.2f}" for e, speed in pairs)])
        if group == "all":
            printed = [one.task.printed.get(column.key) for column in COLUMNS]
            rows.append(["  paper", *(f"{p.relmae:g} ×{p.speed:.2f}" if p else "" for p in printed)])
    return "\n".join([f"RelMAE, {_GROUPS[group]}", *aligned(rows), ""])


def _details(one: TaskNumbers) -> str:
    a, confidence, accuracy = one.about, one.facts.get("mean_largest_probability"), one.facts.get("accuracy")
    said = [f"{a['parameters']:,} parameters", f"C = {a['classes']}", f"{a['samples']:,} samples"]
    said += [f"mean largest probability {confidence:.3f}"] if confidence is not None else []
    said += [f"accuracy {accuracy:.3f}"] if accuracy is not None else []
    said += [f"times on {one.device}"] if one.device else []
    lines = [f"{'In place of ' if a['own'] else ''}{one.task.title}: {a['model']}; {a['data']}", "; ".join(said)]
    if coarse := one.columns.get(OURS[-1].key, {}).get("without_rule", []):
        lines.append(f"squared per batch in every row, since no per-sample rule applies: {listed(coarse, 2)}")
    header = ["estimator", "per", "passes", *(_HEADS[group] for group in one.groups)]
    header += ["MAE", "rank corr.", "s/batch", "speed"]
    return "\n".join([*lines, text_table(header, [_row(one, column) for column in one.finished], left=2), ""])


def _row(one: TaskNumbers, column: Column) -> list[str]:
    numbers, seconds, speed = one.columns[column.key], one.seconds.get(column.key), one.speed(column)
    errors, rank = numbers["errors"], numbers["errors"]["all"]["rank_correlation"]
    measured = [*(errors[group]["relmae"] for group in one.groups), errors["all"]["mae"]]
    return [
        numbers["estimator"],
        column.per,
        f"{numbers['passes']:g}",
        *("" if x is None else f"{x:.3g}" for x in measured),
        "-" if rank is None else f"{rank:.4f}",
        "" if seconds is None else f"{seconds:.3g}",
        "" if speed is None else f"×{speed:.2f}",
    ]


def _shown(error: float | None) -> str:
    """An error as the paper prints it; below a hundred-thousandth only rounding is left."""
    if error is None:
        return "-"
    return "0" if error < 1e-5 else f"{error:.2g}" if error < 1 else f"{error:.3g}" if error < 1000 else f"{error:.0f}"
