"""Computing a step's gradients twice, to find a device that does not give the same bits twice.

    loss, differ = computed_twice(compute, described, forget, weights)

It compares fingerprints: the sum of all words of a tensor as integers. The sum does not depend on
an order, and any single flipped bit changes it. Fingerprints stay on the device, like a loss.
"""

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor

from trainmark.distributed.mesh import local

T = TypeVar("T")
Fingerprints = dict[str, Tensor]
"""By name, the fingerprint of one or several tensors: an int64 scalar on their device."""

_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@torch.no_grad()
def fingerprint(*tensors: Tensor) -> Tensor:
    """The fingerprint of one or more tensors, or of what this rank holds of them."""
    return torch.stack([_sum_of_words(tensor) for tensor in tensors]).sum()


def fingerprints(tensors: Mapping[str, Tensor], of: str = "") -> Fingerprints:
    """The fingerprint of each tensor; `of` is put before the names."""
    return {f"{of}{name}": fingerprint(tensor) for name, tensor in tensors.items()}


def _sum_of_words(tensor: Tensor) -> Tensor:
    flat = local(tensor).detach().contiguous().view(-1)
    # Words of 64 bits, where they begin and end with the tensor: to widen others takes a copy.
    fits = not (flat.storage_offset() * flat.element_size() | flat.nbytes) % 8
    return flat.view(torch.int64 if fits else _WORDS[flat.element_size()]).sum(dtype=torch.int64)


@contextmanager
def in_fixed_order(device: torch.device) -> Iterator[None]:
    """Have PyTorch's kernels add in a fixed order, where they can. On a CPU they always do."""
    if device.type == "cpu":
        yield
        return
    settings: Any = torch.utils.deterministic
    before, fills = torch.get_deterministic_debug_mode(), settings.fill_uninitialized_memory
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*deterministic")
        torch.use_deterministic_algorithms(True, warn_only=True)
        settings.fill_uninitialized_memory = False  # which takes time, and changes nothing
        try:
            yield
        finally:
            torch.set_deterministic_debug_mode(before)
            settings.fill_uninitialized_memory = fills


def computed_twice(
    compute: Callable[[], T],
    described: Callable[[T], Fingerprints],
    forget: Callable[[], None],
    weights: Callable[[], Fingerprints],
) -> tuple[T, dict[str, Tensor]]:
    """Compute twice. Returns the second result and, by name, whether the bits of the loss, of a
    gradient, or of a weight that they are computed from have changed.

    Args:
        compute: computes the gradients of a batch, and leaves them where an update will find them.
        described: fingerprints of what was computed.
        forget: discards the gradients.
        weights: fingerprints of all that the step reads besides its batch.
    """
    before, first = weights(), described(compute())
    forget()
    computed = compute()
    second, after = described(computed), weights()
    return computed, {
        name: one[name] != other[name]
        for one, other in ((before, after), (first, second))
        for name in one
    }
