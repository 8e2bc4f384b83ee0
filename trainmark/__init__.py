"""Trainmark: train reference models on real hardware and say, honestly, how fast and how well."""

__version__ = "0.1.0"
