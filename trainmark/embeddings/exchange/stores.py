"""The stores that a placement asks of a device, and what they take."""

import torch

from trainmark.embeddings.engine import TableBytes
from trainmark.embeddings.exchange.routes import StoreParts
from trainmark.embeddings.tables.host import HostStore
from trainmark.embeddings.tables.store import TableStore
from trainmark.embeddings.tables.update import UpdateRule


def make_store(parts: StoreParts, rule: UpdateRule, device: torch.device) -> TableStore:
    if parts.memory == "host":
        return HostStore(parts.parts, parts.width, rule, device)
    return TableStore(parts.parts, parts.width, rule)


def stored_bytes(stores: list[StoreParts], rule: UpdateRule) -> TableBytes:
    """What stores take, without allocating them."""
    weights = optimizer = 0
    for parts in stores:
        store = TableStore(parts.parts, parts.width, rule)
        store.create_state()
        weights += store.weight.nbytes
        optimizer += sum(tensor.nbytes for tensor in store.optimizer_state.values())
    return TableBytes(weights=weights, optimizer=optimizer)
