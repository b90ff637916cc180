"""A process that fails, or is killed, ends the run in all; checkpoints are taken up by any number of processes."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch

import neuromanifold as nm
from neuromanifold.results.files import FileError
from tests.distributed import runs
from tests.distributed.launch import checked_values, outcomes
from tests.distributed.test_data_parallel import assert_same, load

NUMBER = 14


def expected(number: int = NUMBER, **options: Any) -> nm.DiagonalFisher:
    return nm.fisher_diagonal(runs.network(), runs.batches(number), **options)


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="threads are listed on Linux")
def test_threads_of_a_group_of_its_own_end_with_it() -> None:
    """Those that outlive the interpreter abort."""
    assert checked_values(2, runs.group_of_its_own) == [(True, True, [0, 1])] * 2


def test_a_failure_between_two_runs_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """A wrong number that one process sees ends a test at once, though the others wait for it to begin the next run."""
    monkeypatch.setattr("tests.distributed.launch.GRACE", 0.2)
    with pytest.raises(AssertionError, match="a wrong number"):
        checked_values(2, runs.wrong_in_one)


@pytest.mark.parametrize("who", [0, 1])
def test_an_error_in_one_process_ends_the_others_and_names_it(who: int, tmp_path: Path) -> None:
    """Soon, although they have hundreds of batches before them; what all have done is in their checkpoints."""
    found = outcomes(2, runs.failing, tmp_path, 3, who)
    assert found[who] == (False, "BrokenError: no batch 3")
    ended, text = found[1 - who]
    assert ended
    assert text == f"Rank {who} of 2 has failed, which ends the run on all processes: BrokenError: no batch 3 [True]"
    files = nm.Checkpoint(tmp_path / "state").files()
    assert sorted(files) == [0, 1]


def test_a_run_that_others_do_not_come_to_says_so() -> None:
    (told, error), _ = checked_values(2, runs.late)
    assert told == [
        "Rank 1 of 2 has not begun this run after 0 s: all processes of a process group have to make the same call. "
        "Give distributed=False for a run of this process alone."
    ]
    assert error == "Rank 1 of 2 has not begun this run within 1 s."


def test_ctrl_c_in_one_process_gives_what_all_have_done(tmp_path: Path) -> None:
    checked_values(2, runs.interrupted, tmp_path, 5, 300)
    first, second = load(tmp_path / "0"), load(tmp_path / "1")
    assert first.provenance.stopped == f"interrupted after {first.provenance.batches} batches"
    assert second.provenance == first.provenance
    assert 5 <= first.provenance.batches < 100
    assert all(torch.equal(first.sums[name], second.sums[name]) for name in first)


# Checkpoints.


def fail(world: int, path: Path, at: int) -> None:
    """A run of so many processes that ends before batch `at`."""
    if world == 1:
        with pytest.raises(runs.BrokenError):
            runs.broken_in_all(0, path, at, NUMBER)
    else:
        assert not any(one[0] for one in outcomes(world, runs.broken_in_all, path, at, NUMBER))


def resume(world: int, path: Path, number: int = NUMBER, **options: Any) -> nm.DiagonalFisher:
    if world == 1:
        runs.resumed(0, path, number, options)
    else:
        checked_values(world, runs.resumed, path, number, options)
    return load(path / "result0")


@pytest.mark.parametrize(
    "worlds",
    [(2, 2), (2, 1), (1, 2), (2, 3, 1), pytest.param((4, 2, 3, 1, 4), marks=pytest.mark.slow)],
    ids=lambda worlds: "-".join(map(str, worlds)),
)
def test_a_run_is_resumed_by_any_number_of_processes(worlds: tuple[int, ...], tmp_path: Path) -> None:
    """Each of them fails some batches later than the one before; the last one comes to its end."""
    *before, last = worlds
    for i, world in enumerate(before):
        fail(world, tmp_path, 4 + 3 * i)
    found = resume(last, tmp_path)
    verified = found.provenance.verified
    assert verified >= 1
    assert_same(found, expected())
    again = resume(last, tmp_path)  # from the files of a run that has ended
    assert all(torch.equal(again.sums[name], found.sums[name]) for name in found)
    assert sorted(nm.Checkpoint(tmp_path / "state").files()) == list(range(last))
    nm.Checkpoint(tmp_path / "state").remove()
    assert not nm.Checkpoint(tmp_path / "state").files()


def test_the_same_number_of_processes_resumes_bit_for_bit(tmp_path: Path) -> None:
    (tmp_path / "whole").mkdir()
    whole = resume(2, tmp_path / "whole")
    fail(2, tmp_path, 7)
    found = resume(2, tmp_path)
    for name in whole:
        assert torch.equal(found.sums[name], whole.sums[name])
        assert torch.equal(found.noise[name], whole.noise[name])


def test_more_data_and_rtol_may_follow(tmp_path: Path) -> None:
    """A shorter run, then a longer one by other processes that stops at its tolerance."""
    resume(2, tmp_path, 9)
    (tmp_path / "state").rename(tmp_path / "kept")  # batch 8 is another one in longer data
    (tmp_path / "state.rank1").unlink()
    fail(2, tmp_path, 5)
    found = resume(3, tmp_path, 60, rtol=0.08)
    assert found.provenance.stopped.startswith(f"stopped after {found.provenance.batches} batches")
    assert 5 < found.provenance.batches < 60
    short = nm.fisher_diagonal(runs.network(), runs.batches(60)[: found.provenance.batches])
    assert_same(found, short)


def test_windows_of_adaptive_passes_are_resumed(tmp_path: Path) -> None:
    options = {"passes": 1.5}
    resume(2, tmp_path, 40, **options)
    found = resume(1, tmp_path, 40, **options)
    assert_same(found, expected(40, **options))


def test_other_data_and_other_runs_are_refused(tmp_path: Path) -> None:
    fail(2, tmp_path, 6)
    with pytest.raises(ValueError, match="got one that differs in seed \\(0, now 1\\)"):
        nm.fisher_diagonal(runs.network(), runs.batches(NUMBER), seed=1, checkpoint=tmp_path / "state")
    for wrong, got in (([0, 2, 1, *range(3, 14)], "others up to batch"), ([1, 0, *range(2, 14)], "another batch 0")):
        data = [runs.batches(NUMBER)[i] for i in wrong]
        with pytest.raises(ValueError, match=got):
            nm.fisher_diagonal(runs.network(), data, checkpoint=tmp_path / "state")
    with pytest.raises(ValueError, match="at least 6 batches, got 2 batches"):
        nm.fisher_diagonal(runs.network(), runs.batches(NUMBER)[:2], checkpoint=tmp_path / "state")


def test_batches_in_two_files_are_refused(tmp_path: Path) -> None:
    """Files of two runs in one place: their sums would count batches twice."""
    fail(2, tmp_path, 6)
    kept = (tmp_path / "state.rank1").read_bytes()
    resume(1, tmp_path)
    (tmp_path / "state").unlink()
    fail(1, tmp_path, 3)
    (tmp_path / "state.rank1").write_bytes(kept)
    with pytest.raises(FileError, match="has some batches that other files of the run have, too"):
        resume(1, tmp_path)


# Killed.


def kill_and_resume(folder: Path, seed: int, kills: int, number: int = 40) -> int:
    """Kill a process at random times, each time another number of processes; return how often it was killed at work."""
    chance, killed = random.Random(seed), 0
    for _ in range(kills):
        world = chance.choice([2, 2, 3, 4])
        who, after = chance.randrange(world), chance.uniform(0.05, 1.0)
        found = outcomes(world, runs.killed, folder, who, after, number, 0.02)
        if found[who] is None:
            killed += 1
            for rank, one in enumerate(found):
                assert rank == who or not one[0] or (folder / f"result{rank}").exists()
                if rank != who and not one[0]:
                    told = (f"Rank {who} of {world} has not been heard of", "Another process has died", "store")
                    assert any(text in one[1] for text in told), one
    world = chance.choice([1, 2])
    found = resume(world, folder, number)
    assert_same(found, expected(number))
    return killed


def test_a_process_that_is_killed_ends_the_run_and_another_number_resumes_it(tmp_path: Path) -> None:
    found = outcomes(2, runs.killed, tmp_path, 1, 0.6, 200, 0.02, 1.5)
    assert found[1] is None
    ended, text = found[0]
    assert not ended
    assert text.startswith("ProcessError: Rank 1 of 2 has not been heard of for ")
    assert "with a checkpoint, the same call resumes it, with any number of processes" in text
    assert_same(resume(1, tmp_path, 200), expected(200))


@pytest.mark.slow
def test_a_process_that_is_killed_before_a_collective_is_not_waited_for() -> None:
    found = outcomes(2, runs.killed_on_joining)
    assert found[1] is None
    assert found[0][1].startswith(
        ("ProcessError: Another process has died", "ProcessError: Rank 1 of 2 has not been heard")
    )


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(5))
def test_processes_killed_at_random_times_change_nothing(seed: int, tmp_path: Path) -> None:
    assert kill_and_resume(tmp_path, seed, 5) >= 2
