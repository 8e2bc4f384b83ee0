"""The exchange of a micro-batch's rows between ranks, from its ids to their gradients."""

import dataclasses
from collections import Counter
from dataclasses import dataclass

from torch import Tensor

from trainmark.embeddings.exchange.all_to_all import Pending
from trainmark.embeddings.exchange.layout import Layout
from trainmark.embeddings.tables.row_update import Plan, plan_tensors
from trainmark.embeddings.tables.store import RequestedRows
from trainmark.kernels.pool_rows import Bags


@dataclass(kw_only=True)
class RowExchange:
    """A micro-batch on its way."""

    layout: Layout
    ids: Pending
    sent_ids: Tensor
    """Kept until the compute stream has waited for the exchange: the stream that they were made on,
    which has not, would reuse their memory while they are still read."""
    samples: int
    replica_ids: Tensor
    replica_plan: Plan
    replica_bags: Bags | None
    sent_bytes: Counter[str]
    requested: list[RequestedRows] = dataclasses.field(default_factory=list)
    """What all ranks request of each of this rank's stores."""
    received: Tensor | None = None
    """Rows for this rank's samples, once they are there; those of replicated tables last."""
    rows: Pending | None = None
    in_order: Tensor | None = None
    """[B, F, D] the gradient of rows that were put in order. (Not of them: they know this object,
    and if it knew them, both would stay until somebody collects garbage.)"""
    gradients: Pending | None = None

    def prepared_tensors(self) -> list[Tensor]:
        """What was made ahead of the step, on another stream."""
        plans = [self.replica_plan, *(requested.plan for requested in self.requested)]
        of_plans = [tensor for plan in plans for tensor in plan_tensors(plan)]
        rows = [requested.rows for requested in self.requested]
        layout = self.layout.tensors()
        return [self.ids.received, self.sent_ids, self.replica_ids, *of_plans, *rows, *layout]
