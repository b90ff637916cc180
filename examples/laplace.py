"""How sure is a network?  A Laplace posterior over its last layer, on clean and on noisy images.

python examples/laplace.py
python examples/laplace.py --prior 3
"""

import argparse

import small
import torch

import neuromanifold as nm

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument(
    "--prior", type=float, nargs="+", default=[1.0, 10.0, 100.0, 1000.0], help="precisions to choose from"
)
arguments = parser.parse_args()

batches = small.images(896)
train, validation, test = batches[:4], batches[4:7], batches[7:]
model = small.network(epochs=60, data=train)
fim = nm.fisher_diagonal(model, train, parameters="6.*")  # the last layer


def loss(predict, data) -> float:
    """Mean negative log-likelihood."""
    losses = [torch.nn.functional.nll_loss(predict(inputs).log(), labels) for inputs, labels in data]
    return float(torch.stack(losses).mean())


def posterior(prior: float):
    """Predictions that average over the posterior."""
    laplace = nm.Laplace(model, fim, prior_precision=prior)
    return lambda inputs: laplace.predict([inputs]).mean


best = min(arguments.prior, key=lambda prior: loss(posterior(prior), validation))
point = lambda inputs: model(inputs).softmax(-1).detach()
noisy = [(inputs + 0.3 * torch.randn_like(inputs), labels) for inputs, labels in test]
print(f"prior precision, chosen on validation images: {best}")
for name, data in (("clean", test), ("noisy", noisy)):
    alone, averaged = loss(point, data), loss(posterior(best), data)
    print(f"{name} images, negative log-likelihood: {alone:.3f} alone, {averaged:.3f} averaged")
