"""Owns checkpoints: folders of safetensors with a manifest, atomic, checksummed, reshardable.

checkpoints.py   save, load, read, verify
folders.py       which checkpoints there are, and what they say of themselves
saver.py         saving while training goes on
manifest.py      where each part of each tensor lies, with checksums
data_files.py    reads the data files, without torch
writer.py        writes them as PyTorch's DCP plans; reader.py reads them so
storage.py       tensors as bytes
local_shards.py  tensors of which each rank holds parts
run_tensors.py   the names of a run's tensors in checkpoints
room.py          whether the disk has room
"""
