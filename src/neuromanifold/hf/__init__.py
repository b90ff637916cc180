"""Models and data: Hugging Face models and data sets, local files and folders, or functions of one's own.

loaded = load_model("path/to/model")                       a module, its likelihood, and where its tokenizer is
data = load_data("reviews.csv", loaded, batch_size=32)     batches in a fixed order, collated when they are iterated
nm.fisher_diagonal(loaded.module, data, likelihood=loaded.likelihood)

transformers, datasets and peft are imported by the functions that need them, never with this package.
"""

from neuromanifold.hf.data import FunctionData, LoadedData, load_data
from neuromanifold.hf.errors import LabelError, LoadError
from neuromanifold.hf.models import LoadedModel, Task, check_model_source, load_model
from neuromanifold.hf.tables import check_data_source

__all__ = ["FunctionData", "LabelError", "LoadError", "LoadedData", "LoadedModel", "Task", "check_data_source",
           "check_model_source", "load_data", "load_model"]  # fmt: skip
