"""Models dispatched by accelerate give what the whole model gives; parameters that are not here are refused."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import neuromanifold as nm
from neuromanifold.persample.rules.registry import find_rule
from tests.distributed import runs
from tests.distributed.launch import checked_values
from tests.language.families import gpt2, tokens
from tests.problems.problem import Net

accelerate = pytest.importorskip("accelerate")


def network() -> nn.Module:
    torch.manual_seed(0)

    def forward(m: nn.Module, x: Tensor) -> Tensor:
        out: Tensor = m.head(m.norm(torch.tanh(m.layer(m.table(x).mean(1)))))  # type: ignore[operator]
        return out

    return Net(forward, table=nn.Embedding(20, 8), layer=nn.Linear(8, 16), norm=nn.LayerNorm(16), head=nn.Linear(16, 5))


DATA = [torch.randint(0, 20, (6, 4), generator=torch.Generator().manual_seed(i)) for i in range(4)]


@pytest.mark.parametrize("estimator", [nm.Hutchinson(), nm.Exact()], ids=str)
def test_a_dispatched_model_is_done_per_sample_as_the_whole_one(estimator: nm.Estimator) -> None:
    """Hooks of `device_map` on each module, which have a forward of their own."""
    expected = nm.fisher_diagonal(network(), DATA, estimator)
    parts = dict.fromkeys(("table", "layer", "norm", "head"), "cpu")
    model = accelerate.dispatch_model(network(), parts, main_device="cpu", force_hooks=True)
    assert "forward" in vars(model.layer)
    found = nm.fisher_diagonal(model, DATA, estimator)
    assert set(found.provenance.granularity.values()) == {"sample"}
    assert all(torch.equal(found.sums[name], expected.sums[name]) for name in expected)


def test_a_module_with_another_forward_has_still_no_rule() -> None:
    """Be it set by hand, or by hooks of accelerate on top of that."""
    for dispatched in (False, True):
        layer = nn.Linear(4, 4)
        layer.forward = lambda x, layer=layer: 2 * nn.functional.linear(x, layer.weight)  # type: ignore[assignment]
        if dispatched:
            accelerate.dispatch_model(layer, {"": "cpu"}, main_device="cpu", force_hooks=True)
            assert hasattr(layer, "_hf_hook")
        assert find_rule(layer) is None


def tied() -> nn.Module:
    """GPT-2, whose head is its embedding."""
    return gpt2().float()


def offload(model: Any, how: str, folder: Path) -> Any:
    """By each of accelerate's functions."""
    if how == "cpu_offload":
        return accelerate.cpu_offload(model, execution_device=torch.device("cpu"))
    if how == "disk_offload":
        return accelerate.disk_offload(model, folder, execution_device=torch.device("cpu"))
    places = {name: ("cpu", "disk")[i % 2] for i, (name, _) in enumerate(model.named_children())}
    return accelerate.dispatch_model(model, places, main_device="cpu", offload_dir=folder, force_hooks=True)


@pytest.mark.parametrize("make", [network, tied])
@pytest.mark.parametrize("how", ["cpu_offload", "disk_offload", "device_map"])
def test_offloaded_parameters_are_loaded_for_the_time_of_a_run(how: str, make: Any, tmp_path: Path) -> None:
    data = DATA if make is network else [tokens(2, 5), tokens(2, 4)]
    expected, trace = nm.fisher_diagonal(make(), data), nm.fisher_trace(make(), data)
    model = offload(make(), how, tmp_path)
    outputs = model(data[0])
    away = {name for name, parameter in model.named_parameters() if parameter.is_meta}
    assert away
    found = nm.fisher_diagonal(model, data)
    assert list(found) == list(expected)
    assert all(torch.equal(found.sums[name], expected.sums[name]) for name in expected)
    assert found.provenance.granularity == expected.provenance.granularity
    assert nm.fisher_trace(model, data).value == trace.value
    with pytest.raises(ValueError, match="`granularity` must be"):
        nm.fisher_diagonal(model, data, granularity="samples")  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        nm.fisher_diagonal(model, [object()])
    assert {name for name, parameter in model.named_parameters() if parameter.is_meta} == away
    again = model(data[0])
    assert torch.equal(getattr(again, "logits", again), getattr(outputs, "logits", outputs))


def test_parameters_of_the_model_itself_may_be_offloaded(tmp_path: Path) -> None:
    """Class tokens and positions of vision transformers belong to no submodule."""

    def with_scale() -> nn.Module:
        torch.manual_seed(0)
        model = Net(lambda m, x: m.head(torch.tanh(m.layer(x) * m.scale)), layer=nn.Linear(4, 8), head=nn.Linear(8, 3))
        model.scale = nn.Parameter(torch.randn(8))
        return model

    data = [torch.randn(5, 4, generator=torch.Generator().manual_seed(i)) for i in range(2)]
    expected = nm.fisher_diagonal(with_scale(), data)
    for how in ("cpu_offload", "disk_offload"):
        model = offload(with_scale(), how, tmp_path)
        found = nm.fisher_diagonal(model, data)
        assert all(torch.equal(found.sums[name], expected.sums[name]) for name in expected)
        assert all(parameter.is_meta for parameter in model.parameters())
        some = nm.fisher_diagonal(model, data, parameters=["head.weight"])
        assert torch.equal(some.sums["head.weight"], expected.sums["head.weight"])


def test_buffers_may_be_offloaded_too() -> None:
    """Those of modules without parameters have no values between calls, such as frequencies of rotary embeddings."""

    def with_buffers() -> nn.Module:
        rotation = Net(lambda m, x: x * m.frequencies)
        rotation.register_buffer("frequencies", torch.arange(1.0, 17.0) / 16)
        torch.manual_seed(0)
        normed = nn.BatchNorm1d(16)
        normed(torch.randn(9, 16))
        return nn.Sequential(nn.Flatten(), nn.Linear(4, 16), nn.Tanh(), rotation, normed, nn.Linear(16, 5)).eval()

    data = [batch.float() / 20 for batch in DATA]
    expected = nm.fisher_diagonal(with_buffers(), data)
    model = accelerate.cpu_offload(with_buffers(), execution_device=torch.device("cpu"), offload_buffers=True)
    away = {name for name, buffer in model.named_buffers() if buffer.is_meta}
    assert "3.frequencies" in away
    found = nm.fisher_diagonal(model, data)
    assert all(torch.equal(found.sums[name], expected.sums[name]) for name in expected)
    assert {name for name, buffer in model.named_buffers() if buffer.is_meta} == away


def test_offloaded_parameters_that_are_not_chosen_stay_where_they_are(tmp_path: Path) -> None:
    """As where adapters are of interest, and the frozen model is offloaded."""
    model = network()
    accelerate.cpu_offload(model.table, execution_device=torch.device("cpu"))
    accelerate.cpu_offload(model.layer, execution_device=torch.device("cpu"))
    expected, patterns = nm.fisher_diagonal(network(), DATA), ["norm.*", "head.*"]

    def data() -> Iterator[Tensor]:
        for batch in DATA:
            assert model.layer.weight.is_meta  # type: ignore[union-attr]
            yield batch

    found = nm.fisher_diagonal(model, data(), parameters=patterns, checkpoint=tmp_path / "state")
    assert list(found) == ["norm.weight", "norm.bias", "head.weight", "head.bias"]
    assert all(torch.equal(found.sums[name], expected.sums[name]) for name in found)


def test_shared_parameters_that_were_on_the_disk_are_refused(tmp_path: Path) -> None:
    """Nothing says any more that they are one; on the CPU they share their memory."""
    layers = nn.Linear(6, 6), nn.Linear(6, 6)
    layers[1].weight = layers[0].weight
    expected = nm.fisher_diagonal(nn.Sequential(*layers), [torch.ones(4, 6)], nm.Exact())
    model = accelerate.cpu_offload(nn.Sequential(*layers), execution_device=torch.device("cpu"))
    found = nm.fisher_diagonal(model, [torch.ones(4, 6)], nm.Exact())
    assert all(torch.equal(found.sums[name], expected.sums[name]) for name in expected)
    layers = nn.Linear(6, 6), nn.Linear(6, 6)
    layers[1].weight = layers[0].weight
    model = accelerate.disk_offload(nn.Sequential(*layers), tmp_path, execution_device=torch.device("cpu"))
    with pytest.raises(ValueError, match=r"the same values in '0.weight' and '1.weight'"):
        nm.fisher_diagonal(model, [torch.ones(4, 6)])


def test_parameters_without_values_are_refused() -> None:
    with pytest.raises(ValueError, match=r"`parameters` must be in memory, got 'table.weight' on the meta device"):
        nm.fisher_diagonal(network().to("meta"), DATA)
    model = accelerate.cpu_offload(network(), execution_device=torch.device("cpu"))
    with pytest.raises(ValueError, match="fisher_diagonal and fisher_trace take offloaded ones"):
        nm.fisher_operator(model, DATA)


def test_models_sharded_over_processes_are_refused() -> None:
    """But for FSDP2 in fisher_diagonal: gradients are those of a shard, or were summed before they could be squared."""
    sharded = "ValueError: `model` must be whole on each process, got '0.weight' sharded over processes"
    fully = "ValueError: `model` must be whole on each process, got FullyShardedDataParallel"
    for found in checked_values(
        2, runs.several, [(runs.fully_sharded, new, run) for new in (True, False) for run in range(3)]
    ):
        assert not found[0]
        assert all(text.startswith(sharded) for text in found[1:3]), found
        assert all(text.startswith(fully) for text in found[3:]), found


@pytest.mark.parametrize("function", [nm.fisher_operator, nm.fisher_factors, nm.fisher_matrix, nm.fisher_bounds])
def test_what_runs_on_one_process_refuses_a_part_of_the_data(function: Any) -> None:
    name = function.__name__
    with pytest.raises(
        ValueError, match=f"`data` must be whole for {name}, which runs on a single process, got a part"
    ):
        function(runs.network(), runs.loader(0, 44, 2))
