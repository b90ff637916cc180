"""What processes do with tensor-parallel models; each function takes the rank first, and compares with the whole."""

import random
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module

import neuromanifold as nm
from neuromanifold.persample.gradients import Product
from neuromanifold.persample.shards.tensor_parallel import TensorParallel
from tests.distributed import runs
from tests.distributed.sharded_runs import check_wrong_rule, compare, sequences
from tests.language.families import CAUSAL, LLAMA, LOOP, make
from tests.run.killed_runs import BrokenError

FOUR_HEADS: dict[str, Any] = {"num_hidden_layers": 2, "num_key_value_heads": 4}
FAMILIES: dict[str, Callable[[], Any]] = {
    "Llama": partial(CAUSAL["Llama"], **FOUR_HEADS),
    "Mixtral": partial(CAUSAL["Mixtral"], **FOUR_HEADS),
    "Qwen2": partial(CAUSAL["Qwen2"], **FOUR_HEADS),
    "Qwen3": partial(make, "Qwen3ForCausalLM", "Qwen3Config", LLAMA, head_dim=4, **FOUR_HEADS),
}
Plan = dict[str, Any]
WHOLE = {"output_layouts": Replicate()}


def parallel(model: Any, plan: Plan) -> Any:
    """The model in tensor parallelism over all processes."""
    return parallelize_module(model, init_device_mesh("cpu", (dist.get_world_size(),)), plan)


def network() -> nn.Sequential:
    """Eight features between the layers that are divided, and a norm that each process has all of."""
    torch.manual_seed(0)
    inner = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 7), nn.LayerNorm(7))
    return nn.Sequential(inner, nn.Tanh(), nn.Linear(7, 5))


def layers() -> Plan:
    """A sharded bias and a replicated one; a head of five classes, which no number of processes divides."""
    return {"0.0": ColwiseParallel(), "0.2": RowwiseParallel(), "2": ColwiseParallel(**WHOLE)}


class Block(nn.Module):
    """Attention and a network of two layers, over an embedding."""

    def __init__(self, heads: int = 4, width: int = 8) -> None:
        super().__init__()
        self.heads, self.size = heads, width // heads
        self.embed, self.at = nn.Embedding(11, width), nn.Embedding(8, width)
        self.norm, self.norm2 = nn.LayerNorm(width), nn.RMSNorm(width)
        self.q, self.k, self.v = (nn.Linear(width, width) for _ in range(3))
        self.o, self.up, self.down = nn.Linear(width, width), nn.Linear(width, 12), nn.Linear(12, width)
        self.head = nn.Linear(width, 11, bias=False)

    def attention(self, x: Tensor) -> Tensor:
        """Of the heads that this process has."""
        q, k, v = (layer(x).unflatten(-1, (-1, self.size)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        found = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o(found.transpose(1, 2).flatten(-2))  # type: ignore[no-any-return]

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids) + self.at(torch.arange(ids.shape[1]).expand_as(ids))
        x = x + self.attention(self.norm(x))
        x = x + self.down(torch.tanh(self.up(self.norm2(x))))
        logits: Tensor = self.head(x)
        return logits


def block(heads: int = 4) -> Block:
    torch.manual_seed(0)
    return Block(heads).double()


def divided() -> Plan:
    into = {name: ColwiseParallel() for name in ("q", "k", "v", "up")}
    out = {name: RowwiseParallel() for name in ("o", "down")}
    return {
        **into,
        **out,
        "embed": RowwiseParallel(input_layouts=Replicate()),
        "at": ColwiseParallel(**WHOLE),
        "head": ColwiseParallel(**WHOLE),
    }


def along_the_sequence() -> Plan:
    """What is between the layers is divided by positions, and norms see some of them."""
    into = {name: ColwiseParallel(input_layouts=Shard(1)) for name in ("q", "k", "v", "up")}
    out = {name: RowwiseParallel(output_layouts=Shard(1)) for name in ("o", "down")}
    embed = RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1))
    head = ColwiseParallel(input_layouts=Shard(1), **WHOLE)
    norms = {name: SequenceParallel() for name in ("norm", "norm2")}
    return {**into, **out, **norms, "embed": embed, "at": ColwiseParallel(output_layouts=Shard(1)), "head": head}


def ids(number: int) -> list[tuple[Tensor, Tensor]]:
    """Batches of sequences of four or eight tokens, with labels."""
    found = []
    for i in range(number):
        tokens = torch.randint(0, 11, (3, 8 if i % 2 else 4), generator=torch.Generator().manual_seed(i))
        found.append((tokens, tokens.roll(1, 1)))
    return found


def equal(make: Callable[[], Any], divide: Plan | Callable[[Any], Any], data: Any, **options: Any) -> nm.DiagonalFisher:
    """Compare the diagonal of a tensor-parallel model with that of the whole one, in this process alone."""
    expected = nm.fisher_diagonal(make(), data, distributed=False, **options)
    model = divide(make()) if callable(divide) else parallel(make(), divide)
    before = {name: here(p).clone() for name, p in model.named_parameters()}
    found: Any = nm.fisher_diagonal(model, data, **options)
    assert type(found).__name__ == "ShardedFisher"
    for name, p in model.named_parameters():
        assert torch.equal(here(p), before[name])
        assert p.grad is None
        assert name not in found.sums or found.sums[name].to_local().shape == before[name].shape
    compare(found.gathered(), expected)
    return expected


def here(parameter: Any) -> Tensor:
    found: Tensor = parameter.detach()
    return found.to_local() if hasattr(found, "to_local") else found


def estimators(_: int, several: list[dict[str, Any]]) -> None:
    for options in several:
        equal(network, layers(), runs.batches(3), **options)


def attention(_: int, several: list[dict[str, Any]], number: int = 2) -> None:
    for options in several:
        equal(block, divided(), ids(number), **options)


def sequence_parallel(_: int) -> None:
    """No square of tokens below: positions are not followed through their division."""
    equal(block, along_the_sequence(), ids(2), granularity="sample")
    equal(block, along_the_sequence(), ids(2), estimator=nm.Empirical())


def drawn(seed: int) -> tuple[Callable[[], nn.Sequential], Plan, list[Any], dict[str, Any]]:
    """A network with layers, sizes and a plan drawn at random; its data, and an estimator."""
    chance = random.Random(seed)
    width, sequences_of = chance.choice((3, 4, 6, 8)), chance.choice((0, 1, 2, 4))
    made: list[Callable[[], nn.Module]] = []
    plan: Plan = {}
    tokens = sequences_of > 0 and chance.random() < 0.7
    if tokens:
        made.append(partial(nn.Embedding, 11, width, padding_idx=chance.choice((None, 0, 3))))
        if way := chance.choice((None, RowwiseParallel(input_layouts=Replicate()), ColwiseParallel(**WHOLE))):
            plan["0"] = way
    first = width
    for _ in range(chance.randint(1, 4)):
        kind, place = chance.choice(("alone", "alone", "pair", "norm")), len(made)
        if kind == "norm":
            made.append(partial(chance.choice((nn.LayerNorm, nn.RMSNorm)), width))
            continue
        inner, before, width = chance.choice((4, 8)), width, chance.choice((3, 4, 5, 8))
        bias, further = chance.random() < 0.7, chance.choice((nn.Tanh, nn.ReLU))
        if kind == "pair":
            made += [partial(nn.Linear, before, inner, bias=bias), further, partial(nn.Linear, inner, width)]
            plan |= {f"{place}": ColwiseParallel(), f"{place + 2}": RowwiseParallel()}
        else:
            made += [partial(nn.Linear, before, width, bias=bias), further]
            if way := chance.choice((None, RowwiseParallel(input_layouts=Replicate()), ColwiseParallel(**WHOLE))):
                plan[f"{place}"] = way
    classes = chance.choice((2, 3, 5))
    plan[f"{len(made)}"] = chance.choice((RowwiseParallel(input_layouts=Replicate()), ColwiseParallel(**WHOLE)))
    made.append(partial(nn.Linear, width, classes))

    def make() -> nn.Sequential:
        torch.manual_seed(seed)
        return nn.Sequential(*(one() for one in made)).double()

    generator, batches, samples = torch.Generator().manual_seed(seed), [], chance.choice((1, 2, 5))
    shape = (samples, *([sequences_of] if sequences_of else []))
    for _ in range(3):
        noise = torch.randn(*shape, first, generator=generator, dtype=torch.float64)
        x = torch.randint(0, 11, shape, generator=generator) if tokens else noise
        batches.append((x, torch.randint(0, classes, shape, generator=generator)))
    settings: list[dict[str, Any]] = [{}, {"granularity": "batch"}, {"granularity": "sample"}]
    estimators = (nm.Exact(), nm.Empirical(), nm.MonteCarlo(2))
    return make, plan, batches, chance.choice([*settings, *({"estimator": one} for one in estimators)])


def random_plans(_: int, first: int, number: int) -> None:
    for seed in range(first, first + number):
        make, plan, data, options = drawn(seed)
        equal(make, plan, data, **options)


class Gated(nn.Module):
    """A parameter that a module uses itself, which no rule covers if it is a DTensor."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 6))

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = nn.functional.linear(x, self.weight).sigmoid()
        return found


def gated() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(Gated(), nn.Linear(8, 5)).double()


def divide_gated(model: Any) -> Any:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model[0].weight = nn.Parameter(distribute_tensor(model[0].weight.data, mesh, [Shard(0)]))
    model[0].register_forward_pre_hook(lambda _, args: (DTensor.from_local(args[0], mesh, [Replicate()]),))
    return parallelize_module(model, mesh, {"1": RowwiseParallel()})


def without_rule(_: int) -> None:
    """Left to autograd: per batch, or one sample at a time."""
    data = [(x.double(), y) for x, y in runs.batches(2)]
    expected = nm.fisher_diagonal(gated(), data, nm.Exact(), distributed=False)
    found: Any = nm.fisher_diagonal(divide_gated(gated()), data, nm.Exact())
    assert found.provenance.granularity == {"0.weight": "sample, one by one", "1.weight": "sample", "1.bias": "sample"}
    for name, value in found.gathered().sums.items():
        torch.testing.assert_close(value, expected.sums[name])
    found = nm.fisher_diagonal(divide_gated(gated()), data)
    assert found.provenance.granularity == {"0.weight": "batch", "1.weight": "sample", "1.bias": "sample"}
    equal(gated, divide_gated, data, granularity="batch")


def uneven() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 5))


def tied() -> Block:
    model = block()
    model.head.weight = model.embed.weight
    return model


def divide_tied(model: Block) -> Block:
    """`parallelize_module` takes the two apart."""
    parallel(model, divided())
    model.head.weight = model.embed.weight
    return model


def kinds(_: int) -> None:
    """Uneven parts; outputs and logits that stay DTensors; tied weights; a selection; bfloat16; replicated layers."""
    stay = {"use_local_output": False}
    columns, rows = ColwiseParallel(**stay), RowwiseParallel(output_layouts=Shard(-1), **stay)
    equal(uneven, {"0": columns, "2": rows}, runs.batches(3))
    equal(tied, divide_tied, ids(2))
    equal(network, layers(), runs.batches(3), parameters=["0.2.*", "0.3.weight"])
    equal(network, {"0.0": ColwiseParallel(**WHOLE)}, runs.batches(3), parameters=["0.3.*"])
    low = [(x.bfloat16(), y) for x, y in runs.batches(3)]
    expected = nm.fisher_diagonal(network().bfloat16(), low, distributed=False)
    found: Any = nm.fisher_diagonal(parallel(network().bfloat16(), layers()), low)
    for name, value in found.gathered().sums.items():
        assert value.dtype == torch.float32
        assert torch.linalg.vector_norm(value - expected.sums[name]) < 0.03 * torch.linalg.vector_norm(value)
    for granularity in ("auto", "batch"):
        options: dict[str, Any] = {"granularity": granularity}
        trace = nm.fisher_trace(parallel(block(), divided()), ids(3), **options)
        of_one = nm.fisher_trace(block(), ids(3), distributed=False, **options)
        assert abs(trace.value / of_one.value - 1) < 1e-9
        assert abs(trace.stderr / of_one.stderr - 1) < 1e-9
    found = nm.fisher_diagonal(parallel(network(), layers()), runs.batches(40), rtol=0.2)
    compare(found.gathered(), nm.fisher_diagonal(network(), runs.batches(40), distributed=False, rtol=0.2))
    assert 0 < found.provenance.batches < 40
    trace = nm.fisher_trace(parallel(network(), layers()), runs.batches(40), rtol=0.2)
    of_one = nm.fisher_trace(network(), runs.batches(40), rtol=0.2, distributed=False)
    assert 0 < trace.count == of_one.count < 600
    assert trace.value == pytest.approx(of_one.value, rel=1e-6)


def language(rank: int, folder: Path, names: list[str], options: dict[str, Any]) -> None:
    """Models that transformers has divided by its own plans, on loading."""
    from transformers.distributed import DistributedConfig

    for name in names:
        make = FAMILIES[name]
        expected = nm.fisher_diagonal(make(), sequences()[:3], distributed=False, **options)
        if not rank:
            make().save_pretrained(folder / name)
        dist.barrier()
        more = LOOP if name == "Mixtral" else {}
        config = DistributedConfig(tp_size=dist.get_world_size())
        kind: Any = type(make())
        model = kind.from_pretrained(folder / name, distributed_config=config, dtype=torch.float64, **more).eval()
        found: Any = nm.fisher_diagonal(model, sequences()[:3], **options)
        ours, theirs = found.provenance.granularity, expected.provenance.granularity
        left = {key for key in ours if ours[key] in ("batch", "sample, one by one")}
        assert left == {key for key in ours if any(text in key for text in ("experts", "q_norm", "k_norm"))}
        for key, value in found.gathered().sums.items():
            if ours[key] == theirs[key] or options:
                torch.testing.assert_close(value, expected.sums[key], rtol=1e-5, atol=1e-9)


def wrong_rule(rank: int) -> None:
    """A wrong rule on one process of a tensor-parallel model."""
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    check_wrong_rule(rank, lambda model: parallel(model, plan))


def planted(rank: int) -> None:
    """A wrong square on one process, which no verification of gradients sees, makes the comparison fail."""
    add_squares = Product.add_squares

    def wrong(self: Product, to: Any) -> None:
        add_squares(Product(1.01 * self.left, self.right, self.shape, self.turned), to)

    data = runs.batches(2)
    expected = nm.fisher_diagonal(network(), data, distributed=False)
    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setattr(Product, "add_squares", wrong)
        found: Any = nm.fisher_diagonal(parallel(network(), layers()), data)
    with pytest.raises(AssertionError, match=r"0\.0\.weight"):
        compare(found.gathered(), expected)


class Rounded(nn.Module):
    """Logits that differ a little between processes, or (`much`) are others."""

    def __init__(self, much: bool) -> None:
        super().__init__()
        self.inner, self.factor = parallel(network(), layers()), 1 + (0.5 if much else 3e-7) * dist.get_rank()

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.inner(x) * self.factor
        return found


def rounded(rank: int) -> None:
    """All processes have the same cotangents, bit for bit, where their logits differ by rounding."""
    drawn, sent = list[Tensor](), list[Tensor]()
    agreed = TensorParallel.agreed

    def watched(self: TensorParallel, cotangent: Tensor) -> Tensor:
        drawn.append(cotangent.clone())
        sent.append(agreed(self, cotangent).clone())
        return sent[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TensorParallel, "agreed", watched)
        nm.fisher_diagonal(Rounded(False), runs.batches(3))
    assert len(sent) == 3
    for own, mine in zip(drawn, sent, strict=True):
        first = mine.clone()
        dist.broadcast(first, 0)
        assert torch.equal(first, mine)
        assert torch.equal(own, mine) == (rank == 0)


def refused(rank: int) -> list[str]:
    """Arguments and models that are refused with a message that names them."""
    model, block_of = parallel(network(), layers()), {**divided(), "head": ColwiseParallel()}
    world = dist.get_world_size()
    grid, flat = init_device_mesh("cpu", (1, world)), uneven()
    flat[0].weight = nn.Parameter(distribute_tensor(flat[0].weight.data, grid, [Replicate(), Shard(0)]))
    norm = nn.Sequential(nn.Linear(6, 8 * world), nn.LayerNorm(8), nn.Linear(8 * world, 5))
    sampler, unlabelled = runs.loader(rank, 32, world), [x for x, _ in ids(2)]
    other = runs.batches(3)[1 + rank :][:1]
    rows: dict[str, Any] = {"error_bars": "rows"}
    functions: list[Any] = [nm.fisher_operator, nm.fisher_kronecker, lambda model, _: nm.RunningFisher(model)]
    cases: list[tuple[str, Callable[[], Any]]] = [
        ("`passes` must be left out", lambda: nm.fisher_diagonal(model, runs.batches(2), passes=1.5)),
        ("`distributed` must be left out", lambda: nm.fisher_diagonal(model, runs.batches(2), distributed=False)),
        ("`error_bars` must be 'auto', True or False", lambda: nm.fisher_diagonal(model, runs.batches(2), **rows)),
        ("`data` must be the same on all", lambda: nm.fisher_diagonal(model, sampler)),
        ("`data` must be different", lambda: nm.fisher_diagonal(model, runs.batches(2), distributed="own data")),
        ("in float16", lambda: nm.fisher_diagonal(parallel(network().half(), layers()), runs.batches(2))),
        (f"on a mesh of 1x{world} for {world}", lambda: nm.fisher_diagonal(flat, runs.batches(2))),
        ("`logits` must be the same", lambda: nm.fisher_diagonal(parallel(block(), block_of), unlabelled)),
        ("`data` must be the same batches", lambda: nm.fisher_diagonal(model, runs.batches(2 + rank))),
        ("`data` must be the same batches", lambda: nm.fisher_diagonal(model, [*runs.batches(1), *other])),
        ("`logits` must be the same", lambda: nm.fisher_diagonal(Rounded(True), runs.batches(2))),
        (
            "different ones for '1.weight', '1.bias'",
            lambda: nm.fisher_diagonal(
                parallel(norm, {"0": ColwiseParallel(), "2": RowwiseParallel()}), runs.batches(2)
            ),
        ),
        *(("whole on each", partial(function, model, runs.batches(2))) for function in functions),
    ]
    for text, run in cases:
        with pytest.raises(ValueError, match=text):
            run()
    return [text for text, _ in cases]


def saved(_: int, folder: Path) -> None:
    """Whole parameters by name, and no process with all of them."""
    data, path = runs.batches(4), folder / "fim.safetensors"
    model = parallel(network(), layers())
    parts = [nm.fisher_diagonal(model, data, shard=(i, 2)) for i in range(2)]
    (parts[0] + parts[1]).save(path)
    dist.barrier()
    expected = nm.fisher_diagonal(network(), data, distributed=False)
    compare(nm.load(path), expected, same_run=False)
    assert abs(float((parts[0] + parts[1]).trace) / float(expected.trace) - 1) < 1e-6
    assert sorted(entry.name for entry in folder.iterdir())[-1] == "fim.safetensors.index.json"


def checkpointed(rank: int, folder: Path, number: int, at: int, trace: bool = False) -> Any:
    """A run that ends before batch `at` in the last process (-1: it does not end), and keeps every batch."""

    def data() -> Iterator[Any]:
        for i, batch in enumerate(runs.batches(number)):
            if i == at and rank == dist.get_world_size() - 1:
                raise BrokenError(f"no batch {i}")
            yield batch

    model, checkpoint = parallel(network(), layers()), nm.Checkpoint(folder / "state", every=0)
    if trace:
        return nm.fisher_trace(model, data(), checkpoint=checkpoint)
    nm.fisher_diagonal(model, data(), checkpoint=checkpoint).save(folder / "fim.safetensors")
    return None
