import gc
import os
import signal

os.environ.setdefault("TRITON_INTERPRET", "1")  # before Triton is imported: its kernels run on the CPU
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # before its library is imported: tests have files of their own

import torch
from hypothesis import HealthCheck, settings

# Property tests are drawn anew in `make test-all` (HYPOTHESIS_PROFILE=explore) and repeatable in `make test`.
settings.register_profile(
    "repeatable", derandomize=True, deadline=None, max_examples=100, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile(
    "explore", deadline=None, max_examples=1000, suppress_health_check=[HealthCheck.too_slow], print_blob=True
)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "repeatable"))
torch.set_num_threads(1)  # tensors are small; threads would only wait for each other on a busy machine
os.fsync = lambda _: None  # no test cuts the power: none needs to wait for the disk
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # as for a job in the background, where Ctrl-C is nobody's
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_finish() -> None:
    """Leave modules and collected tests out of garbage collection from here on: they stay, and are many."""
    gc.freeze()


def pytest_sessionfinish() -> None:
    gc.unfreeze()
