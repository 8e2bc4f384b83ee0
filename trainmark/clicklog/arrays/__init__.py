"""Work on whole arrays, by numpy or numba: hashing, counting, shuffling, strings as numbers."""
