"""Owns which part of which table lies where, and what that costs; without torch.

placement.py     plain data, checked, to and from JSON
strategies.py    the published ways to choose one
auto.py          ours, by predicted time; cutting.py makes pieces of tables
access.py        how often rows are looked up
costs.py         bytes and seconds of a placement
"""
