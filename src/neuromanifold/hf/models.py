"""Models: a folder or a hub's name in the format of transformers, or module:function."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import nn

from neuromanifold.core import Bernoulli, Categorical, Gaussian
from neuromanifold.core.checks import integer_in_range, message
from neuromanifold.hf.adapters import adapter_names, with_adapter
from neuromanifold.hf.errors import LoadError, hub_error, require
from neuromanifold.hf.functions import find_function, is_function_name
from neuromanifold.hf.tasks import KNOWN, Task, as_task, task_of
from neuromanifold.run.fisher import Likelihood

DTYPES = {
    "float32": torch.float32,
    "float64": torch.float64,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")
_PICKLE_ADVICE = "A pickle can run any code, so none is read. Convert it: model.save_pretrained(folder)."


@dataclass(frozen=True)
class LoadedModel:
    """A module in eval mode, and what has to be known to make its inputs."""

    module: nn.Module
    task: Task | None  # None: a module of one's own, whose data are its inputs as they are
    processor: str | None  # where the tokenizer, image processor or feature extractor is
    classes: int | None
    class_names: dict[str, int]  # empty where they are only numbers
    likelihood: Likelihood
    about: str  # which model, in a line
    fresh: tuple[str, ...] = ()  # parameters that were drawn at random, since the files have none

    @property
    def config(self) -> Any:
        """The config of transformers; None for other modules."""
        return getattr(self.module, "config", None)


def load_model(
    source: str,
    task: str | None = None,
    adapter: str | None = None,
    classes: int | None = None,
    dtype: str | None = None,
    device: str = "auto",
    seed: int = 0,
    revision: str | None = None,
    processor: str | None = None,
) -> LoadedModel:
    """Load a model for its Fisher information.

    Args:
        source: a folder with config.json and *.safetensors, a name on the hub, or `package.module:function`, where the
            function takes no arguments and returns a module.
        task: what the model does (see `Task`); by default what its config says.
        adapter: a PEFT adapter, a folder or a name on the hub; its parameters are then the trainable ones.
        classes: for a checkpoint without a trained classifier of so many classes: make one, drawn with `seed`.
        dtype: float32, float64, bfloat16 or float16; by default float32, or what the function's module has.
        device: "auto" (a GPU if there is one), "cpu", "cuda", "cuda:1", "mps".
        seed: of a classifier that has to be drawn.
        revision: branch, tag or commit on the hub.
        processor: where the tokenizer, image processor or feature extractor is; by default beside the model.

    """
    wanted, target = as_task(task), as_device(device)
    integer_in_range(seed, "seed", 0, 2**63 - 1, "a seed")
    if dtype is not None and dtype not in DTYPES:
        raise LoadError(message("dtype", f"one of {', '.join(DTYPES)}", repr(dtype)))
    if classes is not None:
        integer_in_range(classes, "classes", 1, 10**7, "outputs of the classifier")
    if is_function_name(source):
        loaded = _own(source, wanted, classes, adapter)
    else:
        dtype = dtype or "float32"
        loaded = _pretrained(source, wanted, adapter, classes, DTYPES[dtype], seed, revision)
    module = loaded.module.to(target, None if dtype is None else DTYPES[dtype]).eval()
    return replace(loaded, module=module, processor=processor or loaded.processor)


def as_device(name: str) -> torch.device:
    """A device that is there."""
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


def _own(source: str, task: Task | None, classes: int | None, adapter: str | None) -> LoadedModel:
    """A module that the user's function returns."""
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


def _pretrained(
    source: str,
    task: Task | None,
    adapter: str | None,
    classes: int | None,
    dtype: torch.dtype,
    seed: int,
    revision: str | None,
) -> LoadedModel:
    local = Path(source).expanduser()
    _check_files(source, local)
    transformers = require("transformers", "hf", "A model by name or folder")
    where = str(local) if local.is_dir() else source
    if revision is not None and local.is_dir():
        raise LoadError(message("revision", "left out for a local folder", repr(revision)))
    with _quiet(local.is_dir()), _errors(source, local.is_dir()):
        config = transformers.AutoConfig.from_pretrained(where, revision=revision, trust_remote_code=False)
        task = task_of(list(config.architectures or []), source) if task is None else task
        _prepare(config, task, classes)
        auto = getattr(transformers, KNOWN[task].auto)
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)  # what the checkpoint lacks is drawn from this
            module, info = auto.from_pretrained(
                where,
                config=config,
                revision=revision,
                dtype=dtype,
                use_safetensors=True,
                ignore_mismatched_sizes=classes is not None,
                output_loading_info=True,
                trust_remote_code=False,
            )
        fresh = sorted({*info["missing_keys"], *(name for name, *_ in info["mismatched_keys"])})
        held = adapter_names(adapter) if adapter is not None and fresh else set()
        _check_fresh(source, module, [name for name in fresh if name not in held], task, classes)
        if adapter is not None:
            module = with_adapter(module, adapter)
    about = source + (f"@{commit[:12]}" if (commit := getattr(config, "_commit_hash", None)) else "")
    about += (f" + {adapter}" if adapter else "") + (f", classifier drawn with seed {seed}" if fresh else "")
    names = _class_names(config, task)
    return LoadedModel(
        module, task, where, _classes(config, task), names, _likelihood(config, task), about, tuple(fresh)
    )


def _check_files(source: str, local: Path) -> None:
    """What can be said of a local path before anything is loaded."""
    if local.is_file():
        kind = "a pickle" if local.suffix in _PICKLES else "a file"
        advice = _PICKLE_ADVICE if kind == "a pickle" else "Give the folder that it lies in."
        raise LoadError(message("model", "a folder, a name on the hub or module:function", f"{kind}: {source}", advice))
    if not local.is_dir():
        if source.startswith((".", "/", "~")) or source.count("/") > 1:
            raise LoadError(message("model", "a folder that exists", repr(source), f"There is no {local}."))
        return
    inside = sorted(path.name for path in local.iterdir())
    if "config.json" not in inside:
        got = f"{source} with {', '.join(inside[:6]) or 'nothing'}"
        advice = "model.save_pretrained(folder) writes such a folder; any other module goes by module:function."
        raise LoadError(message("model", "a folder with config.json and *.safetensors", got, advice))
    if not any(name.endswith(".safetensors") for name in inside):
        pickles = [name for name in inside if name.endswith(_PICKLES)]
        got = f"{source} with {pickles[0]}" if pickles else f"{source} without weights"
        advice = _PICKLE_ADVICE if pickles else ""
        raise LoadError(message("model", "a folder with weights in *.safetensors", got, advice))


def _prepare(config: Any, task: Task, classes: int | None) -> None:
    if classes is not None and not task.classifies:
        raise LoadError(message("classes", f"left out for --task {task}", str(classes), "Outputs are the vocabulary."))
    if classes is not None and config.num_labels != classes:
        config.num_labels = classes
    if task is Task.TEXT and getattr(config, "pad_token_id", None) is None:  # decoders look for the last token by it
        end = getattr(config, "eos_token_id", None)
        config.pad_token_id = end[0] if isinstance(end, list) else end


def _check_fresh(source: str, module: nn.Module, fresh: list[str], task: Task, classes: int | None) -> None:
    """Only a classifier may be drawn at random, and only if that was asked for."""
    if not fresh:
        return
    body = f"{getattr(module, 'base_model_prefix', '')}."
    lacking = [name for name in fresh if name.startswith(body) and ".pooler." not in name]
    shown = ", ".join(fresh[:3]) + (f" and {len(fresh) - 3} more" if len(fresh) > 3 else "")
    if lacking or not task.classifies:
        advice = "The weights are those of another architecture; look at config.json, or at --task."
        raise LoadError(message("model", f"a checkpoint with all weights of {type(module).__name__}",
                                f"{source} without {shown}", advice))  # fmt: skip
    if classes is None:
        advice = "Take a fine-tuned model, or ask for a random classifier with --classes N (drawn with --seed)."
        raise LoadError(message("model", "one with a trained classifier", f"{source} without {shown}", advice))


def _classes(config: Any, task: Task | None) -> int | None:
    if config is None or task is None:
        return None
    return int(config.num_labels) if task.classifies else int(config.get_text_config().vocab_size)


def _class_names(config: Any, task: Task | None) -> dict[str, int]:
    if config is None or task is None or not task.classifies:
        return {}
    by_number = {str(name): int(i) for i, name in (getattr(config, "id2label", None) or {}).items()}
    by_name = {str(name): int(i) for name, i in (getattr(config, "label2id", None) or {}).items()}
    for names in (by_number, by_name):  # one may be left as transformers makes it; predictions go by the first
        if not all(name == f"LABEL_{i}" for name, i in names.items()):
            return names
    return {}


def _likelihood(config: Any, task: Task | None) -> Likelihood:
    """What the outputs mean: transformers calls it the problem type."""
    if task is None or not task.classifies:
        return Categorical
    kind = getattr(config, "problem_type", None)
    if kind == "multi_label_classification":
        return Bernoulli
    return Gaussian if kind == "regression" or config.num_labels == 1 else Categorical


@contextmanager
def _quiet(local: bool) -> Iterator[None]:
    """No report of what is said here in other words; a bar only for downloads."""
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
def _errors(source: str, local: bool) -> Iterator[None]:
    """Errors of transformers in our words."""
    from safetensors import SafetensorError

    try:
        yield
    except LoadError:
        raise
    except SafetensorError as error:
        raise LoadError(
            f"`model`: the weights of {source} are damaged ({error}). Copy or download them again."
        ) from error
    except OSError as error:
        if not local:
            raise hub_error("model", source, error) from error
        raise LoadError(f"`model`: {source} cannot be read ({error}).") from error
    except (ValueError, RuntimeError, KeyError) as error:
        raise LoadError(f"`model`: {source} cannot be loaded ({' '.join(str(error).split())[:400]}).") from error
