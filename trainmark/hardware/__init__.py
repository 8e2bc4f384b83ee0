"""What devices and machines are: peaks with their sources, links, memory, power, environment.

backends.py      kinds of devices, and how PyTorch reaches them; nvidia.py: what only NVIDIA tells
devices.py       what a device is, clusters, peaks; datasheets.py: vendors' figures
links.py         how fast devices talk; known.py: both, or what a user's file says instead
hardware_file.py reads and writes that file, hardware.toml
machine.py       what a plan needs of all this; products.py: how long matrix products take
memory.py        bytes that a run needs and a device has; plans.py: these, and a step's time
environment.py   this machine and its software, for a result
monitor.py       power, utilisation and memory while a run trains; energy.py: joules, by counters
allocator.py     settings of malloc for training on a CPU; pinned.py: memory for copies of a GPU
amx.py           a matrix unit that some virtual machines announce and do not have
"""
