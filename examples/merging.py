"""Merge two fine-tuned models, each parameter weighted by its Fisher information.

python examples/merging.py
python examples/merging.py --data sst.csv imdb.csv \\
    --models textattack/bert-base-uncased-SST-2 textattack/bert-base-uncased-imdb
"""

import argparse
from pathlib import Path

import small
import transformers

import neuromanifold as nm

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--models", nargs="+", help="names on the Hugging Face hub, or folders of save_pretrained")
parser.add_argument("--data", nargs="+", help="a CSV with a column of texts for each model")
parser.add_argument("--out", type=Path, help="a folder for the merged model")
arguments = parser.parse_args()
models = arguments.models or [small.text_classifier(seed) for seed in range(2)]
tables = arguments.data or [small.reviews()] * 2
out = arguments.out or small.folder() / "merged"

fishers = []
for name, table in zip(models, tables, strict=True):
    loaded = nm.load_model(name)
    fishers.append(nm.fisher_diagonal(loaded.module, nm.load_data(table, loaded, batch_size=16)))

merged = nm.merge(models, fishers)
print(merged)
merged.save(out)  # a folder with configuration and tokenizer, tensor by tensor
model = transformers.AutoModelForSequenceClassification.from_pretrained(out)
print(f"{out} is read by transformers: {type(model).__name__}")
