"""Runs of models in FSDP2, whose parameters are divided among processes: all of them go in step."""
