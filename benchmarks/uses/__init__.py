"""Executed studies of what a Fisher information is used for; `uses/study.py` has what they share."""
