"""Random streams named by what they are for, so that values never depend on the world size."""

import hashlib

import torch


def stream_seed(*key: int | str) -> int:
    """A 63-bit seed from a key such as (run seed, parameter name, block)."""
    digest = hashlib.blake2b(repr(key).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def generator(device: torch.device, *key: int | str) -> torch.Generator:
    """A generator on `device` that starts the stream of `key`."""
    return torch.Generator(device).manual_seed(stream_seed(*key))
