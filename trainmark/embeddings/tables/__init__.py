"""Rows of tables in memory, and how a step updates them."""
