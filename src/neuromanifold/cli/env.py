"""`neuromanifold env`: versions and devices, for a report of a problem."""

from __future__ import annotations

import os
import platform
from importlib.metadata import PackageNotFoundError, version

import torch
from rich.table import Table

from neuromanifold.cli.output import output_console

PACKAGES = {  # what each is for
    "neuromanifold": "",
    "torch": "",
    "numpy": "",
    "safetensors": "",
    "triton": "kernels on a GPU",
    "scipy": "sound at other rates",
    "typer": "command line",
    "rich": "command line",
    "matplotlib": "pictures",
    "transformers": "models by name or folder",
    "datasets": "data sets of the hub",
    "pyarrow": "Parquet",
    "pillow": "images",
    "soundfile": "sound",
    "peft": "adapters",
}
VARIABLES = (
    "CUDA_VISIBLE_DEVICES",
    "OMP_NUM_THREADS",
    "NEUROMANIFOLD_KERNELS",
    "HF_HOME",
    "HF_HUB_OFFLINE",
    "HF_ENDPOINT",
)


def env() -> None:
    """Show versions and devices: put this into a report of a problem."""
    table = Table("what", "found", "for", title="Environment")
    table.add_row("Python", platform.python_version(), platform.platform())
    for package, purpose in PACKAGES.items():
        table.add_row(package, _version(package), purpose)
    table.add_section()
    table.add_row("cpu", f"{torch.get_num_threads()} threads of {os.cpu_count()}", platform.machine())
    for i in range(torch.cuda.device_count()):
        about = torch.cuda.get_device_properties(i)
        table.add_row(f"cuda:{i}", about.name, f"{about.total_memory / 2**30:.0f} GiB")
    if torch.backends.mps.is_available():
        table.add_row("mps", "Apple's GPU", "")
    table.add_section()
    for name in VARIABLES:
        if name in os.environ:
            table.add_row(name, os.environ[name], "")
    output_console().print(table)


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "-"
