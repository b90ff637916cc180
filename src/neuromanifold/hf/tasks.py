"""What a model does, hence what its data look like; found from the architecture that its config names."""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple

from neuromanifold.core.checks import message
from neuromanifold.hf.errors import LoadError


class Task(StrEnum):
    """Kinds of models."""

    TEXT = "text"  # a class for each text or pair of texts
    TOKENS = "tokens"  # a class for each word
    IMAGE = "image"
    AUDIO = "audio"
    CAUSAL = "causal"  # the next token, at every position
    MASKED = "masked"  # the tokens that were masked

    @property
    def classifies(self) -> bool:
        """Whether there are classes, rather than a vocabulary."""
        return self not in (Task.CAUSAL, Task.MASKED)


class _Known(NamedTuple):
    auto: str  # the class of transformers that loads it
    names: str  # its table of architectures


KNOWN = {
    Task.TEXT: _Known("AutoModelForSequenceClassification", "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES"),
    Task.TOKENS: _Known("AutoModelForTokenClassification", "MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES"),
    Task.IMAGE: _Known("AutoModelForImageClassification", "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES"),
    Task.AUDIO: _Known("AutoModelForAudioClassification", "MODEL_FOR_AUDIO_CLASSIFICATION_MAPPING_NAMES"),
    Task.CAUSAL: _Known("AutoModelForCausalLM", "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES"),
    Task.MASKED: _Known("AutoModelForMaskedLM", "MODEL_FOR_MASKED_LM_MAPPING_NAMES"),
}


def as_task(name: str | None) -> Task | None:
    """A task by its name."""
    if name is None:
        return None
    try:
        return Task(name)
    except ValueError:
        raise LoadError(message("task", f"one of {', '.join(Task)}", repr(name))) from None


def task_of(architectures: list[str], source: str) -> Task:
    """The task that one of these architectures does."""
    from transformers.models.auto import modeling_auto

    for architecture in architectures:
        for task, known in KNOWN.items():
            for names in getattr(modeling_auto, known.names).values():
                if architecture in ((names,) if isinstance(names, str) else names):
                    return task
    shown = ", ".join(architectures) or "no architecture"
    advice = f"Say what it does with --task ({', '.join(Task)}); a missing classifier is made with --classes N."
    expected = "a classifier or a language model"
    raise LoadError(message("model", expected, f"{shown} in the config of {source}", advice))
