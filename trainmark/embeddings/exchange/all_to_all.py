"""All-to-all between ranks: one flat tensor out, one back, every byte counted.

The same code runs on NCCL and gloo. In a single process without a process group nothing moves.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Pending:
    """An exchange under way."""

    received: Tensor
    work: Any
    sent_bytes: int
    """To other ranks."""

    def wait(self) -> Tensor:
        """What was received; on a GPU the current stream waits, not the host."""
        if self.work is not None:
            self.work.wait()
        return self.received


class Exchange:
    """All-to-all over one process group.

    Args:
        group: over which; None in a single process.
        rank: this one, in the group.
        device: where what is exchanged lies.
    """

    def __init__(self, group: Any, rank: int, device: torch.device) -> None:
        self._group, self._rank, self.device = group, rank, device

    def start(
        self,
        sent: Tensor,
        send_sizes: Sequence[int],
        receive_sizes: Sequence[int],
        into: Tensor | None = None,
    ) -> Pending:
        """Send consecutive blocks of `sent` to the ranks in turn, and receive theirs.

        Args:
            sent: contiguous and flat; must not change before the exchange is over.
            send_sizes: elements to each rank.
            receive_sizes: elements from each rank.
            into: where to receive; allocated if not given. Without a group, `sent` itself.
        """
        if into is None and self._group is None:
            into = sent  # there is nobody else
        elif into is None:
            into = sent.new_empty(sum(receive_sizes))
        work = None
        if self._group is not None:
            alone = len(send_sizes) == 1  # NCCL then copies faster if it is told no sizes
            work = dist.all_to_all_single(
                into,
                sent,
                None if alone else list(receive_sizes),
                None if alone else list(send_sizes),
                group=self._group,
                async_op=True,
            )
        others = sum(send_sizes) - send_sizes[self._rank]
        return Pending(received=into, work=work, sent_bytes=others * sent.element_size())
