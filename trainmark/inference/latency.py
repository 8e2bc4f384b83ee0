"""`trainmark infer`: how long a trained model takes to score batches of several sizes.

A request is a batch in host memory. It is answered when its scores lie in host memory too, and then
its client's next one begins: without `--clients`, no two of them ever overlap. All data is read
before the first.
"""

import dataclasses
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from itertools import cycle, islice
from threading import Barrier
from typing import Any

import torch
import torch.distributed as dist

from trainmark import metrics, workloads
from trainmark.config import filled
from trainmark.contract import AnyWorkload, InFlight
from trainmark.distributed.mesh import launched_ranks, of_all_ranks
from trainmark.errors import InputError
from trainmark.hardware.environment import environment
from trainmark.inference.figures import Inference, Row
from trainmark.inference.options import InferOptions
from trainmark.run.memory import this_cluster
from trainmark.run.trained import Loaded, loaded

DROPPED = 10  # requests of each size, as published: they pay for compilation and cold caches
MAX_SAMPLES = 2**20  # in memory, of each size; requests that need more come again
WORTH_TELLING_S = 10.0


def measure(options: InferOptions, say: Callable[[str], None]) -> Inference:
    """Time a checkpoint of a run; `say` reports what takes long."""
    sizes = None if options.batches is None else parse_batches(options.batches)
    if options.steps < 1:
        raise InputError(f"--steps must be at least 1. Received: {options.steps}.")
    if not 1 <= options.clients <= options.steps:
        raise InputError(
            f"--clients must be at least 1 and at most --steps, {options.steps:,}. "
            f"Received: {options.clients}."
        )
    began = datetime.now(UTC)
    requests: dict[int, list[Any]] = {}

    def check(cfg: Any, workload: AnyWorkload) -> None:
        _check_predicts(cfg, workload, options.clients)
        requests.update(_requests(cfg, workload, sizes, DROPPED + options.steps))

    with loaded(
        options.folder,
        checkpoint=options.checkpoint,
        device=options.device,
        data=options.data,
        precision=options.precision,
        check=check,
    ) as model:
        if not model.mesh.is_main:
            say = _silence
        build = filled(model.workload.build_predictor)
        predictors = [build(model.trainer) for _ in range(options.clients)]
        rows = [
            measure_size(predictors, size, batches, options.steps, say)
            for size, batches in requests.items()
        ]
        return _inference(model, rows, began)


def parse_batches(text: str) -> tuple[int, ...]:
    """`1,64,4096` as numbers."""
    words = [word.strip() for word in text.split(",")]
    if not all(word.isascii() and word.isdigit() and int(word[:18]) for word in words):
        raise InputError(
            "--batches must be sizes of at least 1 with commas between them, such as 1,64,4096. "
            f"Received: {text!r}."
        )
    return tuple(dict.fromkeys(map(int, words)))


def _silence(words: str) -> None:
    """Rank 0 speaks for all."""


def _check_predicts(cfg: Any, workload: AnyWorkload, clients: int) -> None:
    if launched_ranks() > 1 and not workload.predicts_on_ranks:
        raise InputError(
            f"infer measures {cfg.workload} on one device: start it once, without launch."
        )
    if launched_ranks() > 1 and clients > 1:
        raise InputError("--clients: ranks answer one request at a time. Leave it out.")
    if workload.build_predictor is None:
        raise InputError(
            f"{cfg.name} has no latency to measure: {cfg.workload} gives no scores for samples. "
            "Export it for software that serves such models (trainmark export)."
        )


# --- requests


def _requests(
    cfg: Any, workload: AnyWorkload, sizes: tuple[int, ...] | None, count: int
) -> dict[int, list[Any]]:
    """Different full batches of each size: `count` of them, or as many as there are."""
    wanted = sizes or workloads.definition(cfg).inference_batches
    full, ranks = {}, launched_ranks()
    for size in wanted:
        if size % ranks:
            if sizes:
                raise InputError(
                    f"--batches {size}: {ranks} ranks predict equal shares of a request. Give a "
                    f"multiple of {ranks}."
                )
            continue
        batches = _batches(cfg, workload, size, count)
        of_ranks = of_all_ranks([batch.samples for batch in batches])
        samples = [sum(shares) for shares in zip(*of_ranks, strict=True)]
        if sizes and samples[0] < size:
            raise InputError(
                f"--batches {size}: the {_split(cfg, workload)} split of {cfg.data} has "
                f"{samples[0]:,} samples. Give smaller ones, or more --data."
            )
        full[size] = [b for b, held in zip(batches, samples, strict=True) if held == size]
    return {size: batches for size, batches in full.items() if batches}


def _batches(cfg: Any, workload: AnyWorkload, size: int, count: int) -> list[Any]:
    """This rank's share of each batch."""
    ranks = launched_ranks()
    rank, share = dist.get_rank() if ranks > 1 else 0, size // ranks
    sized = dataclasses.replace(cfg, eval_batch=share)
    data = workload.build_data(sized, _split(cfg, workload), rank, ranks)
    most = max(1, min(count, MAX_SAMPLES // size))
    return list(islice(data, most))


def _split(cfg: Any, workload: AnyWorkload) -> str:
    return workload.held_out_splits(cfg)[0]


# --- time


Predict = Callable[[Any], Any]


def measure_size(
    predictors: Sequence[Predict],
    size: int,
    batches: list[Any],
    steps: int,
    say: Callable[[str], None],
) -> Row:
    """The figures of one size; a predictor for each client."""
    requests = cycle(batches)
    try:
        _, second_s = seconds_of(predictors[0], islice(requests, 2))
        expected_s = second_s * (DROPPED - 2 + steps)
        if expected_s > WORTH_TELLING_S:
            say(f"batch {size:,}: {steps:,} requests take about {expected_s:,.0f} s")
        seconds_of(predictors[0], islice(requests, DROPPED - 2))
        for predict in predictors[1:]:
            seconds_of(predict, islice(requests, DROPPED))
        seconds, all_s = _at_a_time(predictors, list(islice(requests, steps)))
        answered = len(seconds) * size  # requests were chosen by their samples, on all ranks
        found = row(size, seconds, answered, all_s)
        return dataclasses.replace(found, clients=len(predictors))
    except torch.OutOfMemoryError as error:
        sentence = str(error).splitlines()[0]
        raise InputError(f"Out of memory at batch {size:,} ({sentence}).") from None


def _at_a_time(predictors: Sequence[Predict], requests: list[Any]) -> tuple[list[float], float]:
    """How long each request took, and how long all: clients take them in turn, one each."""
    if len(predictors) == 1:
        seconds = seconds_of(predictors[0], requests)
        return seconds, sum(seconds)
    several: Sequence[object] = predictors  # of which the type checker does not think as functions
    in_flight = [predict for predict in several if isinstance(predict, InFlight)]
    if len(in_flight) == len(predictors):
        return _in_flight(in_flight, requests)
    start = Barrier(len(predictors))
    left = iter(requests)  # of a list: threads may share it

    def client(predict: Predict) -> tuple[float, list[float], float]:
        start.wait()
        began = time.perf_counter()
        return began, seconds_of(predict, left), time.perf_counter()

    with ThreadPoolExecutor(len(predictors)) as threads:
        begins, taken, ends = zip(*threads.map(client, predictors), strict=True)
    return [one for own in taken for one in own], max(ends) - min(begins)


def _in_flight(predictors: Sequence[InFlight], requests: list[Any]) -> tuple[list[float], float]:
    """The same by one thread, since threads would wait for Python's lock: once all clients have a
    request under way, it waits for the oldest, whose client begins the next."""
    seconds = []
    under_way = deque[tuple[float, InFlight, Callable[[], Any]]]()
    first = time.perf_counter()

    def finish() -> InFlight:
        began, predict, wait = under_way.popleft()
        wait()
        seconds.append(time.perf_counter() - began)
        return predict

    for number, request in enumerate(requests):
        predict = predictors[number] if number < len(predictors) else finish()
        began = time.perf_counter()
        under_way.append((began, predict, predict.begin(request)))
    while under_way:
        finish()
    return seconds, time.perf_counter() - first


def seconds_of(predict: Predict, requests: Iterable[Any]) -> list[float]:
    """How long each request took."""
    seconds = []
    for request in requests:
        began = time.perf_counter()
        predict(request)  # its scores are in host memory: the device is done
        seconds.append(time.perf_counter() - began)
    return seconds


def row(size: int, seconds: list[float], samples: int, all_s: float) -> Row:
    """The figures of requests of one size, which took `all_s` from the first to the last."""
    latency: dict[str, Any] = dict(metrics.latency_ms(seconds))
    return Row(
        batch=size,
        requests=len(seconds),
        samples=samples,
        samples_per_s=filled(metrics.throughput(samples, all_s)),
        **latency,
    )


def _inference(model: Loaded, rows: list[Row], began: datetime) -> Inference:
    cfg, device = model.cfg, model.mesh.device
    machine, software = environment(device)
    tables = workloads.definition(cfg).tables_precision(cfg)
    return Inference(
        run=cfg.name,
        workload=cfg.workload,
        checkpoint=str(model.path),
        step=model.step,
        samples=model.samples,
        data=cfg.data,
        split=_split(cfg, model.workload),
        case=str(this_cluster(model.mesh)),
        precision=cfg.precision,
        threads=torch.get_num_threads(),
        dropped=DROPPED,
        rows=[
            dataclasses.replace(row, precision=cfg.precision, tables_precision=tables)
            for row in rows
        ],
        hardware=machine,
        software=software,
        started=began.isoformat(timespec="seconds"),
    )
