"""Merged models are what the equations say, entry by entry; the rest is done by a stated rule."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import neuromanifold as nm
from neuromanifold.results.sharded import parse_size
from neuromanifold.uses.merging.checkpoints import source_of
from neuromanifold.uses.merging.merge import Merged
from tests.cli.commands import bad, good
from tests.uses.models import bert, diagonal, moved, network, tokens

State = dict[str, Tensor]


def states(width: int = 4, count: int = 3) -> tuple[list[State], list[nm.DiagonalFisher]]:
    models = [moved(network(width), 0.2, seed) for seed in range(count)]
    return [model.state_dict() for model in models], [diagonal(model, 5 + i) for i, model in enumerate(models)]


def entries(values: list[Tensor]) -> list[tuple[float, ...]]:
    return list(zip(*(value.flatten().tolist() for value in values), strict=True))


def by_hand(models: list[State], fims: list[nm.DiagonalFisher], weights: list[float], name: str) -> Tensor:
    merged = []
    for theta, f in zip(entries([m[name] for m in models]), entries([f[name] for f in fims]), strict=True):
        total = sum(w * fi for w, fi in zip(weights, f, strict=True))
        if total == 0:
            merged.append(sum(w * t for w, t in zip(weights, theta, strict=True)) / sum(weights))
        else:
            merged.append(sum(w * fi * t for w, fi, t in zip(weights, f, theta, strict=True)) / total)
    return torch.tensor(merged, dtype=torch.float64).view_as(models[0][name])


@pytest.mark.parametrize("count", [2, 3, 5])
@pytest.mark.parametrize("width", [1, 5])
def test_fisher_weighted_averages_are_those_of_the_loop(count: int, width: int) -> None:
    models, fims = states(width, count)
    fims[0].sums["0.bias"][0] = 0.0
    for fim in fims:
        fim.sums["2.weight"][0] = 0.0
    weights = [0.5 + i for i in range(count)]
    merged = nm.merge(models, fims, weights=weights)
    assert list(merged) == list(models[0])
    for name, values in merged.items():
        torch.testing.assert_close(values, by_hand(models, fims, weights, name), rtol=1e-12, atol=1e-15)
    unweighted = nm.merge(models, fims)
    assert not torch.allclose(unweighted["2.bias"], merged["2.bias"])  # a merge that ignored weights would be seen


def test_sums_and_means_weigh_differently() -> None:
    models, (a, b) = states(count=2)
    b = nm.fisher_diagonal(moved(network(), 0.2, 1), [torch.randn(50, 3, dtype=torch.float64)], nm.Exact())
    by_mean, by_sum = nm.merge(models, [a, b]), nm.merge(models, [a.sum, b.sum])
    torch.testing.assert_close(by_sum["0.bias"], by_hand(models, [a.sum, b.sum], [1, 1], "0.bias"))
    assert not torch.allclose(by_sum["0.bias"], by_mean["0.bias"])
    with pytest.raises(ValueError, match="in the same view, got per sample and summed over samples"):
        nm.merge(models, [a, b.sum])


def test_tiny_importances_do_not_underflow() -> None:
    models = [{"w": torch.tensor([1.0])}, {"w": torch.tensor([3.0])}]
    _, (fim, _) = states(count=2)
    tiny = [
        nm.DiagonalFisher({"w": torch.tensor([f])}, {"w": torch.zeros(1)}, 1, 1, fim.provenance) for f in (1e-38, 3e-38)
    ]
    torch.testing.assert_close(nm.merge(models, tiny)["w"], torch.tensor([2.5]))


def test_averages_and_task_arithmetic() -> None:
    models, _ = states()
    base = network(seed=9).state_dict()
    average = nm.merge(models, method="average", weights=[1, 1, 2])
    arithmetic = nm.merge(models, method="task-arithmetic", base=base, scale=0.4, weights=[1, 1, 2])
    for name in base:
        a, b, c = (model[name] for model in models)
        torch.testing.assert_close(average[name], (a + b + 2 * c) / 4)
        torch.testing.assert_close(arithmetic[name], base[name] + 0.4 * (a + b + 2 * c - 4 * base[name]))


@pytest.mark.parametrize("by_fisher", [False, True])
def test_ties(by_fisher: bool) -> None:
    """Trim, elect, mean, one entry after the other."""
    models, fims = states()
    base = network().state_dict()
    merged = nm.merge(models, fims if by_fisher else (), method="ties", base=base, density=0.4, scale=0.7)
    for name, start in base.items():
        changes = [model[name] - start for model in models]
        saliencies = [c.square() * (f[name] if by_fisher else 1) for c, f in zip(changes, fims, strict=True)]
        kept = round(0.4 * start.numel())
        trimmed = []
        for change, saliency in zip(changes, saliencies, strict=True):
            order = sorted(range(start.numel()), key=saliency.flatten().tolist().__getitem__, reverse=True)[:kept]
            trimmed.append([c if i in order else 0.0 for i, c in enumerate(change.flatten().tolist())])
        expected = []
        for first, *values in zip(start.flatten().tolist(), *trimmed, strict=True):
            agreeing = [value for value in values if value * sum(values) > 0]
            expected.append(first + 0.7 * (sum(agreeing) / len(agreeing) if agreeing else 0.0))
        torch.testing.assert_close(merged[name].flatten(), torch.tensor(expected, dtype=torch.float64))


def test_buffers_integers_and_what_has_no_fisher() -> None:
    def norm(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)).double()

    models = [norm(0), norm(1)]
    for i, model in enumerate(models):
        model[1].running_mean += i  # type: ignore[index, operator, union-attr]
        model[1].num_batches_tracked += i  # type: ignore[index, operator, union-attr]
        model[2].requires_grad_(False)  # type: ignore[index]
    fims = [nm.fisher_diagonal(model.eval(), [torch.randn(6, 3, dtype=torch.float64)]) for model in models]
    merged = nm.merge(models, fims)
    assert merged.how["1.running_mean"] == merged.how["2.weight"] == "averaged, without a Fisher"
    assert merged.how["1.num_batches_tracked"] == "from the first model: integers that differ"
    assert float(merged["1.running_mean"][0].detach()) == 0.5
    assert int(merged["1.num_batches_tracked"]) == 0
    lines = str(merged).splitlines()
    assert any(line.startswith("averaged, without a Fisher  ") and "1.running_mean" in line for line in lines)
    models[0].load_state_dict(dict(merged))


def test_heads_that_differ_are_listed_or_taken_from_the_first() -> None:
    a, b = network().state_dict(), network().state_dict()
    b |= {"2.weight": torch.zeros(7, 4), "2.bias": torch.zeros(7), "extra": torch.zeros(1)}
    with pytest.raises(ValueError, match=r"2\.weight is \[2, 4\] in .*, \[7, 4\] in .*; 2\.bias .*; extra is in"):
        nm.merge([a, b], method="average")
    merged = nm.merge([a, b], method="average", differing="first")
    assert torch.equal(merged["2.weight"], a["2.weight"])
    assert "extra" not in merged
    assert merged.how["extra"] == "left out: not in the first model"
    fims = [diagonal(network()).filter("0.*")] * 2
    assert nm.merge([a, b], fims, differing="first").how["0.weight"] == "fisher"


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_dtypes_are_those_of_the_first(dtype: torch.dtype) -> None:
    models, fims = states(count=2)
    low = [{name: value.to(dtype) for name, value in model.items()} for model in models]
    merged = nm.merge(low, fims)
    for name, value in merged.items():
        assert value.dtype == dtype
        expected = by_hand([{n: v.double() for n, v in m.items()} for m in low], fims, [1, 1], name)
        torch.testing.assert_close(value.double(), expected, rtol=0.01, atol=1e-5)


@pytest.fixture
def folders(tmp_path: Path) -> list[Path]:
    """Two models of transformers, one in shards, with results."""
    for i in range(2):
        model = moved(bert(), 0.1, i)
        model.save_pretrained(tmp_path / f"m{i}", max_shard_size="4KB" if i else "5GB")  # type: ignore[operator]
        nm.fisher_diagonal(model, tokens(), seed=i).save(tmp_path / f"f{i}.safetensors")
    (tmp_path / "m0" / "tokenizer.json").write_text("{}")
    (tmp_path / "m0" / "README.md").write_text("of the first model")
    assert (tmp_path / "m1" / "model.safetensors.index.json").is_file()
    return [tmp_path / "m0", tmp_path / "m1"]


@pytest.mark.parametrize("shard_size", ["5GB", "4KB"])
def test_folders_of_transformers(folders: list[Path], tmp_path: Path, shard_size: str) -> None:
    import transformers

    files = [tmp_path / f"f{i}.safetensors" for i in range(2)]
    out = tmp_path / "out"
    nm.merge(folders, files).save(out, shard_size)
    assert (out / "model.safetensors.index.json").is_file() == (shard_size == "4KB")
    assert (out / "tokenizer.json").is_file()
    assert not (out / "README.md").exists()
    load: Callable[..., Any] = transformers.BertForSequenceClassification.from_pretrained
    merged, *models = (load(folder) for folder in (out, *folders))
    fims = [nm.load(file) for file in files]
    for name, value in merged.state_dict().items():
        expected = by_hand([m.state_dict() for m in models], fims, [1, 1], name)
        torch.testing.assert_close(value.double(), expected, rtol=1e-5, atol=1e-7)
    notes = json.loads((out / "merge.json").read_text())
    assert notes["method"] == "fisher"
    assert notes["models"] == [str(folder) for folder in folders]
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


def test_one_tensor_is_read_at_a_time(folders: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No tensor of an input is alive when one of another name is read."""
    import weakref

    from neuromanifold.uses.merging import checkpoints

    opened, alive = checkpoints.safe_open, list[tuple[str, weakref.ref[Tensor]]]()

    class Watched:
        def __init__(self, *arguments: object, **keywords: object) -> None:
            self.file = opened(*arguments, **keywords)

        def __enter__(self) -> "Watched":
            self.inner = self.file.__enter__()
            return self

        def __exit__(self, *error: object) -> None:
            self.file.__exit__(*error)

        def __getattr__(self, name: str) -> object:
            return getattr(self.inner, name)

        def get_tensor(self, name: str) -> Tensor:
            plain = name.removeprefix("sum/")
            assert not [other for other, tensor in alive if other != plain and tensor() is not None]
            tensor: Tensor = self.inner.get_tensor(name)
            alive.append((plain, weakref.ref(tensor)))
            return tensor

    monkeypatch.setattr(checkpoints, "safe_open", Watched)
    merged = nm.merge(folders, [tmp_path / "f0.safetensors", tmp_path / "f1.safetensors"])
    assert not alive  # headers only
    merged.save(tmp_path / "out", shard_size="1KB")
    assert len(alive) == 4 * len(merged) + len(merged)  # the first model's tensor is read for its dtype as well


def test_a_failure_leaves_nothing(folders: list[Path], tmp_path: Path) -> None:
    class Broken(Merged):
        def __getitem__(self, name: str) -> Tensor:
            raise RuntimeError("disk")

    good_one = nm.merge(folders, method="average")
    broken = Broken(**good_one.__dict__)
    with pytest.raises(RuntimeError, match="disk"):
        broken.save(tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["f0.safetensors", "f1.safetensors", "m0", "m1"]
    with pytest.raises(FileExistsError, match="a new folder, or an empty one"):
        good_one.save(folders[0])
    with pytest.raises(ValueError, match=r"`shard_size` must be a size such as 5GB or 500MB, got 'big'"):
        good_one.save(tmp_path / "out", "big")


def test_the_command(folders: list[Path], tmp_path: Path) -> None:
    files = [tmp_path / "f0.safetensors", tmp_path / "f1.safetensors"]
    text = good("merge", *folders, "--fisher", *files, "-o", tmp_path / "out", "--no-progress")
    assert "Merged (fisher)" in text
    good("merge", *folders, "-f", files[0], "-f", files[1], "-o", tmp_path / "again", "--shard-size", "4KB")
    a, b = source_of(tmp_path / "out"), source_of(tmp_path / "again")
    assert set(a) == set(b)
    assert all(torch.equal(a[name], b[name]) for name in a)
    good("merge", *folders, "--method", "average", "-w", 1, "-w", 3, "-o", tmp_path / "average")
    good("merge", *folders, "--method", "ties", "--base", folders[0], "-o", tmp_path / "ties")
    assert "a result for each of 2 models, got 1" in bad("merge", *folders, "-f", files[0], "-o", tmp_path / "x")
    assert "two models or more, got 1" in bad("merge", folders[0], "-o", tmp_path / "x")
    assert "weights of a model" in bad("merge", *folders, "-f", folders[0] / "model.safetensors", "-f", files[1],
                                       "-o", tmp_path / "x")  # fmt: skip
    assert not (tmp_path / "x").exists()


def test_bad_input(tmp_path: Path) -> None:
    models, fims = states(count=2)
    with pytest.raises(ValueError, match="two models or more, got 1"):
        nm.merge(models[:1], fims[:1])
    with pytest.raises(ValueError, match=r"`fishers` must be a result for each of 2 models, got 0\..*average"):
        nm.merge(models)
    with pytest.raises(ValueError, match="left out for method 'average'"):
        nm.merge(models, fims, method="average")
    with pytest.raises(ValueError, match=r"0\.weight has shape \[4, 3\] instead of \[5, 3\]"):
        nm.merge(models, [fims[0], diagonal(network(5))])
    with pytest.raises(ValueError, match=r"results that all have '2\.weight', or none of them"):
        nm.merge(models, [fims[0], fims[1].filter("0.*")])
    for weights in ([1], [1, -1], [0, 1], [1, float("inf")]):
        with pytest.raises(ValueError, match="`weights"):
            nm.merge(models, fims, weights=weights)
    with pytest.raises(ValueError, match="`base` must be given for method 'ties'"):
        nm.merge(models, method="ties")
    with pytest.raises(ValueError, match="`base` must be left out"):
        nm.merge(models, fims, base=models[0])
    with pytest.raises(ValueError, match="`method` must be 'fisher', 'average', 'task-arithmetic' or 'ties'"):
        nm.merge(models, fims, method="slerp")
    with pytest.raises(ValueError, match="`density`"):
        nm.merge(models, method="ties", base=models[0], density=0)
    with pytest.raises(TypeError, match=r"`models\[1\]` must be a folder"):
        nm.merge([models[0], 3], method="average")
    with pytest.raises(FileNotFoundError, match="a folder or a file that exists"):
        nm.merge([tmp_path / "none", tmp_path], method="average")
    (tmp_path / "weights.bin").write_bytes(b"PK")
    with pytest.raises(ValueError, match="A pickle can run any code"):
        nm.merge([tmp_path / "weights.bin"] * 2, method="average")
    with pytest.raises(ValueError, match=r"model\.safetensors or model\.safetensors\.index\.json"):
        nm.merge([tmp_path, tmp_path], method="average")
    save_file({"a": torch.zeros(2)}, tmp_path / "adapter_model.safetensors")
    with pytest.raises(ValueError, match=r"an adapter.*merge_and_unload"):
        nm.merge([tmp_path, tmp_path], method="average")
    (tmp_path / "broken.safetensors").write_bytes(b"\x10\0\0\0\0\0\0\0{")
    with pytest.raises(nm.FileError, match="truncated or damaged"):
        nm.merge([tmp_path / "broken.safetensors"] * 2, method="average")
    fims[1].sums["0.bias"][0] = float("nan")
    with pytest.raises(ValueError, match=r"finite and not negative, got other numbers in '0\.bias'"):
        nm.merge(models, fims)["0.bias"]


def test_sizes() -> None:
    assert [parse_size(text) for text in ("5GB", "500 mb", "4KB", "12", "1.5G")] == [
        5 * 10**9, 500 * 10**6, 4000, 12, 1_500_000_000
    ]  # fmt: skip
