"""Recording along real runs of the Trainer of transformers and of Lightning."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import neuromanifold as nm
from neuromanifold.uses.training.callbacks import FisherRecorder, lightning_callback, record_with_trainer


def test_recording_by_hand_keeps_traces_and_files(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, data = nn.Linear(3, 4), [torch.randn(5, 3)]
    recorder = FisherRecorder(data, every=2, folder=tmp_path / "fisher", estimator=nm.Exact())
    for step in range(1, 6):
        if recorder.is_due(step):
            recorder.record(model, step)
            assert not recorder.is_due(step)
    fim = nm.fisher_diagonal(model, data, nm.Exact())
    assert [one["step"] for one in recorder.history] == [2, 4]
    assert recorder.history[0]["fisher/trace"] == fim.trace.value
    saved = nm.load(tmp_path / "fisher" / "step-4.safetensors")
    assert torch.equal(saved["weight"], fim["weight"])


def test_the_trainer_of_transformers_logs_the_trace_and_trains_as_without(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="needs neuromanifold[hf]")
    pytest.importorskip("accelerate", reason="needs neuromanifold[trainer]")
    size = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 12}
    samples = [{"input_ids": torch.tensor([i % 9, 1, 2]), "labels": i % 2} for i in range(16)]
    batch = {"input_ids": torch.stack([one["input_ids"] for one in samples[:4]])}  # type: ignore[misc]

    def trained(record: bool) -> tuple[Any, FisherRecorder | None]:
        torch.manual_seed(0)
        model = transformers.BertForSequenceClassification(
            transformers.BertConfig(vocab_size=11, max_position_embeddings=16, **size)
        )
        options = {"max_steps": 4, "per_device_train_batch_size": 4, "report_to": "none", "save_strategy": "no"}
        arguments = transformers.TrainingArguments(tmp_path, use_cpu=True, disable_tqdm=True, **options)
        trainer = transformers.Trainer(model, arguments, train_dataset=samples)
        recorder = record_with_trainer(trainer, [batch], every=2, folder=tmp_path / "f") if record else None
        trainer.train()
        return trainer, recorder

    trainer, recorder = trained(True)
    assert recorder is not None
    logged = [one for one in trainer.state.log_history if "fisher/trace" in one]
    assert [one["step"] for one in logged] == [2, 4]
    assert [one["fisher/trace"] for one in logged] == [one["fisher/trace"] for one in recorder.history]
    assert nm.load(tmp_path / "f" / "step-2.safetensors").trace.value == logged[0]["fisher/trace"]
    plain, _ = trained(False)
    pairs = zip(trainer.model.parameters(), plain.model.parameters(), strict=True)
    assert all(torch.equal(p, q) for p, q in pairs)


@pytest.mark.filterwarnings("ignore")  # of Lightning itself
def test_lightning_logs_the_trace(tmp_path: Path) -> None:
    lightning = pytest.importorskip("lightning.pytorch", reason="needs neuromanifold[lightning]")
    loggers = pytest.importorskip("lightning.pytorch.loggers")

    class Module(lightning.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(x)  # type: ignore[no-any-return]

        def training_step(self, batch: Any) -> torch.Tensor:
            return cross_entropy(self(batch[0]), batch[1])

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), 0.1)

    samples = torch.utils.data.TensorDataset(torch.randn(20, 3), torch.randint(4, (20,)))
    data = torch.utils.data.DataLoader(samples, batch_size=5)
    callback = lightning_callback([samples[:5]], every=2)
    logger = loggers.CSVLogger(tmp_path)
    trainer = lightning.Trainer(
        max_steps=4, accelerator="cpu", logger=logger, callbacks=[callback], enable_progress_bar=False,
        enable_checkpointing=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(Module(), data)
    assert [one["step"] for one in callback.recorder.history] == [2, 4]
    assert "fisher/trace" in (Path(logger.log_dir) / "metrics.csv").read_text()


@pytest.mark.filterwarnings("ignore")  # of Lightning itself
def test_the_example_for_lightning_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("lightning", reason="needs neuromanifold[lightning]")
    page = (Path(__file__).parents[2] / "docs/uses/callbacks.md").read_text()
    (example,) = re.findall(r"^```py\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    monkeypatch.chdir(tmp_path)
    found: dict[str, Any] = {}
    exec(compile(example, "page", "exec"), found)
    assert [one["step"] for one in found["callback"].recorder.history] == [2, 4]


def test_wrong_calls() -> None:
    with pytest.raises(TypeError, match=r"`data`.*an iterator.*list\(data\)"):
        FisherRecorder(iter([torch.zeros(1, 3)]))
    with pytest.raises(ValueError, match="`every` must be between 1"):
        FisherRecorder([], every=0)
    pytest.importorskip("transformers", reason="needs neuromanifold[hf]")
    with pytest.raises(TypeError, match=r"`trainer` must be a transformers\.Trainer, got Linear"):
        record_with_trainer(nn.Linear(1, 1), [])
