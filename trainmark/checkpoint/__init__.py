"""Owns checkpoints: folders of safetensors with a manifest, atomic, checksummed, reshardable.

checkpoints.py   save, load, read, verify; which checkpoints there are
manifest.py      what is where, and its checksums
writer.py        the data files, written for PyTorch's DCP; reader.py: read
storage.py       what both share
boxes.py         tensors of which each rank holds parts
room.py          whether the disk has room
"""
