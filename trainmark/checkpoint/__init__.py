"""Owns checkpoints: folders of safetensors with a manifest, atomic, checksummed, reshardable.

checkpoints.py   save, load, read, verify; which checkpoints there are
saver.py         saving while training goes on
manifest.py      what is where, and its checksums
writer.py        the data files, written as PyTorch's DCP plans; reader.py: read
storage.py       what both share
local_shards.py  tensors of which each rank holds parts
run_tensors.py   what a run's tensors are called there
room.py          whether the disk has room
"""
