"""Owns what the training steps of several workloads have in common.

optimizers.py   PyTorch's optimisers under a gate, loss scaling
adamw.py        AdamW for weights in any type, sharded or not
dropout.py      dropout by a hash of the sample
checking.py     gradients computed twice, and compared bit by bit
precision.py    what a precision means for GEMMs and activations
batches.py      samples to global batches, and those to ranks
background.py   work done by threads ahead of its use
transfer.py     copies to the device, ahead of the step
seeding.py      random streams by name
"""
