"""What processes do with models in FSDP2; each function takes the rank first, and compares with the whole model."""

import errno
import signal
import threading
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import neuromanifold as nm
from neuromanifold.persample.gradients import Product
from neuromanifold.persample.rules import registry
from neuromanifold.persample.shards import LayerSums
from neuromanifold.results import sharded
from neuromanifold.results.files import save_tensors
from neuromanifold.run import processes
from tests.distributed import runs
from tests.language.families import CAUSAL, llama, tokens
from tests.language.test_adapters import lora
from tests.run.killed_runs import BrokenError


def shard(model: Any, parts: list[Any], mesh: Any = None, **options: Any) -> Any:
    """FSDP2 for some parts of a model, and for the rest of it."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),)) if mesh is None else mesh
    for part in parts:
        fully_shard(part, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def network() -> nn.Sequential:
    """Odd sizes, which no number of processes divides."""
    torch.manual_seed(0)
    inner = nn.Sequential(nn.Linear(7, 11), nn.LayerNorm(11), nn.Tanh(), nn.Linear(11, 7))
    return nn.Sequential(nn.Linear(6, 7), nn.Tanh(), inner, nn.Tanh(), nn.Linear(7, 5))


def confident() -> nn.Sequential:
    """Few of its samples carry most of F."""
    model: Any = network()
    with torch.no_grad():
        model[4].weight.mul_(25)
    return model  # type: ignore[no-any-return]


class Scaled(nn.Module):
    """Uses of parameters that no rule covers."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, 7))
        self.matrix = nn.Parameter(torch.randn(7, 7))

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = x @ (self.matrix @ self.matrix).tanh() * self.scale.cumsum(0)
        return found


class Squared(nn.Module):
    """A function of each entry of a parameter, which autograd has saved and FSDP2 frees until the backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, 7))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale.square()


def adaptive(rank: int, number: int, costs: list[float]) -> None:
    """Windows with other strategies, and other numbers of groups and passes, on each process; the last one is short."""
    data = runs.batches(number)
    for cost in costs:
        options: dict[str, Any] = {"estimator": nm.Adaptive(cost, window=3)}
        equal(rank, confident, middle, data, options)
        model = confident()
        shard(model, middle(model))
        trace = nm.fisher_trace(model, data, **options)
        whole = nm.fisher_trace(confident(), data, distributed=False, **options)
        assert trace.value == pytest.approx(whole.value, rel=1e-6)
        assert trace.stderr == pytest.approx(whole.stderr, rel=1e-6)


def adaptive_otherwise(rank: int, more: bool) -> None:
    """Sequences, error bars of rows; samples that cannot be regrouped, and a tolerance."""
    several: dict[str, Any] = {"estimator": nm.Adaptive(1.5, window=2)}
    equal(rank, confident, middle, runs.batches(5), several | {"error_bars": "rows"})
    few: dict[str, Any] = {"estimator": nm.Adaptive(0.6, window=2)}
    equal(rank, partial(llama, num_hidden_layers=2), layers, sequences()[: 5 if more else 3], few)
    if not more:
        return
    single = [(x[:1], y[:1]) for x, y in runs.batches(5)]
    equal(rank, confident, middle, single, several)
    model = confident()
    shard(model, middle(model))
    found = nm.fisher_diagonal(model, runs.batches(60), rtol=0.3, **several)
    batches = found.provenance.batches
    assert 1 < batches < 60
    assert "relative standard error" in found.provenance.stopped
    whole = nm.fisher_diagonal(confident(), runs.batches(60)[:batches], distributed=False, **several)
    compare(found.gathered(), whole)


def broken_when_alone(_: int) -> str:
    """Rank 1 fails on the few samples with which it is asked whether samples influence each other: no one waits."""

    class Picky(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            if dist.get_rank() == 1 and len(x) < 5:
                raise BrokenError("too few samples")
            return x

    model = confident()
    model.insert(2, Picky())
    shard(model, [model[3]])
    try:
        nm.fisher_diagonal(model, runs.batches(5, size=8), nm.Adaptive(1.5, window=2))
    except (BrokenError, processes.ProcessError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def freed(_: int) -> None:
    """Of the whole model it is done per sample, in FSDP2 one sample at a time, to the same sums."""

    def make() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(6, 7), nn.Tanh(), Squared(), nn.Linear(7, 5))

    data, options = runs.batches(2), {"estimator": nm.Exact()}
    expected = nm.fisher_diagonal(make(), data, distributed=False, **options)
    model = make()
    found = nm.fisher_diagonal(shard(model, middle(model)), data, **options).gathered()
    for name, value in expected.sums.items():
        torch.testing.assert_close(found.sums[name], value, rtol=2e-6, atol=1e-12)


def without_rules() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 7), nn.Tanh(), Scaled(), nn.Tanh(), nn.Linear(7, 5))


def compare(
    found: nm.DiagonalFisher,
    expected: nm.DiagonalFisher,
    tolerance: float = 2e-6,
    noise: bool = True,
    same_run: bool = True,
) -> None:
    """Entries, standard errors, counts and what is said about them."""
    assert list(found) == list(expected)
    for name in expected:
        torch.testing.assert_close(found.sums[name], expected.sums[name], rtol=tolerance, atol=1e-12, msg=name)
        if noise:
            torch.testing.assert_close(found.noise[name], expected.noise[name], rtol=1e-4, atol=1e-12, msg=name)
    assert found.error_bars == expected.error_bars
    assert list(found.noiseless) == list(expected.noiseless)
    for name, value in expected.noiseless.items():
        torch.testing.assert_close(found.noiseless[name], value, rtol=tolerance, atol=1e-12, msg=name)
    ours, theirs = found.provenance, expected.provenance
    assert (found.count, found.positions, ours.batches) == (expected.count, expected.positions, theirs.batches)
    assert ours.granularity == theirs.granularity
    assert ours.weights == theirs.weights
    if same_run:
        assert (ours.left_out, ours.draws) == (theirs.left_out, theirs.draws)
        assert ours.noise_ratio == pytest.approx(theirs.noise_ratio, abs=1e-7)  # the root of what is rounding
        assert ours.data_fingerprints == theirs.data_fingerprints


def equal(
    _: int, make: Callable[[], Any], parts: Callable[[Any], list[Any]], data: Any, options: dict[str, Any], **more: Any
) -> None:
    """The diagonal of a sharded model against that of the whole one, in this process alone."""
    expected = nm.fisher_diagonal(make(), data, distributed=False, **options)
    model = make()
    shard(model, parts(model))
    before = {name: p.to_local().clone() for name, p in model.named_parameters()}
    found = nm.fisher_diagonal(model, data, **options)
    assert type(found).__name__ == "ShardedFisher"
    local = [t.to_local().shape for t in found.sums.values()]
    assert local == [p.to_local().shape for p in model.parameters() if p.requires_grad]
    compare(found.gathered(), expected, **more)
    assert found.provenance.passes == expected.provenance.passes
    assert all(torch.equal(p.to_local(), before[name]) and p.grad is None for name, p in model.named_parameters())


def middle(model: Any) -> list[Any]:
    return [model[2]]


def estimators(rank: int, number: int, without: bool, several: list[dict[str, Any]]) -> None:
    for options in several:
        make = without_rules if without else network
        equal(rank, make, middle, runs.batches(number), options, noise=not without)


def language(_: int, names: list[str], options: dict[str, Any], noise: bool, number: int = 5) -> None:
    """Causal models, by layers; sequences of other lengths on other processes, the last one alone."""
    for name in names:
        make, data = partial(CAUSAL[name], num_hidden_layers=2), sequences()[:number]
        equal(_, make, layers, data, options, noise=noise and name != "Mixtral")


def layers(model: Any) -> list[Any]:
    model = model.get_base_model() if hasattr(model, "peft_config") else model
    return list(model.transformer.h if hasattr(model, "transformer") else model.model.layers)


def partly_frozen() -> nn.Module:
    model = llama(num_hidden_layers=2)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("layers.1" in name)
    return model


def with_lora() -> Any:
    return lora(llama(num_hidden_layers=2)).float()


def recomputing() -> Any:
    """Activation checkpoints of transformers, which work in train mode alone."""
    model: Any = llama(num_hidden_layers=2)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model.train()


def all_in_one(_: Any) -> list[Any]:
    return []


def nested(model: Any) -> list[Any]:
    return [layer.mlp for layer in model.model.layers] + list(model.model.layers) + [model.model]


def models(rank: int) -> None:
    """Frozen parameters, adapters, activation checkpoints; FSDP modules inside of others, or one alone; bfloat16."""
    data = sequences()[:3]
    equal(rank, with_lora, layers, data, {})
    equal(rank, with_lora, all_in_one, [{"input_ids": data[0]["input_ids"]}], {"estimator": nm.Exact()}, noise=False)
    equal(rank, partly_frozen, layers, data, {})
    equal(rank, recomputing, layers, data, {})
    equal(rank, partial(llama, num_hidden_layers=2), nested, data, {})
    whole = llama(num_hidden_layers=2).bfloat16()
    expected = nm.fisher_diagonal(whole, data, distributed=False)
    model = llama(num_hidden_layers=2).float()
    for part in [*layers(model), model]:
        fully_shard(part, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    found = nm.fisher_diagonal(model, data).gathered()
    for name, value in expected.sums.items():  # weights in bfloat16, sums in float32
        assert value.dtype == found.sums[name].dtype == torch.float32
        torch.testing.assert_close(found.sums[name], value, rtol=0.02, atol=1e-3 * float(value.max()))


def sequences() -> list[dict[str, Tensor]]:
    found = []
    for number, length in enumerate((4, 3, 4, 5, 4)):
        ids = tokens(2, length, seed=number)
        labels = ids.clone()
        labels[0, : number % 3] = -100
        found.append({"input_ids": ids, "labels": labels})
    return found


def kinds(rank: int) -> None:
    """Replicas of shards, mixed precision, parameters kept on the CPU, other dimensions, data of their own, traces."""
    world, data = dist.get_world_size(), runs.batches(7)
    expected = nm.fisher_diagonal(network(), data, distributed=False)

    def divided(**options: Any) -> Any:
        model = network()
        return shard(model, middle(model), **options)

    if world == 4:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))
        compare(nm.fisher_diagonal(divided(mesh=mesh), data).gathered(), expected)
    kept = divided(reshard_after_forward=False)
    compare(nm.fisher_diagonal(kept, data).gathered(), expected)
    assert all(hasattr(p, "placements") for p in kept.parameters())
    with torch.no_grad():
        kept(data[0][0])
    assert not all(hasattr(p, "placements") for p in kept.parameters())  # FSDP keeps them whole for the next pass
    compare(nm.fisher_diagonal(kept, data).gathered(), expected)
    columns = divided(shard_placement_fn=lambda p: Shard(1) if p.ndim > 1 and p.shape[1] % world == 0 else None)
    compare(nm.fisher_diagonal(columns, data).gathered(), expected)
    low = nm.fisher_diagonal(divided(mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16)), data).gathered()
    assert abs(float(low.trace) / float(expected.trace) - 1) < 0.05
    assert low.sums["0.weight"].dtype == torch.float32
    some: dict[str, Any] = {"parameters": ["2.*", "4.bias"]}
    alone = nm.fisher_diagonal(network(), data, distributed=False, **some)
    compare(nm.fisher_diagonal(divided(), data, **some).gathered(), alone)
    away = divided(offload_policy=CPUOffloadPolicy(pin_memory=False))
    compare(nm.fisher_diagonal(away, data).gathered(), expected)
    trace = nm.fisher_trace(divided(), data)
    of_one = nm.fisher_trace(network(), data, distributed=False)
    assert abs(trace.value / of_one.value - 1) < 1e-6
    assert abs(trace.stderr / of_one.stderr - 1) < 1e-6
    own = nm.fisher_diagonal(divided(), data[rank::world], distributed="own data").gathered()
    torch.testing.assert_close(own.sums["0.weight"], expected.sums["0.weight"], rtol=0.5, atol=0)
    assert own.count == expected.count
    soon = nm.fisher_diagonal(divided(), runs.batches(60), rtol=0.08)
    assert 1 < soon.provenance.batches < 60
    assert "relative standard error" in soon.provenance.stopped
    whole = nm.fisher_diagonal(network(), runs.batches(60)[: soon.provenance.batches], distributed=False)
    torch.testing.assert_close(soon.gathered().sums["2.0.weight"], whole.sums["2.0.weight"], rtol=2e-6, atol=1e-12)
    assert abs(float(soon.trace) / float(whole.trace) - 1) < 1e-6


def error_bars(_: int, folder: Path, columns: bool) -> None:
    """One number for each row of a weight, in parts: of weights divided along rows or columns; added, saved, `rows`."""
    world, data = dist.get_world_size(), runs.batches(5)
    several = nm.Hutchinson(3)  # one of whose passes has no noise
    whole = partial(nm.fisher_diagonal, network(), data, several, distributed=False)

    def divided(error_bars: Any = "rows", mesh: Any = None, **options: Any) -> Any:
        model = network()
        place = (lambda p: Shard(1) if p.ndim > 1 and p.shape[1] % world == 0 else None) if columns else None
        shard(model, middle(model), mesh, shard_placement_fn=place)
        return nm.fisher_diagonal(model, data, several, error_bars=error_bars, **options)

    found, expected = divided(), whole(error_bars="rows")
    compare(found.gathered(), expected)
    kept = {name: part.to_local().numel() for name, part in found.noise.items()}
    assert sum(kept.values()) < sum(len(sums) for sums in expected.sums.values())
    compare(found.rows.gathered(), expected.rows)
    found.rows.save(folder / "rows.safetensors")
    assert found.relative_error == pytest.approx(expected.relative_error, rel=1e-5)
    fine, coarse = (divided(kind, shard=(i, 2)) for i, kind in enumerate([True, "rows"]))
    both = [whole(error_bars=kind, shard=(i, 2)) for i, kind in enumerate([True, "rows"])]
    compare(fine.rows.gathered(), both[0].rows)
    total = fine + coarse
    total.save(folder / "sum.safetensors")
    dist.barrier()
    compare(nm.load(folder / "rows.safetensors"), expected.rows)
    compare(nm.load(folder / "sum.safetensors"), both[0] + both[1])
    if world == 4:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))
        compare(divided(mesh=mesh).gathered(), expected)


def choice_of_error_bars(_: int) -> None:
    """By size, as for a whole model; none; and what `rtol` needs."""
    model, data = network(), runs.batches(2)
    shard(model, middle(model))
    assert nm.fisher_diagonal(model, data).error_bars is True
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("neuromanifold.run.settings.LARGE", 100)
        assert nm.fisher_diagonal(model, data).error_bars == "rows"
    found = nm.fisher_diagonal(model, data, error_bars=False).gathered()
    assert not found.noise
    compare(found, nm.fisher_diagonal(network(), data, distributed=False, error_bars=False), noise=False)
    with pytest.raises(ValueError, match="`error_bars` must be True or 'rows' with rtol, got False"):
        nm.fisher_diagonal(model, data, error_bars=False, rtol=0.1)


def soon_enough(_: int) -> None:
    """With error bars of rows, which are more accurate than those of entries, a run ends sooner at its tolerance."""
    model, data = network(), runs.batches(60)
    shard(model, middle(model))
    found = nm.fisher_diagonal(model, data, rtol=0.2, error_bars="rows")
    batches = found.provenance.batches
    assert 1 < batches < nm.fisher_diagonal(model, data, rtol=0.2, error_bars=True).provenance.batches < 60
    assert found.relative_error <= 0.2
    whole = nm.fisher_diagonal(network(), data[:batches], error_bars="rows", distributed=False)
    compare(found.gathered(), whole, noise=batches * 16 <= 128)


def one_layer_at_a_time(_: int) -> None:
    """How many squares there are at full size at a time: those of one FSDP module, be it a layer or the whole model."""
    sizes: list[int] = []
    put = LayerSums.put

    def watched(self: Any, i: int, kind: str, whole: Tensor) -> None:
        put(self, i, kind, whole)
        sizes.append(sum(tensor.numel() for (_, what), tensor in self._waiting.items() if what == "squares"))

    for divided in (True, False):
        model = nn.Sequential(nn.Linear(6, 16), *(nn.Linear(16, 16) for _ in range(5)))
        shard(model, list(model) if divided else [])
        sizes.clear()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(LayerSums, "put", watched)
            nm.fisher_diagonal(model, runs.batches(3))
        assert max(sizes) == (16 * 17 if divided else 7 * 16 + 5 * 16 * 17)


class Odd(nn.Linear):
    """A layer of which rank 1 has a wrong rule."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight, self.bias)


def check_wrong_rule(rank: int, divided: Callable[[nn.Module], Any]) -> None:
    """Twice too large on rank 1 alone: the parameter is left to autograd on all processes."""

    @registry.rule(Odd, extra_dims=True)
    def odd(call: registry.Call) -> dict[str, Any]:
        found = registry._RULES[nn.Linear].function(call)
        if rank == 1 and "weight" in found:
            product: Any = found["weight"]
            assert isinstance(product, Product)
            found["weight"] = Product(2 * product.left, product.right, product.shape)
        return found

    torch.manual_seed(0)
    model = divided(nn.Sequential(nn.Linear(6, 8), nn.Tanh(), Odd(8, 5)))
    how = nm.fisher_diagonal(model, runs.batches(5)).provenance.granularity
    assert how == {"0.weight": "sample", "0.bias": "sample", "2.weight": "batch", "2.bias": "sample"}, how


def wrong_rule(rank: int) -> None:
    """A wrong rule on one process of a model in FSDP2."""
    check_wrong_rule(rank, lambda model: shard(model, [model[2]]))


def refused(_: int) -> list[str]:
    """Arguments and models that are refused with a message that names them."""
    model, found = network(), []
    shard(model, middle(model))
    mesh = init_device_mesh("cpu", (1, dist.get_world_size()), mesh_dim_names=("data", "tensor"))
    both, partly = nn.Sequential(nn.Linear(6, 8)), network()
    parallelize_module(both, mesh["tensor"], {"0": ColwiseParallel()})
    fully_shard(both, mesh=mesh["data"])
    fully_shard(partly[2], mesh=mesh["tensor"])
    cases: list[tuple[str, Any, dict[str, Any]]] = [
        ("distributed", model, {"distributed": False}),
        ("tensor parallel", both, {}),
        ("whole on each", partly, {}),
    ]
    for text, one, options in cases:
        with pytest.raises(ValueError, match=text):
            nm.fisher_diagonal(one, runs.batches(3), **options)
        found.append(text)
    return found


def failing(rank: int) -> None:
    def data() -> Iterator[Any]:
        for number, batch in enumerate(runs.batches(40)):
            if rank == 1 and number == 3:
                raise BrokenError("no batch 3")
            yield batch

    model = network()
    shard(model, middle(model))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        nm.fisher_diagonal(model, data())


def saved(rank: int, folder: Path) -> None:
    """Whole parameters by name in a file of each process, in turn; a sum, a second result, and what fails, over it."""
    data, path, world = runs.batches(7), folder / "fim.safetensors", dist.get_world_size()
    model = network()
    shard(model, middle(model))
    parts = [nm.fisher_diagonal(model, data, shard=(i, 2)) for i in range(2)]
    kept: list[int] = []

    def counted(path: Path, tensors: Any, *rest: Any) -> None:
        kept.append(sum(tensor.numel() for tensor in tensors.values()))
        save_tensors(path, tensors, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sharded, "save_tensors", counted)
        (parts[0] + parts[1]).save(path)
    with pytest.raises(ValueError, match="`fim` must be whole for intervals, comparisons and pages"):
        parts[0].compare(parts[1])
    assert str(parts[0]).startswith("ShardedFisher (per sample): 10 parameters")
    entries = sum(parameter.numel() for parameter in model.parameters())
    assert sum(kept) <= 2 * entries / world + 77  # the largest parameter: no process had more of them
    dist.barrier()
    files = sorted(entry.name for entry in folder.iterdir())
    assert files[-1] == "fim.safetensors.index.json"
    assert len(files) > world
    compare(nm.load(path), nm.fisher_diagonal(network(), data, distributed=False), same_run=False)
    dist.barrier()
    parts[0].save(path, shard_size="200B")  # the same name: the files of the first are gone
    assert sorted(entry.name for entry in folder.iterdir() if "fim-" in entry.name) == []
    dist.barrier()
    before = {entry.name: entry.read_bytes() for entry in folder.iterdir()}
    with pytest.MonkeyPatch.context() as patch:
        if rank == world - 1:
            patch.setattr(sharded, "save_tensors", full)
        with pytest.raises(
            OSError, match="No space left" if rank == world - 1 else f"Rank {world - 1} could not write"
        ):
            parts[1].save(path)
    dist.barrier()
    assert {entry.name: entry.read_bytes() for entry in folder.iterdir()} == before


def full(*_: Any) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def checkpointed(rank: int, folder: Path, number: int, at: int, options: dict[str, Any]) -> None:
    """A run that ends before batch `at` in the last process (-1: it does not end), and keeps every round."""

    def data() -> Iterator[Any]:
        for i, batch in enumerate(runs.batches(number)):
            if i == at and rank == dist.get_world_size() - 1:
                raise BrokenError(f"no batch {i}")
            yield batch

    model = confident() if "estimator" in options else network()
    shard(model, middle(model))
    checkpoint = nm.Checkpoint(folder / "state", every=0)
    found = nm.fisher_diagonal(model, data(), checkpoint=checkpoint, **options)
    found.save(folder / "fim.safetensors")


def killed(rank: int, folder: Path, who: int, after: float, number: int, options: dict[str, Any]) -> None:
    """One process is killed some seconds after its first batch; with a checkpoint of every round."""
    processes._SILENT = 2.0

    def data() -> Iterator[Any]:
        for i, batch in enumerate(runs.batches(number)):
            if i == 1 and rank == who:
                threading.Thread(target=runs.kill_this_process, args=(after,), daemon=True).start()
            yield batch

    model = confident() if "estimator" in options else network()
    shard(model, middle(model))
    nm.fisher_diagonal(model, data(), checkpoint=nm.Checkpoint(folder / "state", every=0), **options)


def interrupted(rank: int, folder: Path, on_interrupt: str) -> list[str]:
    """Ctrl-C in rank 1 alone: all processes end with the same batches, or with an error."""

    def data() -> Iterator[Any]:
        for i, batch in enumerate(runs.batches(40)):
            if rank == 1 and i == 5:
                signal.raise_signal(signal.SIGINT)
            yield batch

    model, options = network(), {"checkpoint": folder / "state", "on_interrupt": on_interrupt}
    shard(model, middle(model))
    try:
        found = nm.fisher_diagonal(model, data(), **options)
    except (KeyboardInterrupt, processes.ProcessError) as error:
        return [type(error).__name__, str(error)]
    return [found.provenance.stopped, str(found.count)]
