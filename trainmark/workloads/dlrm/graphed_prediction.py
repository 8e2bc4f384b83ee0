"""Predictions on a GPU: from a request in host memory to its logits there, a CUDA graph each size.

Requests of a size in between are filled up with zeros to the next. Small ones are written to pinned
memory as rows of numbers and ids, which one copy brings to the device; larger ones are copied as
they are, in the dataset's narrow types, from pinned memory at the speed of the link. The largest
are cut in two: one half is copied while the other is computed.

Shapes: B samples, S of the size that they are filled up to, N numerical features, F ids.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from trainmark.embeddings.tables.batch import IdGroup
from trainmark.embeddings.tables.formats import LARGEST_INT32
from trainmark.kernels.interaction_layout import PAD_TO
from trainmark.kernels.request_graphs import Lane, RequestGraph, empty_like
from trainmark.workloads.dlrm import standalone
from trainmark.workloads.dlrm.data import ClickBatch
from trainmark.workloads.dlrm.requests import Clicks

SMALLEST = 8
"""Samples of a graph. With fewer, GEMMs lose the bias and the ReLU that are part of them."""
FEW = 64
"""Samples of requests that are written to pinned memory by rows."""
CUT, LANES = 16_384, 2
"""Samples from which on a request in pinned memory is cut, and for how many lanes."""
SERVED_SIZES = (SMALLEST, FEW, 256, 1024)
"""Captured before the first request; others as they come."""
Predict = Callable[[ClickBatch], Tensor]


def filled_up(samples: int) -> int:
    """The next size: 8, 64, then powers of 2 with three sizes between each two of them."""
    if samples <= FEW:
        return SMALLEST if samples <= SMALLEST else FEW
    step = 1 << ((samples - 1).bit_length() - 3)
    return -(-samples // step) * step


class RowGraphs:
    """Graphs from [B, N] numbers and [B, F] ids, each in one array.

    Args:
        logits: ([S, N] fp32, [S, F] ids) on the device -> [S].
    """

    def __init__(
        self,
        lane: Lane,
        logits: Callable[[Tensor, Tensor], Tensor],
        numbers: int,
        ids: int,
        id_type: torch.dtype,
    ) -> None:
        self._lane, self._logits = lane, logits
        self._columns = ((numbers, torch.float32), (ids, id_type))
        self._graphs: dict[int, RequestGraph] = {}

    def of(self, samples: int) -> RequestGraph:
        """For that many; its places are the two arrays, whose other rows are zeros."""
        size = filled_up(samples)
        if size not in self._graphs:
            like = [empty_like((size, columns), dtype) for columns, dtype in self._columns]
            logits = self._logits  # not by self: a cycle would keep a model that was replaced
            self._graphs[size] = RequestGraph(
                self._lane, like, lambda inputs: logits(*inputs), staged=True
            )
        graph = self._graphs[size]
        if samples < size:
            for array in graph.arrays:
                array[samples:] = 0
        return graph


class ColumnGraphs:
    """Graphs from batches as the dataset has them: ids by feature, in groups of one type."""

    def __init__(self, lane: Lane, logits: Callable[[Tensor, list[IdGroup]], Tensor]) -> None:
        self._lane, self._logits = lane, logits
        self._graphs: dict[Any, RequestGraph] = {}

    def begin(self, batch: ClickBatch, part: slice) -> Callable[[], Tensor]:
        """Of some of the samples; see `RequestGraph.answer` for what is returned."""
        given = [batch.numerical[part], *(group.ids[:, part] for group in batch.groups)]
        samples = len(given[0])
        graph = self._of(filled_up(samples), given, [g.features for g in batch.groups])

        def put() -> None:
            for axis, place, tensor in zip(_sample_axes(given), graph.places, given, strict=True):
                if missing := place.shape[axis] - samples:
                    place.narrow(axis, samples, missing).zero_()
                    place = place.narrow(axis, 0, samples)
                self._lane.copy(place, tensor)

        graph.begin(put)
        return lambda: graph.answer(samples)

    def _of(self, size: int, given: list[Tensor], features: list[list[int]]) -> RequestGraph:
        key = (size, tuple(tensor.dtype for tensor in given), tuple(map(tuple, features)))
        if key not in self._graphs:
            axes, of_batch = _sample_axes(given), self._logits
            like = [
                empty_like((*t.shape[:axis], size, *t.shape[axis + 1 :]), t.dtype)
                for axis, t in zip(axes, given, strict=True)
            ]

            def logits(inputs: list[Tensor]) -> Tensor:
                groups = [IdGroup(f, ids) for f, ids in zip(features, inputs[1:], strict=True)]
                return of_batch(inputs[0], groups)

            self._graphs[key] = RequestGraph(self._lane, like, logits, staged=False)
        return self._graphs[key]


def _sample_axes(given: Sequence[Tensor]) -> list[int]:
    """Numbers are a row a sample, ids a column."""
    return [0] + [1] * (len(given) - 1)


# --- of what


class TrainerGraphs:
    """A trainer's predictor, on lanes of its own; see `contract.InFlight`.

    Args:
        plain: another way, for batches that are made on the device.
    """

    def __init__(self, trainer: Any, plain: Predict) -> None:
        model, tables = trainer.model, trainer.cfg.model.feature_rows
        model.bottom.fill_up_inputs(PAD_TO)
        lanes = [Lane(trainer.mesh.device) for _ in range(LANES)]
        features = list(range(len(tables)))

        def of_rows(numbers_SN: Tensor, ids_SF: Tensor) -> Tensor:
            groups = [IdGroup(features, ids_SF.t())]
            scores: Tensor = trainer.predict_at_once(numbers_SN, groups)
            return scores

        self._plain = plain
        self._by_rows = RowGraphs(
            lanes[0], of_rows, model.bottom.inputs, len(tables), _id_type(tables)
        )
        self._by_columns = [ColumnGraphs(lane, trainer.predict_at_once) for lane in lanes]
        self._most_rows = 0 if trainer.cfg.model.has_bags else FEW

    def __call__(self, batch: ClickBatch) -> Tensor:
        return self.begin(batch)()

    def begin(self, batch: ClickBatch) -> Callable[[], Tensor]:
        """Start on a batch, whose memory must stay as it is until what is returned has returned
        the scores."""
        if batch.make is not None:
            scores = self._plain(batch)
            return lambda: scores
        if batch.samples <= self._most_rows:
            return self._begin_rows(batch)
        answers = [
            graphs.begin(batch, part)
            for graphs, part in zip(self._by_columns, _parts(batch), strict=False)
        ]
        return lambda: torch.cat([answer() for answer in answers])

    def _begin_rows(self, batch: ClickBatch) -> Callable[[], Tensor]:
        samples = batch.samples
        graph = self._by_rows.of(samples)
        # By numpy, whose calls cost a fraction of torch's.
        numbers_SN, ids_SF = (array[:samples] for array in graph.arrays)
        numbers_SN[:, : batch.numerical.shape[1]] = batch.numerical.numpy()
        for group in batch.groups:
            ids_SF[:, group.features] = group.ids.numpy().T
        graph.begin()
        return lambda: graph.answer(samples).clone()


def _parts(batch: ClickBatch) -> list[slice]:
    """What is copied and computed together. Copies from pageable memory overlap with nothing."""
    samples = batch.samples
    if samples < CUT or not batch.numerical.is_pinned():
        return [slice(0, samples)]
    size = filled_up(-(-samples // LANES))
    return [slice(start, min(start + size, samples)) for start in range(0, samples, size)]


def of_exported(
    model: Any, device: torch.device
) -> Callable[[NDArray[np.float32], NDArray[np.int64]], NDArray[np.float32]]:
    """The same of an exported model (`standalone.Dlrm`): its own code, as graphs."""
    config = model.config
    graphs = RowGraphs(
        Lane(device),
        model.logits,
        config["numerical_features"],
        standalone.num_ids(config),
        _id_type(config["table_rows"]),
    )
    for size in SERVED_SIZES:
        graphs.of(size)

    @torch.inference_mode()
    def logits(numbers_BN: NDArray[np.float32], ids_BF: NDArray[np.int64]) -> NDArray[np.float32]:
        graph = graphs.of(len(ids_BF))
        numbers_SN, ids_SF = graph.places
        # By torch, whose threads share a large copy.
        numbers_SN[: len(ids_BF)].copy_(torch.from_numpy(numbers_BN))
        ids_SF[: len(ids_BF)].copy_(torch.from_numpy(ids_BF))
        graph.begin()
        found: NDArray[np.float32] = graph.answer(len(ids_BF)).numpy().copy()
        return found

    return logits


def clicks_by_torch(config: dict[str, Any], tensors: dict[str, Tensor], device: str) -> Clicks:
    """The probabilities of an exported model whose tensors lie on the device: as graphs on a GPU,
    else by its own code."""
    model, here = standalone.Dlrm(config, tensors).eval(), torch.device(device)
    if here.type != "cuda":
        return lambda numbers, ids: _on_host(
            model(torch.from_numpy(numbers).to(here), torch.from_numpy(ids).to(here))
        )
    logits = of_exported(model, here)
    return lambda numbers, ids: _on_host(
        torch.from_numpy(logits(numbers.astype(np.float32, copy=False), ids)).sigmoid()
    )


def _on_host(clicks: Tensor) -> NDArray[np.float32]:
    found: NDArray[np.float32] = clicks.cpu().numpy()
    return found


def _id_type(table_rows: Sequence[int]) -> torch.dtype:
    return torch.int32 if max(table_rows, default=0) <= LARGEST_INT32 else torch.int64
