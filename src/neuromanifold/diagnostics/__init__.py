"""Before and beside a run: `check` against the exact value, `forecast` of time and memory."""
