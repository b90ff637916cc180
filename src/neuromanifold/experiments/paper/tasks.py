"""The six tasks of the paper's section "Numerical Simulations", and the rows that its table prints for them.

The paper names networks and data sets, not files: the names on the hub are ours, the ones in common use.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from neuromanifold.core.checks import message
from neuromanifold.hf import Task

_PRINTED = ("squared_batch_gradient", *(f"{name}_per_batch" for name in ("hutchinson", "upper", "lower", "lower2")))
_COMMANDS = ("yes", "no", "up", "down", "left", "right", "on", "off", "stop", "go", "_silence_", "_unknown_")


class Printed(NamedTuple):
    """A cell of the paper's table."""

    relmae: float
    speed: float  # over that of its empirical FIM; larger is faster


@dataclass(frozen=True)
class PaperTask:
    """A network, its data, and what the paper found."""

    name: str
    row: str  # its name in the paper's table
    title: str
    kind: Task
    classes: int
    fine_tuned: bool  # else a classifier is initialized
    model: str  # on the hub
    data: str  # on the hub
    printed: Mapping[str, Printed]  # by column
    subset: str | None = None
    columns: Mapping[str, str] = field(default_factory=dict)  # of the hub's data, where their names are unusual
    class_names: Mapping[str, int] = field(default_factory=dict)  # of the hub's model, where its config has none
    longest: int | None = None  # tokens or audio samples; what is longer is cut


def _printed(*cells: tuple[float, float]) -> dict[str, Printed]:
    return {column: Printed(*cell) for column, cell in zip(_PRINTED, cells, strict=True)}


TASKS = {
    task.name: task
    for task in (
        PaperTask(
            "sst2", "SST-2", "DistilBERT on SST-2", Task.TEXT, 2, True,
            "distilbert/distilbert-base-uncased-finetuned-sst-2-english", "nyu-mll/glue",
            _printed((1.15, 1.0), (0.18, 1.07), (341, 1.07), (0.05, 0.96), (0.05, 1.0)),
            subset="sst2", columns={"text": "sentence"}, longest=128,
        ),
        PaperTask(
            "dbpedia", "DBpedia", "DistilBERT on DBpedia", Task.TEXT, 14, False,
            "distilbert/distilbert-base-uncased", "fancyzhx/dbpedia_14",
            _printed((0.59, 1.0), (0.22, 1.0), (0.25, 1.0), (0.8, 0.93), (0.72, 0.93)),
            columns={"text": "content"}, longest=128,
        ),
        PaperTask(
            "mnli", "MNLI", "RoBERTa-base on MNLI", Task.TEXT, 3, True,
            "textattack/roberta-base-MNLI", "nyu-mll/glue",
            _printed((53.9, 1.0), (0.16, 1.0), (8.36, 0.97), (0.11, 0.96), (0.12, 0.95)),
            subset="mnli", columns={"text": "premise", "text_pair": "hypothesis"}, longest=128,
            class_names={"contradiction": 0, "entailment": 1, "neutral": 2},  # not the data's order: TextAttack#684
        ),
        PaperTask(
            "resnet50", "CIFAR-100 (R)", "ResNet-50 on CIFAR-100", Task.IMAGE, 100, False,
            "microsoft/resnet-50", "uoft-cs/cifar100",
            _printed((0.17, 1.0), (0.11, 0.99), (0.11, 1.01), (0.97, 0.97), (0.95, 0.46)),
            columns={"image": "img", "label": "fine_label"},
        ),
        PaperTask(
            "efficientnet", "CIFAR-100 (E)", "EfficientNet-B0 on CIFAR-100", Task.IMAGE, 100, False,
            "google/efficientnet-b0", "uoft-cs/cifar100",
            _printed((0.17, 1.0), (0.11, 1.0), (0.12, 1.0), (0.98, 0.98), (0.96, 0.50)),
            columns={"image": "img", "label": "fine_label"},
        ),
        PaperTask(
            "speech", "SpeechCommands", "Wav2Vec2-base on SpeechCommands", Task.AUDIO, 12, False,
            "facebook/wav2vec2-base", "s3prl/superb",
            _printed((56.8, 1.0), (0.17, 0.97), (7.4, 0.97), (0.39, 0.89), (0.22, 0.91)),
            subset="ks", class_names={name: i for i, name in enumerate(_COMMANDS)}, longest=16000,
        ),
    )
}  # fmt: skip


def find_tasks(names: list[str]) -> list[PaperTask]:
    """Tasks by name, in the paper's order; without names all of them."""
    unknown = [name for name in names if name not in TASKS]
    if unknown:
        raise ValueError(message("task", f"one of {', '.join(TASKS)}", repr(unknown[0])))
    return [task for name, task in TASKS.items() if not names or name in names]
