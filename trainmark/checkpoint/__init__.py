"""Owns checkpoints: folders of safetensors with a manifest, atomic, checksummed, reshardable.

checkpoints.py   save, load, read, verify; which checkpoints there are
saver.py         saving while training goes on
manifest.py      where each part of each tensor lies, with checksums
writer.py        writes the data files as PyTorch's DCP plans; reader.py reads them;
                 storage.py is what both share
local_shards.py  tensors of which each rank holds parts
run_tensors.py   the names of a run's tensors in checkpoints
room.py          whether the disk has room
"""
