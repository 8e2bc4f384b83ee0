"""Random streams named by what they are for, so that values never depend on the world size."""

import hashlib

import torch


def stream_seed(*key: int | str) -> int:
    """A 63-bit seed from a key such as (run seed, parameter name, block)."""
    digest = hashlib.blake2b(repr(key).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


DRAWN_BY_A_CPU = 2**22
"""The largest tensor, in numbers, that a CPU draws for every device. Each kind of device has its
own random streams, so small models, which a CPU draws in a moment, begin alike everywhere."""


def drawing_device(numbers: int, device: torch.device) -> torch.device:
    """The device that draws a (whole, unsharded) tensor for `device`."""
    return torch.device("cpu") if numbers <= DRAWN_BY_A_CPU else device


def generator(device: torch.device, *key: int | str) -> torch.Generator:
    """A generator on `device` that starts the stream of `key`."""
    return torch.Generator(device).manual_seed(stream_seed(*key))
