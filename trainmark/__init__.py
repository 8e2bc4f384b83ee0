"""Trainmark trains reference models and reports throughput and quality in comparable numbers."""

__version__ = "0.1.0"
