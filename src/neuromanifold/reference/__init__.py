"""Slow and obvious implementations, by definition and in float64, to compare the fast ones with."""
