"""Ranks: the mesh, its collectives, and launching."""
