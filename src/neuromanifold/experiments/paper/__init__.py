"""The paper's experiments: its table and its figures, on its models or on local ones, beside our estimators.

for each task:                                      `tasks`: six networks and their data
    prepare model and rows                          `sources`: from the hub, or from local folders and files
    exact diagonal, kept                            `measure`: C - 1 passes for each batch, by far the longest
    for each column and each number of probes:      `columns`
        run, compare with the exact one, keep       what is finished is not run again
    time the columns in turn on a few batches       `speed`
    histograms, error against passes                `figures`
    tables of all tasks so far                      `table`
"""

from neuromanifold.experiments.paper.folder import Folder, PaperRun, PaperSettings
from neuromanifold.experiments.paper.reproduce import reproduce
from neuromanifold.experiments.paper.sources import Source
from neuromanifold.experiments.paper.tasks import TASKS, PaperTask

__all__ = ["TASKS", "Folder", "PaperRun", "PaperSettings", "PaperTask", "Source", "reproduce"]
