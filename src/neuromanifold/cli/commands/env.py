"""`neuromanifold env`: versions and devices, for a bug report."""

from __future__ import annotations

import os
import platform
from importlib.metadata import PackageNotFoundError, version

import torch
import typer

from neuromanifold.results.table import aligned

_PACKAGES = {  # and what each is needed for
    "neuromanifold": "",
    "torch": "",
    "numpy": "",
    "safetensors": "",
    "triton": "GPU kernels",
    "scipy": "resampling of audio",
    "typer": "command line",
    "rich": "command line",
    "matplotlib": "plots",
    "transformers": "models",
    "datasets": "data",
    "pyarrow": "Parquet",
    "pillow": "images",
    "soundfile": "audio",
    "peft": "adapters",
}
_VARIABLES = (
    "CUDA_VISIBLE_DEVICES",
    "OMP_NUM_THREADS",
    "NEUROMANIFOLD_KERNELS",
    "HF_HOME",
    "HF_HUB_OFFLINE",
    "HF_ENDPOINT",
)


def env_command() -> None:
    """Print versions and devices, for a bug report."""
    rows = [("Python", platform.python_version(), platform.platform())]
    rows += [(package, _version(package), purpose) for package, purpose in _PACKAGES.items()]
    rows.append(("cpu", f"{torch.get_num_threads()} threads of {os.cpu_count()}", platform.machine()))
    for i in range(torch.cuda.device_count()):
        device = torch.cuda.get_device_properties(i)
        rows.append((f"cuda:{i}", device.name, f"{device.total_memory / 2**30:.0f} GiB"))
    if torch.backends.mps.is_available():
        rows.append(("mps", "Apple GPU", ""))
    rows += [(name, os.environ[name], "") for name in _VARIABLES if name in os.environ]
    typer.echo("\n".join(aligned(rows, left=3)))


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "–"
