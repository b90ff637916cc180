"""Elastic weight consolidation: learn mirrored digits, and forget less of how to read the others.

python examples/consolidation.py
python examples/consolidation.py --strength 100
"""

import argparse

import small

import neuromanifold as nm

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--strength", type=float, default=10.0)
arguments = parser.parse_args()

old = small.images()
new = [(inputs.flip(-1), labels) for inputs, labels in old]

model = small.network(data=old)
print(f"before: {small.accuracy(model, old):.0f} %")
start = {name: value.clone() for name, value in model.state_dict().items()}
penalty = nm.Consolidation(model, nm.fisher_diagonal(model, old), strength=arguments.strength)

for name, protect in (("without", lambda model: 0.0), ("with", penalty)):
    model.load_state_dict(start)
    small.fit(model, new, epochs=10, penalty=protect)
    both = small.accuracy(model, old), small.accuracy(model, new)
    print(f"{name:>7} the penalty: digits {both[0]:.0f} %, mirrored {both[1]:.0f} %")
