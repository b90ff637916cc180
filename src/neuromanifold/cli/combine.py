"""`neuromanifold combine`: parts of the data, added."""

from __future__ import annotations

from functools import reduce
from itertools import combinations
from operator import add
from pathlib import Path
from typing import Annotated

import typer

from neuromanifold.cli.files import read_diagonal
from neuromanifold.cli.options import check_output
from neuromanifold.cli.output import output_console, print_line
from neuromanifold.cli.show import print_result
from neuromanifold.core.checks import message
from neuromanifold.results import Provenance


def combine(
    files: Annotated[list[Path], typer.Argument(help="Results over disjoint data, such as shards of one run.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="The file to write, in safetensors format.")],
) -> None:
    """Add results over disjoint data: `estimate --shard 0/2` and `--shard 1/2` together are one run."""
    if len(files) < 2:
        raise ValueError(message("files", "two or more results", str(len(files))))
    doubled = next(
        (str(path) for i, path in enumerate(files) if path.resolve() in {p.resolve() for p in files[:i]}), ""
    )
    if doubled:
        raise ValueError(message("files", "different ones", f"{doubled} twice", "The same data count once."))
    check_output(output, *files)
    results = [read_diagonal(path) for path in files]
    for i, j in combinations(range(len(files)), 2):
        if share_data(results[i].provenance, results[j].provenance):
            got = f"{files[i]} and {files[j]} with batches of {results[i].provenance.data} in common"
            raise ValueError(message("files", "results over disjoint data", got, "The same data count once."))
    total = reduce(add, results)
    total.save(output)
    console = output_console()
    print_result(console, total, only=("trace", "estimator", "samples"))
    print_line(console, "written", output)


def share_data(a: Provenance, b: Provenance) -> bool:
    """Whether two results have a batch in common: the same data, and the same number in the same run."""
    if set(a.data.split(" + ")).isdisjoint(b.data.split(" + ")):
        return False
    return any(
        seed == other and not set(range(*numbers)).isdisjoint(range(*others))
        for seed, *numbers in a.draws
        for other, *others in b.draws
    )
