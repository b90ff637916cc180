"""Batches that have been made are kept for the next time, as far as there is room."""

import torch
from torch import Tensor

from neuromanifold.hf.data import Batch, LoadedData


def counting(most: int) -> tuple[LoadedData, list[int]]:
    """Three batches of 4, 4 and 2 rows with 40 bytes each; and how many rows have been made."""
    made: list[int] = []

    def make(rows: list[int]) -> Batch:
        made.extend(rows)
        return {
            "x": torch.tensor(rows, dtype=torch.float32)[:, None].expand(-1, 8).contiguous(),
            "n": torch.tensor(rows),
        }

    data = LoadedData(tuple(range(10)), 4, make, "ten rows")
    return data.cached(most), made


def values(data: LoadedData) -> list[Tensor]:
    return [batch["n"] for batch in data if isinstance(batch, dict)]


def test_every_batch_is_made_once_and_is_the_same_again() -> None:
    data, made = counting(10_000)
    first, second = values(data), values(data)
    assert made == list(range(10))
    assert [one.tolist() for one in first] == [one.tolist() for one in second] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert sum(len(one) for one in values(data.with_batch_size(5))) == 10  # other batches are made anew
    assert made == [*range(10), *range(10)]


def test_what_there_is_no_room_for_is_made_again() -> None:
    data, made = counting(250)  # 160 bytes, then 80; the second of 160 does not fit
    values(data)
    values(data)
    assert made == [*range(10), 4, 5, 6, 7]
