"""A run that was stopped, killed or failed goes on with the same numbers, bit for bit; and nothing is mixed up."""

import itertools
import json
import resource
import signal
import subprocess
import sys
import threading
import warnings
from collections import UserDict
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import neuromanifold as nm
from neuromanifold.results.files import load_tensors
from tests import forked
from tests.problems.architectures import ARCHITECTURES
from tests.problems.networks import PROBLEMS
from tests.problems.problem import Net, Problem
from tests.run import killed_runs
from tests.run.killed_runs import BrokenError, failing

ROOT = Path(__file__).parents[2]
PROBES: dict[str, dict[str, Any]] = {
    "default": {},
    "three probes": {"estimator": nm.Hutchinson(3, deflate=0)},
    "per batch": {"granularity": "batch"},
    "per sample": {"granularity": "sample", "estimator": nm.Hutchinson(2, deflate=0, noise="gaussian")},
    "Monte Carlo": {"estimator": nm.MonteCarlo(2)},
    "Exact": {"estimator": nm.Exact()},
    "Empirical": {"estimator": nm.Empirical()},
}


def assert_identical(found: nm.DiagonalFisher, expected: nm.DiagonalFisher) -> None:
    verified = found.provenance.verified  # a resumed run verifies its first batch, and knows what was excluded
    assert found.provenance == replace(expected.provenance, verified=verified)
    assert (found.count, found.positions) == (expected.count, expected.positions)
    for name in expected:
        assert torch.equal(found.sums[name], expected.sums[name]), name
        assert torch.equal(found.noise[name], expected.noise[name]), name


def estimate(model: nn.Module, data: Any, **options: Any) -> nm.DiagonalFisher:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", nm.SlowPathWarning)
        fim = nm.fisher_diagonal(model, data, **options)
    return without_data(fim)


def without_data(fim: nm.DiagonalFisher) -> nm.DiagonalFisher:
    """What kind of iterable the data were may differ."""
    fim.provenance.__dict__["data"] = ""
    return fim


def inputs(number: int, size: int, seed: int = 0) -> list[Tensor]:
    return list(torch.randn(number, size, 6, generator=torch.Generator().manual_seed(seed)))


def failures(path: Path, model: nn.Module, data: list[Any], **options: Any) -> None:
    """Fail before every third batch, each time in a run of its own, then before every batch of one run; and go on."""
    expected = estimate(model, data, **options)
    for at in range(0, len(data), 3):
        with pytest.raises(BrokenError):
            estimate(model, failing(data, at), checkpoint=path / f"{at}", **options)
        assert_identical(estimate(model, data, checkpoint=path / f"{at}", **options), expected)
    failures_of_one_run(path, expected, model, data, **options)


def failures_of_one_run(
    path: Path, expected: nm.DiagonalFisher, model: nn.Module, data: list[Any], **options: Any
) -> None:
    for at in range(1, len(data)):
        with pytest.raises(BrokenError):
            estimate(model, failing(data, at), checkpoint=path / "one", **options)
    for _ in range(2):  # from the last failure, then from the end
        assert_identical(estimate(model, data, checkpoint=path / "one", **options), expected)


ODD = {**PROBLEMS, **ARCHITECTURES}
LARGE = ("MobileNetV2", "ResNet", "ConvNeXt", "Swin")


@pytest.mark.parametrize("name", [name for name in ODD if not name.startswith(LARGE)])
def test_failures_of_one_run_change_nothing_for_any_model(name: str, tmp_path: Path) -> None:
    """What rules can do is found out as the run goes on, and must not be found out in another way."""
    problem: Problem = ODD[name]
    data, options = [*problem.data, *reversed(problem.data)], {"likelihood": problem.likelihood, **problem.options}
    failures_of_one_run(tmp_path, estimate(problem.model, data, **options), problem.model, data, **options)


@pytest.mark.slow
@pytest.mark.parametrize("name", ODD)
def test_failures_at_every_batch_change_nothing_for_any_model(name: str, tmp_path: Path) -> None:
    problem: Problem = ODD[name]
    data = [*problem.data, *reversed(problem.data)]
    failures(tmp_path, problem.model, data, likelihood=problem.likelihood, **problem.options)


@pytest.mark.parametrize("probe", PROBES)
def test_failures_at_every_batch_change_nothing_for_any_estimator(probe: str, tmp_path: Path) -> None:
    """Over the batches in which fourth powers are thinned out, and units looked at."""
    data = [(x, torch.arange(16) % 5) for x in inputs(14, 16)]
    failures(tmp_path, killed_runs.network(), data, **PROBES[probe])


class Odd(nn.Module):
    """A table used twice, a parameter that rules meet outside of modules, and one that no rule covers."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.layer = nn.Embedding(7, 4), nn.Linear(4, 4)
        self.shift, self.odd = nn.Parameter(torch.zeros(4)), nn.Parameter(torch.eye(4))

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.layer(self.table(x)) + self.shift) @ torch.linalg.inv(self.odd)
        out: Tensor = h @ self.table.weight.T
        return out


@pytest.mark.parametrize("probe", PROBES)
def test_failures_change_nothing_where_batches_have_other_shapes(
    probe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Small, empty and partly ignored ones among them, and the last one smaller; tied weights, and no rule for some."""
    monkeypatch.setattr("neuromanifold.persample.accumulate.fourth_powers._ALL_OF", 8)
    torch.manual_seed(0)
    model, data = Odd(), []
    for rows, length in [(0, 3), (5, 3), (0, 2), (1, 3), (6, 2), (6, 3), (2, 3)]:
        x = torch.randint(0, 7, (2, rows, length))
        data.append((x[0], x[1].where(torch.arange(rows)[:, None] % 3 > 0, -100)))
    failures(tmp_path, model, data, **PROBES[probe])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("granularity", ["auto", "batch"])
def test_failures_change_nothing_in_other_precisions(dtype: torch.dtype, granularity: str, tmp_path: Path) -> None:
    data = [x.to(dtype) for x in inputs(5, 4)]
    failures(tmp_path, killed_runs.network().to(dtype), data, granularity=granularity, likelihood=in_float32)


def in_float32(z: Tensor) -> nm.Categorical:
    return nm.Categorical(z.float() if z.dtype.itemsize < 4 else z)


class Growing(nn.Module):
    """Its gradients grow with the batches, and another of its heads is used each time."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.heads = nn.Linear(6, 8), nn.ModuleList(nn.Linear(8, 3) for _ in range(11))

    def forward(self, x: Tensor, task: int) -> Tensor:
        out: Tensor = self.heads[task](self.trunk(x * 4.0**task).tanh())
        return out


def test_units_and_layouts_of_small_sums_are_kept(tmp_path: Path) -> None:
    torch.manual_seed(0)
    data = [{"x": x, "task": i % 11} for i, x in enumerate(inputs(13, 4))]
    failures(tmp_path, Growing(), data)


def test_what_was_given_up_for_one_batch_stays_given_up(tmp_path: Path) -> None:
    """In batch 1 a weight is used outside of its module: from then on it is squared per batch, also after a stop."""

    def forward(m: Any, x: Tensor, odd: bool) -> Tensor:
        z: Tensor = m.head(torch.tanh(m.layer(x)))
        return z + (m.layer.weight.square().sum() * x.sum() if odd else 0.0)

    model = Net(forward, layer=nn.Linear(6, 6), head=nn.Linear(6, 3))
    data = [{"x": x, "odd": i == 1} for i, x in enumerate(inputs(6, 4))]
    assert "batch" in estimate(model, data).provenance.granularity.values()
    failures(tmp_path, model, data)


def test_an_error_within_a_batch_goes_back_to_the_last_file(tmp_path: Path) -> None:
    model, data = killed_runs.network(), inputs(6, 16)
    expected = estimate(model, data)
    path = tmp_path / "state"
    for at in range(6):
        bad = [*data[:at], torch.full((16, 6), torch.nan), *data[at + 1 :]]
        with pytest.raises(ValueError, match=f"Batch {at} .*NaN"):
            estimate(model, bad, checkpoint=nm.Checkpoint(path, every=0))
    assert_identical(estimate(model, data, checkpoint=path), expected)


def test_a_run_that_stopped_at_rtol_stops_there_again(tmp_path: Path) -> None:
    model, data = killed_runs.network(), inputs(60, 16)
    wanted = estimate(model, data[:20]).relative_error
    expected = estimate(model, data, rtol=wanted)
    assert 5 < expected.provenance.batches < 60
    for at in (3, 30):
        path = tmp_path / f"{at}"
        if at < expected.provenance.batches:
            with pytest.raises(BrokenError):
                estimate(model, failing(data, at), rtol=wanted, checkpoint=path)
        for _ in range(2):
            assert_identical(estimate(model, data, rtol=wanted, checkpoint=path), expected)
    longer = estimate(model, data, checkpoint=tmp_path / "3")  # without rtol it goes on
    assert_identical(longer, estimate(model, data))


def test_more_data_may_follow(tmp_path: Path) -> None:
    model, data = killed_runs.network(), inputs(8, 16)
    estimate(model, data[:5], checkpoint=tmp_path / "state")
    assert_identical(estimate(model, data, checkpoint=tmp_path / "state"), estimate(model, data))


@pytest.mark.parametrize("options", [{}, {"granularity": "batch"}, {"estimator": nm.Hutchinson(3, deflate=0)}], ids=str)
def test_traces_too(options: dict[str, Any], tmp_path: Path) -> None:
    model, data = killed_runs.network(), inputs(7, 16)
    expected = nm.fisher_trace(model, data, **options)
    for at in range(7):
        with pytest.raises(BrokenError):
            nm.fisher_trace(model, failing(data, at), checkpoint=tmp_path / "state", **options)
    found = nm.fisher_trace(model, data, checkpoint=tmp_path / "state", **options)
    verified = found.provenance.verified
    assert replace(found, provenance=replace(found.provenance, verified=expected.provenance.verified)) == expected
    assert verified >= expected.provenance.verified


ELSEWHERE = """
import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
import neuromanifold as nm
from tests.run.killed_runs import BrokenError, failing
from tests.problems.networks import PROBLEMS

for path in sys.argv[1:]:
    problem = PROBLEMS[Path(path).name]
    with suppress(BrokenError):
        nm.fisher_diagonal(problem.model, failing([*problem.data, *reversed(problem.data)], 2), checkpoint=path)
"""
SHARED = [
    name
    for name, problem in PROBLEMS.items()
    if not problem.options and problem.likelihood is nm.Categorical and "/" not in name
][::3]


def test_another_process_can_go_on(tmp_path: Path) -> None:
    """Nothing that is kept may depend on where objects are in memory, or on how texts are hashed."""
    python(ELSEWHERE, *(tmp_path / name for name in SHARED))
    for name in SHARED:
        data = [*PROBLEMS[name].data, *reversed(PROBLEMS[name].data)]
        found = estimate(PROBLEMS[name].model, data, checkpoint=tmp_path / name)
        assert_identical(found, estimate(PROBLEMS[name].model, data))


def python(code: str, *paths: Path) -> None:
    done = subprocess.run([sys.executable, "-c", code, *map(str, paths)], capture_output=True, text=True, cwd=ROOT)
    assert not done.returncode, done.stderr


# ---------------------------------------------------------------------------------------------------- killed


def kills_survived(folder: Path, kills: int, seed: int) -> int:
    """How often a run was killed that has ended with the numbers of one that never was."""
    killed = killed_runs.killed(folder, kills, seed)
    expected = estimate(killed_runs.network(), killed_runs.batches())
    found = nm.load(folder / "result.safetensors")
    assert isinstance(found, nm.DiagonalFisher)
    assert_identical(without_data(found), expected)
    assert sorted(entry.name for entry in folder.iterdir()) == ["result.safetensors", "run.checkpoint"]
    return killed


def test_a_run_that_is_killed_at_random_times_ends_with_the_same_numbers(tmp_path: Path) -> None:
    assert kills_survived(tmp_path, 8, 0) >= 3


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 11))
def test_a_run_that_is_killed_a_hundred_times(seed: int, tmp_path: Path) -> None:
    assert kills_survived(tmp_path, 100, seed) >= 3


# ---------------------------------------------------------------------------------------------------- Ctrl-C


class PressesCtrlC(nn.Module):
    """In the first forward pass of batch `at`, counted from 1."""

    def __init__(self, at: int, times: int = 1) -> None:
        super().__init__()
        self.inner, self.times = killed_runs.network(), times
        self.trigger = inputs(8, 16)[at - 1] if at else None

    def forward(self, x: Tensor) -> Tensor:
        if self.trigger is not None and torch.equal(x, self.trigger):
            self.trigger = None
            for _ in range(self.times):
                signal.raise_signal(signal.SIGINT)
        out: Tensor = self.inner(x)
        return out


def batches_kept(path: Path) -> int:
    counts: dict[str, int] = json.loads(load_tensors(path)[1]["state"])["counts"]
    return counts["batches"]


def test_ctrl_c_waits_for_the_batch_and_writes_first(tmp_path: Path) -> None:
    data, path = inputs(8, 16), tmp_path / "state"
    expected = estimate(PressesCtrlC(0), data)
    with pytest.raises(KeyboardInterrupt):
        estimate(PressesCtrlC(4), data, checkpoint=path)
    assert batches_kept(path) == 4
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert_identical(estimate(PressesCtrlC(0), data, checkpoint=path), expected)


def test_ctrl_c_while_waiting_for_data_is_not_held_back(tmp_path: Path) -> None:
    def data() -> Iterator[Tensor]:
        for number, item in enumerate(inputs(8, 16)):
            if number == 3:
                signal.raise_signal(signal.SIGINT)
            yield item

    with pytest.raises(KeyboardInterrupt):
        estimate(killed_runs.network(), data(), checkpoint=tmp_path / "state")
    assert batches_kept(tmp_path / "state") == 3
    part = estimate(killed_runs.network(), data(), on_interrupt="return")
    assert part.count == 3 * 16


@pytest.mark.parametrize("checkpoint", [True, False])
def test_ctrl_c_can_give_what_was_done(checkpoint: bool, tmp_path: Path) -> None:
    data, path = inputs(8, 16), tmp_path / "state" if checkpoint else None
    part = estimate(PressesCtrlC(5), data, on_interrupt="return", checkpoint=path)
    assert part.provenance.stopped == "interrupted after 5 batches"
    assert part.provenance.stopped in str(part)
    part.provenance.__dict__["stopped"] = ""
    assert_identical(part, estimate(PressesCtrlC(0), data[:5]))
    if checkpoint:
        whole = estimate(PressesCtrlC(0), data, on_interrupt="return", checkpoint=path)
        assert_identical(whole, estimate(PressesCtrlC(0), data))


def test_a_second_ctrl_c_does_not_wait(tmp_path: Path) -> None:
    data, path = inputs(8, 16), tmp_path / "state"
    with pytest.raises(KeyboardInterrupt):
        estimate(PressesCtrlC(5, times=2), data, on_interrupt="return", checkpoint=nm.Checkpoint(path, every=0))
    assert batches_kept(path) == 4  # the fifth batch was not whole
    assert_identical(estimate(PressesCtrlC(0), data, checkpoint=path), estimate(PressesCtrlC(0), data))


class PressesCtrlCBackward(torch.autograd.Function):
    """In the first backward pass."""

    @staticmethod
    def forward(_: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(_: Any, *g: Tensor) -> Tensor:
        signal.raise_signal(signal.SIGINT)
        return g[0]


def test_ctrl_c_in_a_backward_pass_waits_too(tmp_path: Path) -> None:
    def forward(m: Any, x: Tensor, press: bool) -> Tensor:
        z: Tensor = m.inner(x)
        return PressesCtrlCBackward.apply(z) if press else z  # type: ignore[no-untyped-call,no-any-return]

    model = Net(forward, inner=killed_runs.network())
    data = [{"x": x, "press": i == 3} for i, x in enumerate(inputs(6, 16))]
    part = estimate(model, data, granularity="batch", on_interrupt="return", checkpoint=tmp_path / "state")
    assert part.provenance.stopped == "interrupted after 4 batches"
    assert batches_kept(tmp_path / "state") == 4


def test_ctrl_c_while_the_file_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is written to its end, and what was written is a whole file."""
    from neuromanifold.results import files

    data, path, written = inputs(6, 16), tmp_path / "state", itertools.count()

    def pressed(*args: Any, **options: Any) -> None:
        if next(written) == 3:
            signal.raise_signal(signal.SIGINT)
        save_file(*args, **options)

    with monkeypatch.context() as patch:
        patch.setattr(files, "save_file", pressed)
        with pytest.raises(KeyboardInterrupt):
            estimate(killed_runs.network(), data, checkpoint=nm.Checkpoint(path, every=0))
    assert batches_kept(path) == 3
    assert [entry.name for entry in tmp_path.iterdir()] == ["state"]
    found = estimate(killed_runs.network(), data, checkpoint=path)
    assert_identical(found, estimate(killed_runs.network(), data))


def test_nothing_to_give_before_the_first_batch() -> None:
    def data() -> Iterator[Tensor]:
        signal.raise_signal(signal.SIGINT)
        yield from inputs(2, 4)

    with pytest.raises(KeyboardInterrupt):
        estimate(killed_runs.network(), data(), on_interrupt="return")


def test_without_either_ctrl_c_is_as_always() -> None:
    with pytest.raises(KeyboardInterrupt):
        estimate(PressesCtrlC(2), inputs(8, 16))


def test_a_handler_of_the_users_is_left_alone(tmp_path: Path) -> None:
    seen: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, _: seen.append(number))
    try:
        fim = estimate(PressesCtrlC(2), inputs(8, 16)[:3], checkpoint=tmp_path / "state")
        assert set(seen) == {signal.SIGINT}  # in each forward pass of the second batch, which is verified
        assert fim.provenance.batches == 3
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_handler_set_within_the_run_stays(tmp_path: Path) -> None:
    def data() -> Iterator[Tensor]:
        yield from inputs(2, 4)
        signal.signal(signal.SIGINT, signal.SIG_IGN)

    try:
        estimate(killed_runs.network(), data(), checkpoint=tmp_path / "state")
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def test_the_handler_is_put_back_after_an_error(tmp_path: Path) -> None:
    with pytest.raises(BrokenError):
        estimate(killed_runs.network(), failing(inputs(3, 4), 1), checkpoint=tmp_path / "state")
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_other_threads_can_keep_a_checkpoint(tmp_path: Path) -> None:
    found: list[nm.DiagonalFisher] = []
    data = inputs(3, 4)
    job = threading.Thread(
        target=lambda: found.append(estimate(killed_runs.network(), data, checkpoint=tmp_path / "state"))
    )
    job.start()
    job.join()
    assert_identical(found[0], estimate(killed_runs.network(), data))


def test_the_model_is_as_before_after_ctrl_c(tmp_path: Path) -> None:
    model = PressesCtrlC(2).train()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(KeyboardInterrupt):
        estimate(model, inputs(8, 16)[:4], checkpoint=tmp_path / "state")
    assert all(module.training and not module._forward_hooks for module in model.modules())
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())


# ---------------------------------------------------------------------------------------------------- not the same run


def other_weights() -> nn.Module:
    model = killed_runs.network()
    with torch.no_grad():
        model[4].bias[2] += 1e-6
    return model


def other_activation() -> nn.Module:
    model = killed_runs.network()
    model[1] = nn.LeakyReLU(0.1)
    return model


def tempered(temperature: float) -> Callable[[Tensor], nm.Categorical]:
    return lambda z: nm.Categorical(z / temperature)


DIFFERENT: dict[str, tuple[Callable[[], nn.Module], dict[str, Any], str]] = {
    "seed": (killed_runs.network, {"seed": 1}, r"seed \(0, now 1\)"),
    "estimator": (killed_runs.network, {"estimator": nm.Hutchinson(deflate=0)}, "estimator"),
    "granularity": (killed_runs.network, {"granularity": "batch"}, r"granularity \(auto, now batch\)"),
    "likelihood": (killed_runs.network, {"likelihood": nm.Bernoulli}, r"likelihood \(Categorical, now Bernoulli\)"),
    "parameters": (killed_runs.network, {"parameters": "*.bias"}, "parameters"),
    "shard": (killed_runs.network, {"shard": (0, 2)}, r"shard \(\[0, 1\], now \[0, 2\]\)"),
    "weights": (other_weights, {}, "weights of the model"),
    "class_dim": (killed_runs.network, {"class_dim": 1}, "class_dim"),
    "activation": (other_activation, {}, "modules of the model"),
}


@pytest.mark.parametrize("what", DIFFERENT)
def test_another_run_is_refused_and_the_difference_named(what: str, tmp_path: Path) -> None:
    make, options, text = DIFFERENT[what]
    data, path = inputs(4, 4), tmp_path / "state"
    estimate(killed_runs.network(), data[:2], checkpoint=path)
    before = path.read_bytes()
    with pytest.raises(ValueError, match=rf"`checkpoint` must be one of the same run.*{text}.*Delete"):
        estimate(make(), data, checkpoint=path, **options)
    assert path.read_bytes() == before


def test_another_version_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "state"
    estimate(killed_runs.network(), inputs(2, 4), checkpoint=path)
    monkeypatch.setattr("neuromanifold.run.checkpoint.__version__", "99.0")
    with pytest.raises(ValueError, match=r"neuromanifold \(.*, now 99.0\)"):
        estimate(killed_runs.network(), inputs(2, 4), checkpoint=path)


def test_another_layout_of_the_file_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "state"
    with monkeypatch.context() as before:
        before.setattr("neuromanifold.run.checkpoint._FORMAT", 2)
        estimate(killed_runs.network(), inputs(2, 4), checkpoint=path)
    with pytest.raises(ValueError, match=r"differs in format of the file \(2, now 3\).*Delete"):
        estimate(killed_runs.network(), inputs(2, 4), checkpoint=path)


def test_a_trace_is_not_a_diagonal(tmp_path: Path) -> None:
    nm.fisher_trace(killed_runs.network(), inputs(2, 4), checkpoint=tmp_path / "state")
    with pytest.raises(ValueError, match=r"result \(TraceSums, now DiagonalSums\)"):
        estimate(killed_runs.network(), inputs(2, 4), checkpoint=tmp_path / "state")


def test_another_autocast_is_refused(tmp_path: Path) -> None:
    estimate(killed_runs.network(), inputs(2, 4), checkpoint=tmp_path / "state")
    with (
        torch.autocast("cpu", torch.bfloat16),
        pytest.raises(ValueError, match=r"autocast \(none, now torch.bfloat16\)"),
    ):
        estimate(killed_runs.network(), inputs(2, 4), checkpoint=tmp_path / "state")


def test_a_function_that_computes_something_else_is_refused(tmp_path: Path) -> None:
    model, data, path = killed_runs.network(), inputs(4, 4), tmp_path / "state"
    estimate(model, data[:2], likelihood=tempered(2.0), checkpoint=path)
    estimate(model, data[:2], likelihood=tempered(2.0), checkpoint=path)
    with pytest.raises(ValueError, match="differs in what the likelihood computes"):
        estimate(model, data, likelihood=tempered(3.0), checkpoint=path)


def test_a_run_that_has_done_nothing_stands_in_nobodys_way(tmp_path: Path) -> None:
    """As after a mistake that only the first batch shows."""
    model, data, path = killed_runs.network(), inputs(3, 4), tmp_path / "state"
    with pytest.raises(ValueError, match="labels"):
        estimate(model, data, estimator=nm.Empirical(), checkpoint=path)
    assert batches_kept(path) == 0
    assert_identical(estimate(model, data, checkpoint=path), estimate(model, data))


def changed(data: list[Tensor], position: int) -> list[Tensor]:
    return [x + 1e-3 if number == position else x for number, x in enumerate(data)]


OTHER_DATA: dict[str, tuple[Callable[[list[Tensor]], list[Tensor]], str]] = {
    "first": (lambda data: changed(data, 0), "another batch 0"),
    "between": (lambda data: changed(data, 1), "others up to batch 3"),
    "last": (lambda data: changed(data, 3), "others up to batch 3"),
    "another order": (lambda data: [data[i] for i in (0, 2, 1, 3, 4)], "others up to batch 3"),
    "one left out": (lambda data: [data[0], *data[2:]], "others up to batch 3"),
}
WRAPPED: dict[str, Callable[[Tensor], Any]] = {
    "tensor": lambda x: x,
    "pair": lambda x: (x, torch.arange(4)),
    "named": lambda x: {"input": x},
    "named, of a kind of its own": lambda x: (UserDict(input=x), torch.arange(4)),
}


@pytest.mark.parametrize("what", OTHER_DATA)
@pytest.mark.parametrize("wrapped", WRAPPED)
def test_other_data_are_refused(what: str, wrapped: str, tmp_path: Path) -> None:
    change, got = OTHER_DATA[what]
    model, path, wrap = killed_runs.network(), tmp_path / "state", WRAPPED[wrapped]
    data = inputs(5, 4)
    estimate(model, [wrap(x) for x in data[:4]], checkpoint=path)
    before = path.read_bytes()
    with pytest.raises(ValueError, match=f"`data` must be the batches .*{got}.*shuffle"):
        estimate(model, [wrap(x) for x in change(data)], checkpoint=path)
    assert path.read_bytes() == before


def test_a_model_may_work_in_place_on_its_inputs(tmp_path: Path) -> None:
    model = Net(lambda m, x: m.inner(x.mul_(0.5)), inner=killed_runs.network())
    for at in range(1, 4):
        with pytest.raises(BrokenError):
            estimate(model, failing(inputs(4, 4), at), checkpoint=tmp_path / "state")
    assert_identical(estimate(model, inputs(4, 4), checkpoint=tmp_path / "state"), estimate(model, inputs(4, 4)))


def test_data_that_end_too_early_are_refused(tmp_path: Path) -> None:
    data = inputs(5, 4)
    estimate(killed_runs.network(), data, checkpoint=tmp_path / "state")
    with pytest.raises(ValueError, match=r"`data` must be .*at least 5 batches, got 3 batches"):
        estimate(killed_runs.network(), data[:3], checkpoint=tmp_path / "state")


def test_damaged_and_foreign_files_are_refused(tmp_path: Path) -> None:
    model, data, path = killed_runs.network(), inputs(3, 4), tmp_path / "state"
    fim = estimate(model, data, checkpoint=path)
    whole = path.read_bytes()
    for contents in (whole[: len(whole) // 2], b"", b"not a file", whole[:100]):
        path.write_bytes(contents)
        with pytest.raises(nm.FileError, match=r"damaged.*Delete .* to begin afresh"):
            estimate(model, data, checkpoint=path)
        assert path.read_bytes() == contents
    fim.save(path)
    with pytest.raises(nm.FileError, match=r"not a checkpoint.*Delete"):
        estimate(model, data, checkpoint=path)
    save_file({"weight": torch.zeros(2)}, path)
    with pytest.raises(nm.FileError, match=r"not a checkpoint.*Delete"):
        estimate(model, data, checkpoint=path)


def test_a_single_bit_that_has_changed_is_noticed(tmp_path: Path) -> None:
    """Of any sum, or of a count."""
    model, data, path = killed_runs.network(), inputs(3, 4), tmp_path / "state"
    estimate(model, data, checkpoint=path)
    whole = path.read_bytes()
    begin = 8 + int.from_bytes(whole[:8], "little")
    count = whole.index(b'samples\\": 12,') + len('samples\\": 1')
    for place in (count, *range(begin, len(whole), len(whole) // 20), len(whole) - 1):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        with pytest.raises(nm.FileError, match="damaged"):
            estimate(model, data, checkpoint=path)


# ---------------------------------------------------------------------------------------------------- the file


def test_a_folder_is_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(nm.FileError, match="`checkpoint` must be a file"):
        estimate(killed_runs.network(), inputs(2, 4), checkpoint=tmp_path)


def test_a_link_stays_a_link(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "state")
    for _ in range(2):
        estimate(killed_runs.network(), inputs(2, 4), checkpoint=tmp_path / "link")
    assert (tmp_path / "link").is_symlink()
    assert batches_kept(tmp_path / "state") == 2


def test_only_what_a_killed_run_has_left_is_removed(tmp_path: Path) -> None:
    """safetensors writes aside, too, under a name of its own."""
    for left in (".state.abcd_123/.tmpA1b2C3", ".state.zxcvbnm1/state"):
        (tmp_path / left).parent.mkdir()
        (tmp_path / left).write_text("half a file")
    (tmp_path / ".state.settings").write_text("of somebody else")
    (tmp_path / ".state.metadata").mkdir()
    (tmp_path / ".state.metadata" / "notes").write_text("of somebody else")
    estimate(killed_runs.network(), inputs(2, 4), checkpoint=tmp_path / "state")
    assert sorted(entry.name for entry in tmp_path.iterdir()) == [".state.metadata", ".state.settings", "state"]
    assert (tmp_path / ".state.metadata" / "notes").exists()


WHILE_WRITING = """
import os, signal, sys
import torch
import neuromanifold as nm
from neuromanifold.results import files
from tests.run import killed_runs

written, save = [], files.save_file

def killed(contents, aside, metadata):
    written.append(aside)
    if len(written) == 3:
        (aside.parent / ".tmpA1b2C3").write_text("half a file")  # as safetensors names it
        os.kill(os.getpid(), signal.SIGKILL)
    save(contents, aside, metadata)

files.save_file = killed
torch.set_num_threads(1)  # as in the tests: products in several threads are rounded otherwise
nm.fisher_diagonal(killed_runs.network(), killed_runs.batches(), checkpoint=nm.Checkpoint(sys.argv[1], every=0))
"""


@pytest.mark.slow
def test_nothing_is_left_of_a_file_that_was_being_written_when_the_run_was_killed(tmp_path: Path) -> None:
    path = tmp_path / "state"
    done = subprocess.run([sys.executable, "-c", WHILE_WRITING, str(path)], cwd=ROOT, check=False)
    assert done.returncode == -signal.SIGKILL
    assert len(list(tmp_path.iterdir())) == 2
    found = estimate(killed_runs.network(), killed_runs.batches(), checkpoint=path)
    assert_identical(found, estimate(killed_runs.network(), killed_runs.batches()))
    assert [entry.name for entry in tmp_path.iterdir()] == ["state"]


def test_a_full_disk_does_not_end_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, data, path = killed_runs.network(), inputs(6, 4), tmp_path / "state"
    expected = estimate(model, data)
    estimate(model, data[:2], checkpoint=path)
    before = path.read_bytes()

    def fail(*_: object, **__: object) -> None:
        raise OSError("No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("neuromanifold.results.files.save_file", fail)
        with pytest.warns(UserWarning, match=r"could not be written \(No space left.*still that of an earlier batch"):
            fim = estimate(model, data, checkpoint=nm.Checkpoint(path, every=0))
        assert_identical(fim, expected)
        with pytest.raises(OSError, match="No space"):  # at the very beginning there is nothing to lose
            estimate(model, data, checkpoint=tmp_path / "other")
    assert path.read_bytes() == before
    assert [entry.name for entry in tmp_path.iterdir()] == ["state"]
    assert_identical(estimate(model, data, checkpoint=path), expected)


def test_a_disk_that_is_really_full(tmp_path: Path) -> None:
    model, data, path = killed_runs.network(), list(killed_runs.batches()), tmp_path / "state"
    estimate(model, data[:3], checkpoint=path)
    before = path.read_bytes()

    def go_on() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))  # no file may grow beyond that
        with pytest.warns(UserWarning, match="could not be written"):
            assert estimate(model, data, checkpoint=path).count == 640

    done = forked.run(go_on)
    assert done.returncode == 0, done.stderr
    assert path.read_bytes() == before
    assert [entry.name for entry in tmp_path.iterdir()] == ["state"]


def test_a_missing_folder_is_noticed_before_the_run(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="No folder"):
        estimate(PressesCtrlC(1), inputs(2, 4), checkpoint=tmp_path / "missing" / "state")


def test_how_often_it_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from neuromanifold.run import checkpoint

    written: list[int] = []
    now = itertools.count(0.0, 1.0)  # a second for each look at the clock
    monkeypatch.setattr(checkpoint.time, "monotonic", lambda: next(now))
    monkeypatch.setattr(checkpoint, "save_tensors", lambda *_: written.append(1))
    model, data = killed_runs.network(), inputs(60, 1)
    for every, least, most in ((0, 61, 61), (10, 5, 12), (None, 2, 4), (3600, 2, 2)):
        written.clear()
        estimate(model, data, checkpoint=nm.Checkpoint(tmp_path / "state", every=every))
        assert least <= len(written) <= most, every


@pytest.mark.parametrize("every", [-1, True, "often", float("nan"), float("inf")])
def test_how_often_must_be_a_number_of_seconds(every: Any) -> None:
    with pytest.raises(ValueError, match="`every` must be a number of seconds"):
        nm.Checkpoint("state", every)


def test_bad_arguments_are_named() -> None:
    model, data = killed_runs.network(), inputs(2, 4)
    with pytest.raises(TypeError, match="`checkpoint` must be a path"):
        nm.fisher_diagonal(model, data, checkpoint=3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="`on_interrupt` must be 'raise' or 'return'"):
        nm.fisher_diagonal(model, data, on_interrupt="ignore")  # type: ignore[arg-type]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu_it_goes_on_with_the_same_numbers_too(tmp_path: Path) -> None:
    model, data = killed_runs.network().cuda(), inputs(20, 16)
    failures(tmp_path, model, data, cuda_graphs=False)  # replays may differ in the last bit
    whole = nm.fisher_diagonal(model, data)
    for graphs in (True, False):
        with pytest.raises(BrokenError):
            nm.fisher_diagonal(model, failing(data, 11), cuda_graphs=graphs, checkpoint=tmp_path / f"{graphs}")
        found = nm.fisher_diagonal(model, data, cuda_graphs=graphs, checkpoint=tmp_path / f"{graphs}")
        for name in whole:
            torch.testing.assert_close(found[name], whole[name])
