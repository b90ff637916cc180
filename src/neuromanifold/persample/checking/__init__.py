"""`check_rule`: compare a layer rule with autograd, sample by sample."""
