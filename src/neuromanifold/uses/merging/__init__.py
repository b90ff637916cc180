"""Models of one architecture merged into one: the methods, and checkpoints that are larger than memory."""
