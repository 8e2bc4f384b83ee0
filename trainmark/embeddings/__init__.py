"""Embedding tables: where they live, how they are looked up and updated."""
