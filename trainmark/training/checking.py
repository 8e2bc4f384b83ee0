"""Computing a step's gradients twice, to find a device that does not give the same bits twice.

    loss, differ = computed_twice(compute, described, forget, weights)

What is compared are fingerprints: sums of all words of a tensor as integers, which do not depend on
an order, and which any single flipped bit changes. They stay on the device, like a loss.
"""

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

T = TypeVar("T")
Fingerprints = dict[str, Tensor]
"""By name: of each tensor, or of several, an int64 scalar on its device."""

_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@torch.no_grad()
def fingerprint(*tensors: Tensor) -> Tensor:
    """Of what this rank holds of some tensors, of which there is at least one."""
    return torch.stack([_sum_of_words(tensor) for tensor in tensors]).sum()


def fingerprints(tensors: Mapping[str, Tensor], of: str = "") -> Fingerprints:
    """Of each tensor; `of` begins their names."""
    return {f"{of}{name}": fingerprint(tensor) for name, tensor in tensors.items()}


def _sum_of_words(tensor: Tensor) -> Tensor:
    own = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    flat = own.detach().contiguous().view(-1)
    # Words of 64 bits, where they begin and end with the tensor: to widen others takes a copy.
    fits = not (flat.storage_offset() * flat.element_size() | flat.nbytes) % 8
    return flat.view(torch.int64 if fits else _WORDS[flat.element_size()]).sum(dtype=torch.int64)


@contextmanager
def in_fixed_order(device: torch.device) -> Iterator[None]:
    """PyTorch's kernels add in a fixed order, where they have one. A CPU's always do."""
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
    """What `compute` returned the second time, and by name whether bits were others the first time:
    of loss and gradients, and of the weights that they are computed from.

    Args:
        compute: leaves the gradients of a batch where an update will find them.
        described: of what it has computed, and returned.
        forget: the gradients.
        weights: of all that the step reads besides its batch.
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
