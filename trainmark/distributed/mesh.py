"""Who the ranks are: one object, built once, and passed to all that needs it."""

import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from trainmark.errors import InputError
from trainmark.hardware import backends

T = TypeVar("T")


@dataclass(frozen=True)
class Mesh:
    """This rank's place among all ranks. `axes` are the named degrees, outermost first."""

    device: torch.device
    axes: Mapping[str, int] = field(default_factory=lambda: {"dp": 1})
    device_mesh: Any = None
    """PyTorch's DeviceMesh over the same axes; None in a single process."""

    @property
    def rank(self) -> int:
        return dist.get_rank() if self.device_mesh is not None else 0

    @property
    def world_size(self) -> int:
        return math.prod(self.axes.values())

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    @property
    def dp_size(self) -> int:
        return self.axes.get("dp", 1)

    @property
    def dp_rank(self) -> int:
        return self.coordinate("dp")

    def coordinate(self, axis: str) -> int:
        """This rank's index along `axis`."""
        if self.device_mesh is None or axis not in self.axes:
            return 0
        return int(self.device_mesh.get_local_rank(axis))

    def group(self, axis: str) -> Any:
        """The process group along `axis`; None in a single process."""
        return None if self.device_mesh is None else self.device_mesh.get_group(axis)

    @cached_property
    def background_group(self) -> Any:
        """A second group over all ranks, for what must not queue behind the step's collectives.

        Made when first asked for, which all ranks must do; None in a single process.
        """
        return None if self.device_mesh is None else dist.new_group()

    @cached_property
    def host_group(self) -> Any:
        """A gloo group for threads on the host: it works whatever the devices are busy with."""
        return None if self.device_mesh is None else dist.new_group(backend="gloo")

    # --- small collectives of host numbers

    def max_over_ranks(self, values: Sequence[float]) -> list[float]:
        """The maximum over all ranks, element by element."""
        return self._over_ranks(values, dist.ReduceOp.MAX)

    def sum_over_ranks(self, values: Sequence[float]) -> list[float]:
        """The sum over all ranks, element by element."""
        return self._over_ranks(values, dist.ReduceOp.SUM)

    def _over_ranks(self, values: Sequence[float], how: Any) -> list[float]:
        if self.device_mesh is None:
            return list(values)
        tensor = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(tensor, op=how)
        return tensor.tolist()

    def sum_over_dp(self, values: Sequence[int]) -> list[int]:
        """The sum over data-parallel ranks only: ranks of one pipeline or tensor group see the
        same samples, and would count them twice."""
        if self.device_mesh is None or self.dp_size == 1:
            return list(values)
        tensor = torch.tensor(values, dtype=torch.int64, device=self.device)
        dist.all_reduce(tensor, group=self.group("dp"))
        return tensor.tolist()

    def add_over_dp(self, tensor: Tensor) -> None:
        """Replace a tensor on the device by its sum over data-parallel ranks."""
        if (work := self.start_sum_over_dp(tensor)) is not None:
            work.wait()

    def start_sum_over_dp(self, tensor: Tensor) -> Any:
        """Begin `add_over_dp`. Returns what to wait for, or None where there is only this rank."""
        if self.device_mesh is None or self.dp_size == 1:
            return None
        return dist.all_reduce(tensor, group=self.group("dp"), async_op=True)

    def gather_over_dp(self, values: Tensor, shares: Sequence[int]) -> Tensor:
        """The values of all data-parallel ranks, in their order. Rank r has `shares[r]` of them."""
        if self.device_mesh is None or self.dp_size == 1:
            return values
        padded = values.new_zeros(max(shares), *values.shape[1:])
        padded[: len(values)] = values
        gathered = [torch.empty_like(padded) for _ in shares]
        dist.all_gather(gathered, padded, group=self.group("dp"))
        return torch.cat([part[:share] for part, share in zip(gathered, shares, strict=True)])

    def from_main(self, value: T) -> T:
        """Rank 0's value, on all ranks."""
        if self.device_mesh is None:
            return value
        values = [value]
        dist.broadcast_object_list(values, src=0)
        return values[0]

    def any(self, flag: bool) -> bool:
        """Whether any rank says yes."""
        return bool(self.max_over_ranks([float(flag)])[0])

    def barrier(self) -> None:
        if self.device_mesh is not None:
            on_gpu = self.device.type == "cuda"  # else NCCL guesses its number
            dist.barrier(device_ids=[self.device.index or 0] if on_gpu else None)


def single(device: torch.device) -> Mesh:
    """The mesh of one process."""
    return Mesh(device=device)


def build(device: torch.device, axes: Mapping[str, int]) -> Mesh:
    """The mesh over the ranks of the initialised process group; one process needs none."""
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    if math.prod(axes.values()) != ranks:
        product = " x ".join(f"{axis} {degree}" for axis, degree in axes.items())
        raise InputError(
            f"The parallel degrees {product} must multiply to the number of ranks ({ranks})."
        )
    if ranks == 1 and not dist.is_initialized():
        return Mesh(device=device, axes=dict(axes))
    device_mesh = dist.device_mesh.init_device_mesh(
        device.type, tuple(axes.values()), mesh_dim_names=tuple(axes)
    )
    return Mesh(device=device, axes=dict(axes), device_mesh=device_mesh)


@contextmanager
def fake(axes: Mapping[str, int]) -> Iterator[Mesh]:
    """The mesh of rank 0 of a cluster that is not there, for dry runs: nothing is ever sent."""
    world = math.prod(axes.values())
    if world == 1:
        yield Mesh(torch.device("meta"), dict(axes))
        return
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=world, store=FakeStore())
    try:
        device_mesh = dist.device_mesh.init_device_mesh(
            "cpu", tuple(axes.values()), mesh_dim_names=tuple(axes)
        )
        yield Mesh(torch.device("meta"), dict(axes), device_mesh)
    finally:
        dist.destroy_process_group()


def all_reduce_sent_bytes(size: int, ranks: int) -> int:
    """What a rank sends to add up `size` bytes by a ring: each part goes round twice less a hop."""
    return 2 * (ranks - 1) * size // ranks


# --- without a mesh


def is_distributed() -> bool:
    """Whether there are other ranks to agree with."""
    return dist.is_available() and dist.is_initialized()


def of_all_ranks(value: T, group: Any = None) -> list[T]:
    """Every rank's value, in the order of the ranks, on all of them."""
    if not is_distributed() or dist.get_world_size(group) == 1:
        return [value]
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group)
    return values


def agreed(action: Callable[[], T], group: Any = None) -> list[T]:
    """Run `action` on every rank, and return all results on all of them. If it fails on any rank,
    all raise the first such rank's exception: none is left waiting for another."""
    outcome: T | Exception
    try:
        outcome = action()
    except Exception as error:
        outcome = error
    found: list[T] = []
    for one in of_all_ranks(outcome, group):
        if isinstance(one, Exception):
            raise one
        found.append(one)
    return found


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def launched_ranks() -> int:
    """How many processes the launcher (torchrun, TorchX, SLURM through torchrun) started."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def is_main_process() -> bool:
    """Whether this process, of those that the launcher started, is the one that prints."""
    return int(os.environ.get("RANK", "0")) == 0


def local_device(kind: str) -> torch.device:
    """This process's device of the given kind."""
    return backends.device_of(kind, int(os.environ.get("LOCAL_RANK", "0")))
