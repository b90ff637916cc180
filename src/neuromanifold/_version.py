"""The version, in a place that everything can import."""

__version__ = "0.2.0"
