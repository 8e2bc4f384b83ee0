"""Measurements beside peers. Each file runs from the repository's root, with PYTHONPATH=. set."""
