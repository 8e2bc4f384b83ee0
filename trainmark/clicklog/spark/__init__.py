"""Owns preparation on a Spark cluster, with the same bytes as the embedded engine.

job.py       one run, from the input's files to the finished folder
engine.py    its phases; frames.py: their plans; encode.py: rows to bytes, on the workers
session.py   a Spark session; hadoop.py: files on any Hadoop path
"""
