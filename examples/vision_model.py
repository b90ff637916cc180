"""How accurate is one backward pass on a vision model?  Every estimator beside the exact value.

python examples/vision_model.py
python examples/vision_model.py --model microsoft/resnet-18 --data images/    # a folder of images for each class
"""

import argparse

import small
import torch
import transformers

import neuromanifold as nm

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--model", help="a name on the Hugging Face hub, or a folder of save_pretrained")
parser.add_argument("--data", help="a folder with a folder of images for each class")
arguments = parser.parse_args()

if arguments.model:
    loaded = nm.load_model(arguments.model)
    model, data = loaded.module, nm.load_data(arguments.data, loaded, batch_size=16, limit=64)
else:
    torch.manual_seed(0)
    size = {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "layer_type": "basic"}
    model = transformers.ResNetForImageClassification(transformers.ResNetConfig(num_channels=1, num_labels=10, **size))
    data = [{"pixel_values": pixels, "labels": labels} for pixels, labels in small.images(32)]

print(nm.check(model, data, batches=1))  # which estimator is good enough for this model?

one = nm.fisher_diagonal(model, data)
four = nm.fisher_diagonal(model, data, nm.Hutchinson(probes=4))
exact = nm.fisher_diagonal(model, data, nm.Exact())
print(f"mean relative error: {one.compare(exact).relmae:.3f} of one pass, {four.compare(exact).relmae:.3f} of four")
