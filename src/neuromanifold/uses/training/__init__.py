"""Uses while a network is trained: optimizers, preconditioning, a penalty, and a record of the Fisher information."""
