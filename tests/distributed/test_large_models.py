"""Models dispatched by accelerate give what the whole model gives; parameters that are not here are refused."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import neuromanifold as nm
from neuromanifold.persample.rules.registry import find_rule
from tests.distributed import runs
from tests.distributed.launch import values
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


def test_offloaded_parameters_are_refused_unless_they_are_left_out(tmp_path: Path) -> None:
    """As where adapters are of interest, and the frozen model is offloaded."""
    model = network()
    accelerate.cpu_offload(model.table, execution_device=torch.device("cpu"))
    accelerate.cpu_offload(model.layer, execution_device=torch.device("cpu"))
    with pytest.raises(ValueError, match=r"`parameters` must be in memory, got 'table.weight' on the meta device"):
        nm.fisher_diagonal(model, DATA)
    expected, patterns = nm.fisher_diagonal(network(), DATA), ["norm.*", "head.*"]
    found = nm.fisher_diagonal(model, DATA, parameters=patterns, checkpoint=tmp_path / "state")
    assert list(found) == ["norm.weight", "norm.bias", "head.weight", "head.bias"]
    assert all(torch.equal(found.sums[name], expected.sums[name]) for name in found)


def test_models_sharded_over_processes_are_refused() -> None:
    """But for FSDP2 in fisher_diagonal: gradients are those of a shard, or were summed before they could be squared."""
    sharded = "ValueError: `model` must be whole on each process, got '0.weight' sharded over processes"
    fully = "ValueError: `model` must be whole on each process, got FullyShardedDataParallel"
    for found in values(2, runs.several, [(runs.fully_sharded, new, run) for new in (True, False) for run in range(3)]):
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
