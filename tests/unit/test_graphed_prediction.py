"""Predictions by graphs: on a CPU, where the function takes a graph's place, all around it."""

import ctypes
import dataclasses
import gc
import weakref
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch

from tests import small
from tests.unit.test_fast_prediction import expected, inputs
from tests.unit.test_fast_prediction import model as exported
from trainmark.inference import latency
from trainmark.kernels import fp8_mlp, graph, request_graphs
from trainmark.kernels.request_graphs import Lane, RequestGraph, empty_like
from trainmark.workloads.dlrm import graphed_prediction as graphed
from trainmark.workloads.dlrm.data import ClickBatch, build_data
from trainmark.workloads.dlrm.runs import DlrmRun, TableFormat
from trainmark.workloads.dlrm.step import build_predictor

INT8 = TableFormat(table_precision="int8", fp32_up_to_rows=5)
WIDE = dataclasses.replace(small.config().model, top_mlp=(32, 48, 16, 1))
BAGS = dataclasses.replace(small.config().model, hotness=(3, 1, 2))
SGD = small.Optimizer(name="sgd")
WAYS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "int8 tables": {"table_format": INT8, "optimizer": SGD},
    "bf16": {"precision": "bf16"},
    "fp8": {"precision": "fp8", "model": WIDE},
    "bags": {"model": BAGS, "multi_hot": "uniform"},
    "no numbers": {"model": dataclasses.replace(WIDE, numerical_features=0)},
    "a cross network": {"model": dataclasses.replace(WIDE, interaction="dcn")},
    "a linear output": {"model": dataclasses.replace(WIDE, bottom_output="linear")},
}


def batches(cfg: DlrmRun, size: int) -> list[ClickBatch]:
    data = build_data(dataclasses.replace(cfg, eval_batch=size), "test", 0, 1)
    return [batch for batch, _ in zip(data, range(3), strict=False)]


def never(batch: ClickBatch) -> torch.Tensor:
    raise AssertionError("asked the other way")


def predictors(changes: dict[str, Any]) -> tuple[DlrmRun, Any, Any]:
    """By graphs, and layer by layer, of the same weights."""
    cfg = small.config(**changes)
    plain, trainer = small.trainer(cfg), small.trainer(cfg)
    assert not trainer.uses_graphs
    build_predictor(trainer)  # casts
    build_predictor(plain)

    def layer_by_layer(batch: ClickBatch) -> torch.Tensor:
        return plain.predict(plain.prepare_to_predict(batch, batch.samples))

    return cfg, graphed.TrainerGraphs(trainer, never), layer_by_layer


@pytest.mark.parametrize("way", WAYS)
def test_logits(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fp8_mlp, "SMALL_LAYER", 100)
    cfg, predict, plain = predictors(WAYS[way])
    rough = "precision" in WAYS[way]
    for size in (100, 1, 64, 9, 8, 7, 65, 512, 100):  # larger ones leave nothing to smaller ones
        for batch in batches(cfg, size):
            assert batch.samples == size
            found = predict(batch)
            assert (found.shape, found.dtype, found.device.type) == ((size,), torch.float32, "cpu")
            # fp8 scales by the largest of the samples, in which zeros take part.
            near = 5e-2 if rough else 1e-5
            torch.testing.assert_close(found, plain(batch), rtol=near, atol=near)


def test_an_answer_stays() -> None:
    cfg, predict, _ = predictors({})
    first, second, _ = batches(cfg, 5)
    found = predict(first)
    before = found.clone()
    predict(second)
    assert torch.equal(found, before)


def test_what_is_made_on_the_device_goes_the_other_way() -> None:
    trainer = small.trainer(small.config())
    predict = graphed.TrainerGraphs(trainer, lambda batch: torch.full((batch.samples,), 3.0))
    (batch, *_) = batches(trainer.cfg, 4)
    made = dataclasses.replace(batch, make=lambda tensors: None)
    assert predict(made).tolist() == [3.0] * 4


def test_threads_have_predictors_of_their_own() -> None:
    trainer = small.trainer(small.config())
    given = batches(trainer.cfg, 70)
    own = [graphed.TrainerGraphs(trainer, never) for _ in range(3)]
    alone = [own[0](batch) for batch in given]

    def many(predict: Any) -> list[Any]:
        return [predict(batch) for _ in range(20) for batch in given]

    with ThreadPoolExecutor(3) as threads:
        for found in threads.map(many, own):
            for ours, theirs in zip(found, alone * 20, strict=True):
                assert torch.equal(ours, theirs)


# --- requests that are cut in two


@pytest.mark.parametrize("way", ["fp32", "int8 tables", "bags", "no numbers"])
def test_halves_are_the_whole(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    cfg, predict, plain = predictors(WAYS[way])
    monkeypatch.setattr(graphed, "CUT", 100)
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda tensor: True)
    seen: list[int] = []
    monkeypatch.setattr(Lane, "copy", lambda lane, to, given: seen.append(len(to.copy_(given))))
    for size in (512, 99, 100, 333, 512):
        for batch in batches(cfg, size):
            seen.clear()
            torch.testing.assert_close(predict(batch), plain(batch), rtol=1e-5, atol=1e-5)
            halves = 1 if size < 100 else 2
            assert len(seen) == halves * (1 + len(batch.groups))
            assert sum(seen[:: 1 + len(batch.groups)]) == size


def test_several_are_begun_before_one_is_answered() -> None:
    trainer = small.trainer(small.config())
    given = [*batches(trainer.cfg, 70), *batches(trainer.cfg, 5)]
    own = [graphed.TrainerGraphs(trainer, never) for _ in given]
    alone = [own[0](batch) for batch in given]
    waiting = [predict.begin(batch) for predict, batch in zip(own, given, strict=True)]
    for wait, expected_B in zip(waiting, alone, strict=True):
        assert torch.equal(wait(), expected_B)


def test_clients_of_graphs_need_no_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = small.trainer(small.config())
    under_way: list[int] = []
    most: list[int] = []

    class Watched(graphed.TrainerGraphs):
        def begin(self, batch: ClickBatch) -> Any:
            wait = super().begin(batch)
            under_way.append(1)
            most.append(len(under_way))
            return lambda: (under_way.pop(), wait())[1]

    monkeypatch.setattr(latency, "ThreadPoolExecutor", None)
    own = [Watched(trainer, never) for _ in range(3)]
    found = latency.measure_size(own, 5, batches(trainer.cfg, 5), 12, print)
    assert (found.clients, found.requests, found.samples) == (3, 12, 60)
    assert max(most) == 3
    assert not under_way


def as_cuda_copies(
    to: int, to_step: int, of: int, of_step: int, width: int, rows: int, *_: int
) -> int:
    """What cudaMemcpy2DAsync does, in host memory."""
    for row in range(rows):
        ctypes.memmove(to + row * to_step, of + row * of_step, width)
    return 0


@pytest.mark.parametrize("shape", [(5, 9), (5, 9, 3), (1, 9), (9,)])
def test_copies_of_parts(shape: tuple[int, ...]) -> None:
    given = torch.arange(torch.Size(shape).numel(), dtype=torch.int16).view(shape)
    axis = min(1, len(shape) - 1)
    for part in (slice(0, 9), slice(0, 4), slice(4, 9)):
        samples = part.stop - part.start
        some = given.narrow(axis, part.start, samples)
        for room in (samples, 12):
            place = torch.zeros(*shape[:axis], room, *shape[axis + 1 :], dtype=torch.int16)
            inside = place.narrow(axis, 0, samples)
            request_graphs._copy_pinned(as_cuda_copies, inside, some, 0)
            assert torch.equal(inside, some)
            assert not place.narrow(axis, samples, room - samples).any()


def test_a_copy_that_fails_is_told() -> None:
    with pytest.raises(RuntimeError, match="error 700"):
        request_graphs._copy_pinned(lambda *_: 700, torch.zeros(2), torch.zeros(2), 0)


# --- sizes


def test_sizes() -> None:
    sizes = [graphed.filled_up(samples) for samples in range(1, 70_000)]
    assert sizes[:8] == [8] * 8
    assert sizes[8:64] == [64] * 56
    for samples, size in enumerate(sizes, 1):
        assert samples <= size
        assert samples < 64 or size <= 1.25 * samples
        assert graphed.filled_up(size) == size
    assert all(graphed.filled_up(2**n) == 2**n for n in range(6, 20))
    assert len(set(sizes)) == 2 + 4 * 10 + 1  # up to 65,536, and one beyond


def test_graphs_are_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[list[torch.Size]] = []

    class Counted(RequestGraph):
        def __init__(self, lane: Lane, like: Any, function: Any, *, staged: bool) -> None:
            made.append([tensor.shape for tensor in like])
            super().__init__(lane, like, function, staged=staged)

    monkeypatch.setattr(graphed, "RequestGraph", Counted)
    cfg, predict, _ = predictors({})
    for size in (1, 5, 8, 64, 70, 80, 81, 1):
        predict(batches(cfg, size)[0])
    rows = [shapes[0][0] for shapes in made]
    assert rows == [8, 64, 80, 96]
    assert made[0] == [(8, 16), (8, 3)]  # 13 numbers and zeros behind them; ids


def test_places_are_copied_together() -> None:
    lane = Lane(torch.device("cpu"))
    like = [empty_like((2, 3), torch.float32), empty_like((2, 1), torch.int32)]
    graph = RequestGraph(lane, like, lambda given: given[0].sum(1) + given[1][:, 0], staged=True)
    numbers, ids = graph.places
    assert numbers.data_ptr() != ids.data_ptr()
    numbers.numpy()[:] = [[1, 2, 3], [4, 5, 6]]
    ids.numpy()[:] = [[10], [20]]
    graph.begin()
    assert graph.answer(2).tolist() == [16, 35]
    assert graph.answer(1).tolist() == [16]


# --- of an exported model


@pytest.mark.parametrize("samples", [1, 8, 63, 200, 1000])
def test_an_exported_model(samples: int) -> None:
    numbers, ids = inputs(samples)
    found = _of_exported()(numbers, ids)
    wanted = expected(exported((16,), (1,)), numbers, ids)
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-4)


def test_an_exported_model_forgets_larger_requests() -> None:
    logits = _of_exported()
    numbers, ids = inputs(64)
    logits(numbers + 100, ids)
    few = logits(numbers[:9], ids[:9])
    wanted = expected(exported((16,), (1,)), numbers[:9], ids[:9])
    np.testing.assert_allclose(few, wanted, rtol=1e-4, atol=1e-4)


def _of_exported() -> Any:
    return graphed.of_exported(exported((16,), (1,), numerical_features=5), torch.device("cpu"))


def test_no_garbage_is_collected_while_a_graph_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may hold old graphs, whose end would be the capture's."""
    monkeypatch.setattr(torch.cuda, "CUDAGraph", object)
    monkeypatch.setattr(torch.cuda, "graph", lambda *_, **__: nullcontext())
    seen = []

    def work() -> None:
        seen.append(gc.isenabled())
        raise ZeroDivisionError

    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            graph.captured(work)
        assert gc.isenabled()
    assert seen == [False, False]


def test_a_model_goes_with_its_last_predictor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of itself, since a server keeps the garbage collector from what it has loaded."""
    # A GPU keeps a graph, where a CPU keeps the request's own method: a cycle of the CPU alone.
    monkeypatch.setattr(Lane, "captured", lambda lane, function: lambda: None)
    model = exported((8,), (9, 1), numerical_features=5)
    kept = weakref.ref(model)
    gc.disable()
    try:
        logits = graphed.of_exported(model, torch.device("cpu"))
        del model, logits
        assert kept() is None
    finally:
        gc.enable()
