"""Owns preparation on a Spark cluster, with the same bytes as the embedded engine.

job.py       one run, from the input's files to the finished folder
engine.py    its phases, as the driver plans them
blocks.py, counts.py, pieces.py
             what the executors do in each phase
session.py   a Spark session; hadoop.py: files on any Hadoop path
"""
