"""The Fisher information of a text classifier, with error bars, into a file and a page.

python examples/text_classifier.py
python examples/text_classifier.py --model distilbert-base-uncased-finetuned-sst-2-english --data reviews.csv
"""

import argparse
from pathlib import Path

import small

import neuromanifold as nm

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--model", help="a name on the Hugging Face hub, or a folder of save_pretrained")
parser.add_argument("--data", help="a CSV with a column of texts")
parser.add_argument("--out", type=Path, help="a folder for the results")
arguments = parser.parse_args()
out = arguments.out or small.folder()
out.mkdir(parents=True, exist_ok=True)

model = nm.load_model(arguments.model or small.text_classifier())
data = nm.load_data(arguments.data or small.reviews(), model, batch_size=16)
fim = nm.fisher_diagonal(model.module, data, progress=True)

print(fim)
print(f"tr F = {fim.trace.value:.4f} ± {fim.trace.stderr:.4f}, over {fim.count} texts")
fim.save(out / "fisher.safetensors")
fim.report(out / "fisher.html")
print("written:", out / "fisher.safetensors", out / "fisher.html")
