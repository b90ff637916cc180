"""From names to objects: a model and batches of data, from local files, a hub, or a function of one's own.

loaded = load_model("path/to/model")                       a module, what its outputs mean, where its tokenizer is
data = load_data("reviews.csv", loaded, batch_size=32)     batches in a fixed order, made when they are asked for
nm.fisher_diagonal(loaded.module, data, likelihood=loaded.likelihood)
"""

from neuromanifold.hf.batches import LoadedData
from neuromanifold.hf.data import load_data
from neuromanifold.hf.errors import LoadError
from neuromanifold.hf.models import LoadedModel, load_model
from neuromanifold.hf.tasks import Task

__all__ = ["LoadError", "LoadedData", "LoadedModel", "Task", "load_data", "load_model"]
