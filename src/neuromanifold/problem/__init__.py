"""What is asked: a model, its parameters, data and likelihood, and how a batch becomes logits."""
