"""Which column holds what, and labels as class indices of the model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from neuromanifold.core import Categorical
from neuromanifold.core.checks import message
from neuromanifold.hf.errors import LabelError, LoadError
from neuromanifold.hf.models import LoadedModel, Task
from neuromanifold.hf.tables import Table

USUAL = {  # names that are looked for, in this order, where none is given
    "text": ("text", "sentence", "sentence1", "premise", "content", "review"),
    "text_pair": ("text_pair", "sentence2", "hypothesis"),
    "prompt": ("prompt", "instruction", "question"),
    "completion": ("completion", "response", "output", "answer"),
    "target": ("target", "target_text", "summary", "highlights", "answer"),
    "words": ("words", "tokens"),
    "image": ("image", "img", "images"),
    "audio": ("audio", "speech", "file"),
    "label": ("label", "labels", "tags", "ner_tags", "class"),
}
ROLES: dict[Task | None, tuple[str, ...]] = {
    Task.TEXT: ("text", "text_pair", "label"),
    Task.TOKENS: ("words", "label"),
    Task.IMAGE: ("image", "label"),
    Task.AUDIO: ("audio", "label"),
    Task.CAUSAL: ("text", "prompt", "completion"),  # a text, or a prompt and its completion
    Task.MASKED: ("text",),
    Task.SEQ2SEQ: ("text", "target"),
    None: ("label",),
}


def parse_columns(text: str | Mapping[str, str] | None, task: Task | None) -> dict[str, str]:
    """Parse `role=column,role=column` and check that the task has these roles."""
    if text is None:
        return {}
    pairs = list(text.items()) if isinstance(text, Mapping) else [_pair(item) for item in text.split(",")]
    if len(dict(pairs)) < len(pairs):
        raise LoadError(message("columns", "pairs role=column, each role once", repr(text)))
    for role, _ in pairs:
        if role not in ROLES[task]:
            raise LoadError(
                message("columns", f"pairs role=column with roles among {', '.join(ROLES[task])}", repr(role))
            )
    return dict(pairs)


def _pair(item: str) -> tuple[str, str]:
    role, _, column = item.partition("=")
    if not column.strip():
        raise LoadError(message("columns", "pairs such as text=sentence,label=class", repr(item)))
    return role.strip(), column.strip()


def find_column(table: Table, role: str, given: Mapping[str, str], required: bool = True) -> str | None:
    """Return the column for a role: the given one, or one with a usual name; None if there is none."""
    listed = f"(columns: {', '.join(table.columns)})"
    if role in given:
        if given[role] in table.columns:
            return given[role]
        raise LoadError(
            f"No column {given[role]!r} found in {table.name} {listed}. Give another: --columns {role}=NAME."
        )
    free = [name for name in table.columns if name not in given.values()]
    found = next((name for name in USUAL[role] if name in free), None)
    if found is None and required:
        others = {name for names in USUAL.values() for name in names}
        example = next((name for name in free if name not in others), "NAME")
        raise LoadError(f"No {role} column found in {table.name} {listed}. Name it with --columns {role}={example}.")
    return found


def find_columns(table: Table, task: Task | None, given: Mapping[str, str], labels: bool | None) -> dict[str, str]:
    """Return the column of each role that the task has; labels are needed (True), unwanted (False), or optional."""
    required = {"text_pair": False, "label": labels is True}
    roles = [role for role in ROLES[task] if role != "label" or labels is not False]
    roles = causal_roles(table, given) if task is Task.CAUSAL else roles
    found = {role: find_column(table, role, given, required.get(role, True)) for role in roles}
    return {role: column for role, column in found.items() if column is not None}


def causal_roles(table: Table, given: Mapping[str, str]) -> list[str]:
    """A prompt and its completion if there are both or they are named, else a text."""
    pair = ["prompt", "completion"]
    if "text" in given and any(role in given for role in pair):
        raise LoadError(message("columns", "text, or prompt and completion", ", ".join(given)))
    found = [role for role in pair if find_column(table, role, given, required=False)]
    return pair if any(role in given for role in pair) or (found == pair and "text" not in given) else ["text"]


class LabelReader:
    """Converts labels to class indices; names are looked up in the model's config first, then in the data set."""

    def __init__(self, model: LoadedModel, names: list[str] | None = None) -> None:
        self.classes, self.targets = model.classes, model.likelihood is not Categorical
        self.exact = {name.strip(): i for name, i in model.class_names.items()}  # "A" and "a" may be two classes
        self.indices = {name.casefold(): i for name, i in model.class_names.items()}
        self.names = names or []
        self.translated = bool(names) and all(name.casefold() in self.indices for name in self.names)
        if not self.indices and self.classes in (None, len(self.names)):
            self.indices = {name.casefold(): i for i, name in enumerate(self.names)}

    def tensor(self, values: list[Any], rows: list[int]) -> Tensor:
        """Return a class index for each row [B], or float targets [B] or [B, C] for other likelihoods."""
        if not self.targets:
            return torch.tensor([self.index(value, row) for value, row in zip(values, rows, strict=True)])
        try:
            nested = (list, tuple, np.ndarray)
            return torch.tensor([[float(entry) for entry in value] if isinstance(value, nested) else float(value)
                                 for value in values])  # fmt: skip
        except (TypeError, ValueError) as error:
            raise LabelError(message("labels", "numbers, or lists of them", f"{values[:3]} ({error})")) from error

    def index(self, value: Any, row: int) -> int:
        """Return the class index of one label."""
        number = self._number(value)
        if number is None:
            known = f" or one of {', '.join(list(self.indices)[:8])}" if self.indices else ""
            advice = "Name the right column: --columns label=NAME."
            if self.names and not self.indices:
                advice = (f"The data name {len(self.names)} classes and the model has {self.classes}: name them 0, 1, "
                          "... by the model's classes, or add label2id to its config.")  # fmt: skip
            raise LabelError(message("labels", f"class indices{known}", f"{value!r} in row {row}", advice))
        if self.classes is not None and not 0 <= number < self.classes:
            expected = f"between 0 and {self.classes - 1}, as the model has {self.classes} classes"
            advice = "Only empirical estimates use labels; elsewhere leave them out with --no-labels."
            raise LabelError(message("labels", expected, f"{number} in row {row}", advice))
        return number

    def _number(self, value: Any) -> int | None:
        text = str(value).strip()
        if isinstance(value, str) and (text in self.exact or text.casefold() in self.indices):
            return self.exact[text] if text in self.exact else self.indices[text.casefold()]
        try:
            value = float(value)  # "1.0" and True as well
        except (TypeError, ValueError):
            return None
        if not value.is_integer():
            return None
        number = int(value)
        if self.translated and 0 <= number < len(self.names):
            return self.indices[self.names[number].casefold()]  # data set and model may order their classes differently
        return number
