from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch

Folder = Callable[[str], Path]


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    """The folder of a tiny model, by its task; made once."""
    from tests.hf.tiny import MODELS

    @cache
    def make(task: str) -> Path:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return MODELS[task](tmp_path_factory.mktemp(task.replace(" ", "-")))

    return make
