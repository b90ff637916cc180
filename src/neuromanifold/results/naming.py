"""Groups of parameter names, and names that fit: the one place that takes a dotted parameter name apart.

layers          encoder.layer.0.query.weight  →  encoder.layer.0.query       the module that owns the parameter
components      encoder.layer.0.query.weight  →  encoder.layer.0             embeddings, numbered blocks, head
paper           encoder.layer.0.query.weight  →  layer 0                     the paper's: embedding, blocks, head
short names     encoder.layer.0               →  layer.0                     what no other name ends with
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence

_ROWS = 24  # components that a table has room for
_FEW = 3  # with fewer components, such as the two of nn.Sequential(backbone, head), blocks inside blocks are shown
_LEAST = 8  # characters to which a word may be cut
_NUMBER = re.compile(r"(?:^|\.)\d+(?=\.|$)")


def grouped(names: Iterable[str], key: Callable[[str], str]) -> dict[str, list[str]]:
    """Group names by a key, in the order in which keys first occur."""
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(key(name), []).append(name)
    return groups


def module_of(name: str) -> str:
    """The module that owns a parameter; "" for a parameter of the model itself."""
    return name.rpartition(".")[0]


def layers(names: Iterable[str]) -> dict[str, list[str]]:
    """The parameters of each module, by the module's name."""
    return grouped(names, module_of)


def components(names: Sequence[str], most: int = _ROWS) -> dict[str, list[str]]:
    """Group parameters as papers draw networks: embeddings, each numbered block, the head.

    A component is a module, or the numbered block around it.  Where blocks alone give fewer than three components,
    the blocks inside them count; where there are more than `most`, names are cut to the depth that leaves at most so
    many (or to their first part).
    """
    deepest = max((len(_NUMBER.findall(name)) for name in names), default=0)
    for numbers in range(1, deepest + 2):
        keys = {name: _block(module_of(name) or name, numbers) for name in names}
        if len(set(keys.values())) >= _FEW:
            break
    else:
        keys = {name: module_of(name) or name for name in names}
    for depth in range(max((key.count(".") for key in keys.values()), default=0) + 1, 0, -1):
        groups = grouped(names, lambda name, depth=depth: ".".join(keys[name].split(".")[:depth]))  # type: ignore[misc]
        if len(groups) <= most:
            return groups
    return groups if names else {}


def paper_components(names: Sequence[str]) -> dict[str, list[str]]:
    """The panels of the paper's histograms: "embedding", "layer 0", "layer 1", ..., "head".

    Blocks are the members of a container that is numbered from 0, at the first number of a name.  What comes before
    the first block is the embedding, what comes after the last one the head; without blocks, `components`.
    """
    blocks = {name: _block(name, 1) for name in names if _NUMBER.search(name) and not name[0].isdigit()}
    containers = {module_of(block) for block in blocks.values() if block.rpartition(".")[2] == "0"}
    labels = {name: " ".join(block.split(".")[-2:]) for name, block in blocks.items() if module_of(block) in containers}
    if not labels:
        return components(names)
    first, last = (list(names).index(name) for name in (next(iter(labels)), list(labels)[-1]))

    def label(name: str) -> str:
        place = names.index(name)
        outside = "embedding" if place < first else "head" if place > last else " ".join(name.split(".")[:2])
        return labels.get(name, outside)

    return grouped(names, label)


def short_names(names: Iterable[str], among: Iterable[str] = ()) -> Mapping[str, str]:
    """For each dotted name its shortest end that no other one has, nor any of `among`, not beginning with a number."""
    names = list(names)
    others = list(dict.fromkeys([*names, *among]))
    return {name: _ends(name, others)[-1] for name in names}


def fitted(names: Sequence[str], room: int) -> list[str]:
    """The names in at most `room` characters where that is possible without making any two equal.

    A name that is too long becomes the longest end that no other name has, such as "…layer.3.query", or its last number
    and an end, "…3…query", or an end that begins inside a word, "…yer.3"; where none of them fits, the shortest of the
    first kind: a table that is too wide can still be read.
    """
    shown = {name: name for name in names}
    for name in shown:
        if len(name) > room:
            ends = [f"…{end}" for end in _ends(name, names) if end != name] or [name]
            cut = name[1 - room :] if room > _LEAST else name
            cuts = [f"…{cut}"] if sum(other.endswith(cut) for other in shown) == 1 else []
            shown[name] = next((end for end in [*ends, *_gaps(name), *cuts] if len(end) <= room), ends[-1])
    taken = Counter(shown.values())
    return [shown[name] if taken[shown[name]] == 1 else name for name in names]


def _block(module: str, numbers: int) -> str:
    """A dotted name up to its `numbers`-th number; all of it where it has fewer."""
    ends = [found.end() for found in _NUMBER.finditer(module)]
    return module[: ends[numbers - 1]] if len(ends) >= numbers else module


def _ends(name: str, among: Sequence[str]) -> list[str]:
    """The ends of a dotted name that no other one has, from the whole name to the shortest."""
    parts = name.split(".")
    ends = [".".join(parts[i:]) for i in range(len(parts)) if not i or not parts[i].isdigit()]
    others = [f".{other}" for other in dict.fromkeys(among) if other != name]
    return [end for end in ends if end == name or not any(other.endswith(f".{end}") for other in others)]


def _gaps(name: str) -> list[str]:
    """The last number of a dotted name and one of its ends after that, "…3…query", the longest first."""
    parts = name.split(".")
    number = max((i for i, part in enumerate(parts) if part.isdigit()), default=len(parts))
    return [f"…{parts[number]}…{'.'.join(parts[i:])}" for i in range(number + 2, len(parts))]
