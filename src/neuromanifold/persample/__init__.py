"""Per-sample gradients: from cotangents on the logits to squares in the parameters."""
