"""Follow the Fisher information along fine-tuning, with the Trainer of transformers.

python examples/callback.py
python examples/callback.py --model distilbert-base-uncased --data reviews.csv
"""

import argparse

import small
import transformers

import neuromanifold as nm
from neuromanifold.uses.training.callbacks import record_with_trainer

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--model", help="a name on the Hugging Face hub, or a folder of save_pretrained")
parser.add_argument("--data", help="a CSV with columns text and label")
parser.add_argument("--steps", type=int, default=8)
arguments = parser.parse_args()

loaded = nm.load_model(arguments.model or small.text_classifier())
batches = list(nm.load_data(arguments.data or small.reviews(), loaded, batch_size=16))
samples = [{name: tensor[row] for name, tensor in batch.items()} for batch in batches for row in range(16)]
out = small.folder()
options = {"max_steps": arguments.steps, "save_strategy": "no", "report_to": "none", "disable_tqdm": True}
trainer = transformers.Trainer(
    loaded.module,
    transformers.TrainingArguments(str(out), use_cpu=True, **options),
    train_dataset=samples,
    data_collator=transformers.DataCollatorWithPadding(transformers.AutoTokenizer.from_pretrained(loaded.processor)),
)
record_with_trainer(trainer, batches[:1], every=arguments.steps // 4, folder=str(out / "fisher"))
trainer.train()
for one in trainer.state.log_history:
    if "fisher/trace" in one:
        print(f"step {one['step']}: tr F = {one['fisher/trace']:.4f} ± {one['fisher/stderr']:.4f}")
print("results of each step:", *sorted(path.name for path in (out / "fisher").iterdir()))
