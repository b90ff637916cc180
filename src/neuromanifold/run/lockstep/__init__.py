"""Runs of models whose parameters are divided among processes, by FSDP2 or tensor parallelism: all go in step."""
