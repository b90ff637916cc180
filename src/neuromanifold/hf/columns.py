"""Which column holds what, and labels as the model counts them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from neuromanifold.core import Categorical
from neuromanifold.core.checks import message
from neuromanifold.hf.errors import LoadError
from neuromanifold.hf.models import LoadedModel
from neuromanifold.hf.tables import Table
from neuromanifold.hf.tasks import Task

USUAL = {  # names that are looked for, in this order, where none is given
    "text": ("text", "sentence", "sentence1", "premise", "content", "review"),
    "text_pair": ("text_pair", "sentence2", "hypothesis"),
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
    Task.CAUSAL: ("text",),
    Task.MASKED: ("text",),
    None: ("label",),
}


def parse_columns(text: str | Mapping[str, str] | None, task: Task | None) -> dict[str, str]:
    """`role=column,role=column` as a mapping."""
    if text is None:
        return {}
    items = list(text.items()) if isinstance(text, Mapping) else [_pair(item) for item in text.split(",")]
    pairs = dict(items)
    if len(pairs) < len(items):
        raise LoadError(message("columns", "with each role once", repr(text)))
    for role in pairs:
        if role not in ROLES[task]:
            expected = f"role=column with roles among {', '.join(ROLES[task])}"
            raise LoadError(message("columns", expected, repr(role)))
    return pairs


def _pair(item: str) -> tuple[str, str]:
    role, equals, column = item.partition("=")
    if not equals or not column.strip():
        raise LoadError(message("columns", "such as text=sentence,label=class", repr(item)))
    return role.strip(), column.strip()


def find_column(table: Table, role: str, given: Mapping[str, str], required: bool = True) -> str | None:
    """The column for a role: the given one, or one with a usual name."""
    if role in given:
        if given[role] in table.names:
            return given[role]
        advice = f"Give another: --columns {role}=NAME."
        expected = f"names of columns ({', '.join(table.names)})"
        raise LoadError(message("columns", expected, f"{role}={given[role]}", advice))
    free = [name for name in table.names if name not in given.values()]
    found = next((name for name in USUAL[role] if name in free), None)
    if found is None and required:
        expected = f"with a column for the {role} ({', '.join(USUAL[role])})"
        raise LoadError(message("data", expected, ", ".join(table.names), f"Name it: --columns {role}=NAME."))
    return found


def needed(table: Table, role: str, given: Mapping[str, str]) -> str:
    """The column for a role that has to be there."""
    column = find_column(table, role, given)
    assert column is not None
    return column


def label_column(table: Table, given: Mapping[str, str], labels: bool | None) -> str | None:
    """The column of labels; `labels` says whether they are needed (True), unwanted (False), or taken if there."""
    return None if labels is False else find_column(table, "label", given, required=labels is True)


class LabelReader:
    """Labels as numbers of the model's classes; names are looked up, in the model's config first."""

    def __init__(self, model: LoadedModel, names: list[str] | None = None) -> None:
        self.classes, self.number = model.classes, model.likelihood is not Categorical
        self.exact = {name.strip(): i for name, i in model.class_names.items()}  # "A" and "a" may be two classes
        self.ids = {name.casefold(): i for name, i in model.class_names.items()}
        self.names = names if names and all(name.casefold() in self.ids for name in names) else None
        if not self.ids and names:
            self.ids = {name.casefold(): i for i, name in enumerate(names)}

    def tensor(self, values: list[Any], rows: list[int]) -> Tensor:
        """A label for each row: a class, or targets where the likelihood is not categorical."""
        if self.number:
            try:
                return torch.tensor([self._target(value) for value in values], dtype=torch.float32)
            except (TypeError, ValueError) as error:
                raise LoadError(message("labels", "numbers, or lists of them", f"{values[:3]} ({error})")) from error
        return torch.tensor([self.one(value, row) for value, row in zip(values, rows, strict=True)])

    def one(self, value: Any, row: int) -> int:
        """One class."""
        number = self._number(value)
        if number is None:
            known = f" or one of {', '.join(list(self.ids)[:8])}" if self.ids else ""
            advice = "Name the right column: --columns label=NAME."
            raise LoadError(message("labels", f"numbers of classes{known}", f"{value!r} in row {row}", advice))
        if self.classes is not None and not 0 <= number < self.classes:
            expected = f"between 0 and {self.classes - 1}, as the model has {self.classes} classes"
            advice = "Only empirical estimates use labels; elsewhere leave them out with --no-labels."
            raise LoadError(message("labels", expected, f"{number} in row {row}", advice))
        return number

    def _number(self, value: Any) -> int | None:
        text = str(value).strip()
        if isinstance(value, str) and (text in self.exact or text.casefold() in self.ids):
            return self.exact[text] if text in self.exact else self.ids[text.casefold()]
        try:
            value = float(value)  # "1.0" and True as well
        except (TypeError, ValueError):
            return None
        if not value.is_integer():
            return None
        number = int(value)
        if self.names is not None and 0 <= number < len(self.names):
            return self.ids[self.names[number].casefold()]  # data and model may count their classes differently
        return number

    def _target(self, value: Any) -> Any:
        return [float(entry) for entry in value] if isinstance(value, (list, tuple)) else float(value)
