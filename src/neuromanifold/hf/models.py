"""Models: a folder or hub name in the format of transformers, with or without a PEFT adapter, or module:function."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from enum import StrEnum
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import nn

from neuromanifold.core import Bernoulli, Categorical, Gaussian
from neuromanifold.core.checks import integer_in_range, listed, message, random_seed
from neuromanifold.hf.errors import LoadError, hub_error, require, short
from neuromanifold.hf.functions import find_function, is_function_name
from neuromanifold.problem.cotangents import Likelihood

DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16, "float16": torch.float16}
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")
_PICKLE_ADVICE = "A pickle can run any code, so none is read. Convert it: model.save_pretrained(folder)."
_ADAPTER = "adapter_model.safetensors"


class Task(StrEnum):
    """What a model predicts, hence what its data look like."""

    TEXT = "text"  # a class for each text or pair of texts
    TOKENS = "tokens"  # a class for each word
    IMAGE = "image"
    AUDIO = "audio"
    CAUSAL = "causal"  # the next token at every position
    SEQ2SEQ = "seq2seq"  # the tokens of a target text, by an encoder-decoder model
    MASKED = "masked"  # the tokens that were masked

    @property
    def classifies(self) -> bool:
        """Whether the outputs are classes rather than a vocabulary."""
        return self not in (Task.CAUSAL, Task.SEQ2SEQ, Task.MASKED)


_AUTO = {  # the class of transformers that loads the task's models, and its table of architectures
    Task.TEXT: ("AutoModelForSequenceClassification", "SEQUENCE_CLASSIFICATION"),
    Task.TOKENS: ("AutoModelForTokenClassification", "TOKEN_CLASSIFICATION"),
    Task.IMAGE: ("AutoModelForImageClassification", "IMAGE_CLASSIFICATION"),
    Task.AUDIO: ("AutoModelForAudioClassification", "AUDIO_CLASSIFICATION"),
    Task.CAUSAL: ("AutoModelForCausalLM", "CAUSAL_LM"),
    Task.SEQ2SEQ: ("AutoModelForSeq2SeqLM", "SEQ_TO_SEQ_CAUSAL_LM"),
    Task.MASKED: ("AutoModelForMaskedLM", "MASKED_LM"),
}


@dataclass(frozen=True)
class LoadedModel:
    """A module in eval mode, and what is needed to collate its inputs."""

    module: nn.Module
    task: Task | None  # None: a module of one's own, whose data are its inputs
    processor: str | None  # folder or hub name of the tokenizer, image processor or feature extractor
    classes: int | None
    class_names: dict[str, int]  # empty where classes are only numbered
    likelihood: Likelihood
    about: str  # the model in one line, for provenance
    newly_initialized: tuple[str, ...] = ()  # parameters that the checkpoint lacks, initialized at random
    revision: str | None = None  # of the processor on the hub

    @property
    def config(self) -> Any:
        """The config of transformers; None for other modules."""
        return getattr(self.module, "config", None)


def load_model(
    source: str,
    task: str | None = None,
    *,
    adapter: str | None = None,
    classes: int | None = None,
    dtype: str | None = None,
    device: str = "auto",
    seed: int = 0,
    revision: str | None = None,
    processor: str | None = None,
) -> LoadedModel:
    """Load a model in eval mode, together with its likelihood and what `load_data` needs to collate its inputs.

    Args:
        source: a folder with `config.json` and `*.safetensors`, a name on the hub, or `package.module:function`, where
            the function takes no arguments and returns a module.
        task: text, tokens, image, audio, causal, seq2seq or masked; by default what the config's architecture does.
        adapter: a PEFT adapter, a folder or a name on the hub; only its parameters are then trainable.
        classes: initialize a classifier with this many classes, with `seed`, where the checkpoint has none.
        dtype: float32, float64, bfloat16 or float16; by default float32, or the dtype of the function's module.
        device: "auto" (a GPU if there is one), "cpu", "cuda", "cuda:1", "mps".
        seed: random seed of a new classifier.
        revision: branch, tag or commit on the hub.
        processor: folder or hub name of the tokenizer, image processor or feature extractor; by default `source`.

    Returns:
        The model and what belongs to it: `.module`, `.likelihood`, `.task`.

    Raises:
        LoadError: there is no such model, it has no task that is known, or its weights are incomplete.

    Example:
        >>> import tempfile
        >>> import transformers
        >>> folder = tempfile.mkdtemp()
        >>> sizes = {"image_size": 8, "patch_size": 4, "hidden_size": 8}
        >>> config = transformers.ViTConfig(**sizes, num_hidden_layers=1, num_attention_heads=1)
        >>> transformers.ViTForImageClassification(config).save_pretrained(folder)
        >>> loaded = nm.load_model(folder, device="cpu")  # or a name on the hub
        >>> type(loaded.module).__name__, loaded.task
        ('ViTForImageClassification', <Task.IMAGE: 'image'>)
    """
    if task is not None and task not in list(Task):
        raise LoadError(message("task", f"one of {', '.join(Task)}", repr(task)))
    wanted, target, source = None if task is None else Task(task), as_device(device), str(source)
    random_seed(seed)
    if dtype is not None and dtype not in DTYPES:
        raise LoadError(message("dtype", f"one of {', '.join(DTYPES)}", repr(dtype)))
    if classes is not None:
        integer_in_range(classes, "classes", 1, 10**7, "outputs of the classifier")
    if is_function_name(source):
        loaded = _model_from_function(source, wanted, classes, adapter)
    else:
        dtype = dtype or "float32"
        loaded = _from_pretrained(source, wanted, adapter, classes, DTYPES[dtype], seed, revision)
    module = loaded.module.to(target, None if dtype is None else DTYPES[dtype]).eval()
    found = {"processor": processor} if processor else {"processor": loaded.processor, "revision": revision}
    return replace(loaded, module=module, **found)


def as_device(name: str) -> torch.device:
    """Return the device, after allocating on it; "auto" is the first GPU, else the CPU."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        said = str(error).splitlines()[0]
        advice = "`neuromanifold env` lists the devices; auto takes a GPU if there is one."
        raise LoadError(message("device", "auto, cpu, cuda, cuda:N or mps", f"{name!r} ({said})", advice)) from None
    return device


def _task_of(architectures: list[str], source: str) -> Task:
    """Return the task of the first architecture that one of transformers' Auto classes loads."""
    tables = import_module("transformers.models.auto.modeling_auto")
    for architecture in architectures:
        for task, (_, name) in _AUTO.items():
            for names in getattr(tables, f"MODEL_FOR_{name}_MAPPING_NAMES").values():
                if architecture in ((names,) if isinstance(names, str) else names):
                    return task
    got = f"{', '.join(architectures) or 'no architecture'} in the config of {source}"
    advice = f"Name its task with --task ({', '.join(Task)}); --classes N initializes a missing classifier."
    raise LoadError(message("model", "a classifier or a language model", got, advice))


def _model_from_function(source: str, task: Task | None, classes: int | None, adapter: str | None) -> LoadedModel:
    if classes is not None or adapter is not None:
        option = "classes" if classes is not None else "adapter"
        raise LoadError(message(option, "left out for module:function", "both", "Let the function do it."))
    found = find_function(source, "model")
    module = found if isinstance(found, nn.Module) else found() if callable(found) else found
    if not isinstance(module, nn.Module):
        raise LoadError(message("model", "a function that returns a torch.nn.Module", type(module).__name__))
    config = getattr(module, "config", None)
    likelihood = Categorical if config is None else _likelihood(config, task)
    return LoadedModel(module, task, None, _classes(config, task), _class_names(config, task), likelihood, source)


def _from_pretrained(
    source: str,
    task: Task | None,
    adapter: str | None,
    classes: int | None,
    dtype: torch.dtype,
    seed: int,
    revision: str | None,
) -> LoadedModel:
    local = Path(source).expanduser()
    check_model_source(source)
    transformers = require("transformers", "hf", "A model by name or folder")
    where = str(local) if local.is_dir() else source
    if revision is not None and local.is_dir():
        raise LoadError(message("revision", "left out for a local folder", repr(revision)))
    with _quiet_transformers(local.is_dir()), _load_errors(source, local.is_dir()):
        config = transformers.AutoConfig.from_pretrained(where, revision=revision, trust_remote_code=False)
        task = _task_of(list(config.architectures or []), source) if task is None else task
        _prepare_config(config, task, classes)
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)  # of parameters that the checkpoint lacks
            module, info = getattr(transformers, _AUTO[task][0]).from_pretrained(
                where,
                config=config,
                revision=revision,
                dtype=dtype,
                use_safetensors=True,
                ignore_mismatched_sizes=classes is not None,
                output_loading_info=True,
                trust_remote_code=False,
            )
        # since transformers 5, mismatched keys come with both shapes
        mismatched = (entry if isinstance(entry, str) else entry[0] for entry in info["mismatched_keys"])
        new = sorted({*info["missing_keys"], *mismatched})
        in_adapter = _adapter_parameters(adapter) if adapter is not None else set()
        _check_initialized(source, module, [name for name in new if name not in in_adapter], task, classes)
        if adapter is not None:
            module = _with_adapter(module, adapter)
    about = source + (f"@{commit[:12]}" if (commit := getattr(config, "_commit_hash", None)) else "")
    about += (f" + {adapter}" if adapter else "") + (f", classifier initialized with seed {seed}" if new else "")
    names, likelihood = _class_names(config, task), _likelihood(config, task)
    return LoadedModel(module, task, where, _classes(config, task), names, likelihood, about, tuple(new))


def check_model_source(source: str) -> None:
    """Raise a LoadError for a local path that is no model, at the cost of listing a folder."""
    local = Path(source).expanduser()
    if local.is_file():
        pickle = local.suffix in _PICKLES
        advice = _PICKLE_ADVICE if pickle else "Give the folder that it lies in."
        got = f"a {'pickle' if pickle else 'file'}: {source}"
        raise LoadError(message("model", "a folder, a name on the hub or module:function", got, advice))
    if not local.is_dir():
        if source.startswith((".", "/", "~")) or source.count("/") > 1:
            raise LoadError(message("model", "a folder that exists", repr(source), f"There is no {local}."))
        return
    inside = sorted(path.name for path in local.iterdir())
    if "config.json" not in inside:
        got = f"{source} with {', '.join(inside[:6]) or 'nothing'}"
        advice = "model.save_pretrained(folder) writes such a folder; any other module goes by module:function."
        if "adapter_config.json" in inside:
            advice = (
                f"It is an adapter: name the model that it belongs to, and adapter={source!r} (--adapter {source})."
            )
        raise LoadError(message("model", "a folder with config.json and *.safetensors", got, advice))
    if not any(name.endswith(".safetensors") for name in inside):
        pickles = [name for name in inside if name.endswith(_PICKLES)]
        got = f"{source} with {pickles[0]}" if pickles else f"{source} without weights"
        expected = "a folder with weights in *.safetensors"
        raise LoadError(message("model", expected, got, _PICKLE_ADVICE if pickles else ""))


def _prepare_config(config: Any, task: Task, classes: int | None) -> None:
    if classes is not None and not task.classifies:
        raise LoadError(message("classes", f"left out for --task {task}", str(classes), "Outputs are the vocabulary."))
    if classes is not None and config.num_labels != classes:
        config.num_labels = classes
    if task is Task.TEXT and getattr(config, "pad_token_id", None) is None:  # decoders find the last token by it
        end = getattr(config, "eos_token_id", None)
        config.pad_token_id = end[0] if isinstance(end, list) else end


def _check_initialized(source: str, module: nn.Module, new: list[str], task: Task, classes: int | None) -> None:
    """Refuse parameters initialized at random, unless they are those of a classifier that was asked for."""
    if not new:
        return
    body = f"{getattr(module, 'base_model_prefix', '')}."
    if not task.classifies or any(name.startswith(body) and ".pooler." not in name for name in new):
        expected = f"a checkpoint with all weights of {type(module).__name__}"
        advice = "The weights are those of another architecture; look at config.json, or at --task."
        raise LoadError(message("model", expected, f"{source} without {listed(new, 3)}", advice))
    if classes is None:
        advice = "Take a fine-tuned model, or initialize a random classifier with --classes N (and --seed)."
        raise LoadError(message("model", "one with a trained classifier", f"{source} without {listed(new, 3)}", advice))


def _with_adapter(module: nn.Module, adapter: str) -> nn.Module:
    """Return the model with its PEFT adapter; only the adapter's parameters are trainable."""
    peft = require("peft", "peft", "An adapter")
    try:
        prompt = peft.PeftConfig.from_pretrained(adapter).is_prompt_learning  # these cannot be loaded to be trained
        adapted: nn.Module = peft.PeftModel.from_pretrained(module, adapter, is_trainable=not prompt)
        if prompt:
            for config in adapted.peft_config.values():  # type: ignore[operator]
                config.inference_mode = False  # in which the prompt would be a constant
            for parameter in adapted.prompt_encoder.parameters():  # type: ignore[union-attr]
                parameter.requires_grad_()
    except (ValueError, RuntimeError) as error:
        advice = "Is it made for this model? With a classifier of its own it needs --classes N as in its training."
        got = f"{adapter} ({short(error)})"
        raise LoadError(message("adapter", "an adapter that fits the model", got, advice)) from error
    return adapted


def _adapter_parameters(adapter: str) -> set[str]:
    """Return the names in the adapter's file, among them parameters of the model such as a trained classifier."""
    from safetensors import SafetensorError, safe_open

    path = Path(adapter).expanduser() / _ADAPTER
    if path.parent.is_dir() and not path.is_file():
        inside = ", ".join(sorted(file.name for file in path.parent.iterdir())[:6]) or "nothing"
        advice = "Pickles (.bin) are not read: save the adapter with safe_serialization=True."
        raise LoadError(message("adapter", f"a folder with {_ADAPTER}", f"{adapter} with {inside}", advice))
    if not path.is_file():
        hub = require("huggingface_hub", "hf", "An adapter on the hub")
        try:
            path = Path(hub.hf_hub_download(adapter, _ADAPTER))
        except (OSError, ValueError) as error:
            raise hub_error("adapter", adapter, error) from error
    try:
        with safe_open(path, framework="pt") as file:
            return {name.removeprefix("base_model.model.") for name in file.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise LoadError(f"`adapter`: the weights {path} are damaged ({error}). Copy or download them again.") from error


def _classes(config: Any, task: Task | None) -> int | None:
    if config is None or task is None:
        return None
    return int(config.num_labels) if task.classifies else int(config.get_text_config().vocab_size)


def _class_names(config: Any, task: Task | None) -> dict[str, int]:
    if config is None or task is None or not task.classifies:
        return {}
    by_number = {str(name): int(i) for i, name in (getattr(config, "id2label", None) or {}).items()}
    by_name = {str(name): int(i) for name, i in (getattr(config, "label2id", None) or {}).items()}
    for names in (by_number, by_name):  # one may be the default LABEL_0, ...; predictions are named by the first
        if not all(name == f"LABEL_{i}" for name, i in names.items()):
            return names
    return {}


def _likelihood(config: Any, task: Task | None) -> Likelihood:
    """Return the likelihood that the config's problem type implies."""
    if task is None or not task.classifies:
        return Categorical
    kind = getattr(config, "problem_type", None)
    if kind == "multi_label_classification":
        return Bernoulli
    return Gaussian if kind == "regression" or config.num_labels == 1 else Categorical


@contextmanager
def _quiet_transformers(local: bool) -> Iterator[None]:
    """Silence the log, which repeats what the errors say, and for local folders the progress bars."""
    logging: Any = import_module("transformers.utils.logging")
    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    if local:
        logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()


@contextmanager
def _load_errors(source: str, local: bool) -> Iterator[None]:
    """Raise the errors of transformers as LoadErrors."""
    from safetensors import SafetensorError

    try:
        yield
    except LoadError:
        raise
    except SafetensorError as error:
        advice = "Copy or download them again."
        raise LoadError(f"`model`: the weights of {source} are damaged ({error}). {advice}") from error
    except OSError as error:
        if not local:
            raise hub_error("model", source, error) from error
        raise LoadError(f"`model`: {source} cannot be read ({error}).") from error
    except (ValueError, RuntimeError, KeyError) as error:
        raise LoadError(f"`model`: {source} cannot be loaded ({short(error, 400)}).") from error
