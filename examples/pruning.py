"""Prune by Fisher information and by magnitude, at several sparsities.

python examples/pruning.py
python examples/pruning.py --sparsity 0.3 0.5
"""

import argparse
import copy

import small
import torch

import neuromanifold as nm

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--sparsity", type=float, nargs="+", default=[0.3, 0.5, 0.7])
arguments = parser.parse_args()

data = small.images()
model = small.network()
fim = nm.fisher_diagonal(model, data)
print(f"whole network: {small.accuracy(model, data):.1f} %")
for sparsity in arguments.sparsity:
    plan = nm.plan_pruning(model, fim, sparsity=sparsity)
    pruned = copy.deepcopy(model)
    plan.apply(pruned)  # masks of torch.nn.utils.prune: training may go on

    by_magnitude = copy.deepcopy(model)
    weights = [(layer, "weight") for layer in by_magnitude if hasattr(layer, "weight")]
    torch.nn.utils.prune.global_unstructured(weights, torch.nn.utils.prune.L1Unstructured, amount=sparsity)
    one, other = small.accuracy(pruned, data), small.accuracy(by_magnitude, data)
    print(f"{sparsity:.0%} gone: {one:.1f} % by Fisher, {other:.1f} % by magnitude")
    print(f"    the loss was predicted to grow by {plan.loss_increase:.4f}")
