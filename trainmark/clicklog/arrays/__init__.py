"""Owns work on whole arrays, compiled by numba where it is installed, in numpy elsewhere.

primitives.py   counting, taking, joining, dictionaries, lookups; kernels.py: the same by numba
counting.py     exact counts of a column's values, in bounded memory
shuffle.py      the random order of the training rows
strings.py      strings as numbers, by interning
number_transforms.py
                what becomes of numbers: transforms, fitted to training rows, and bins
number_choice.py
                which of these --numerical auto takes
"""
