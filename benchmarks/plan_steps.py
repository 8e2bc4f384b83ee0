"""Steps of one configuration for `plan_sweep.py`: their time, their kernels, and their memory."""

import dataclasses
import gc
import itertools
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from benchmarks.common import Options
from benchmarks.dlrm_systems import click_batch, random_clicks, resolved
from benchmarks.plan_design import Case
from benchmarks.timing import step_times, synchronize
from trainmark import workloads
from trainmark.distributed.mesh import single
from trainmark.hardware.nvidia import nvml_device
from trainmark.run.forecast import forecast
from trainmark.run.loop import build_trainer
from trainmark.run.memory import plan_memory, this_cluster
from trainmark.training.precision import set_matmul_precision

PROFILED = 3
TINY_MODEL: dict[str, Any] = {"embedding_dim": 16, "bottom_mlp": (32, 16), "top_mlp": (64, 1)}
TINY_NET = {"vocabulary": 100, "hidden": 32, "layers": 2, "heads": 2, "feed_forward": 64}
# Small: made-up clicks must not drive the weights anywhere, or steps would be skipped.
RATES = {"sgd": 0.1, "rowwise_adagrad": 1e-4, "adagrad": 1e-4, "adam": 1e-5}


# --- configurations


def configuration(case: Case, options: Options) -> Any:
    run = workloads.named_run(case.run)
    changes = case.changes | {"data": "synthetic"}
    cfg = resolved(run, _tiny(changes) if options.tiny else changes, options.device)
    if cfg.workload == "dlrm" and case.ids == "power_law":  # known to the planner
        cfg = dataclasses.replace(cfg, synthetic_ids="planted")
    return cfg


def _tiny(changes: dict[str, Any]) -> dict[str, Any]:
    batch = max(16, changes["global_batch"] // 1024)
    changes = changes | {"global_batch": batch, "micro_batch": batch}
    if changes["precision"] in ("tf32", "fp8", "fp16"):  # which a CPU does not have
        changes = changes | {"precision": "fp32"}
    if "mode" in changes:
        sizes = {"positions": 64, **TINY_NET}
        return changes | {"model": sizes, "sequence_length": 64, "synthetic_sentences": 4 * batch}
    rows = changes.get("model", {}).get("table_rows", (300, 40))
    model = TINY_MODEL | {"table_rows": tuple(min(count, 1000) for count in rows)}
    return changes | {"model": changes.get("model", {}) | model}


# --- steps


class Steps:
    """Endless steps of a configuration on batches that lie on the device already."""

    def __init__(self, case: Case, options: Options) -> None:
        self.device = options.device
        self.cfg = configuration(case, options)
        set_matmul_precision(self.cfg.precision)
        self._workload = workloads.load(self.cfg.workload)
        before = allocated(self.device)
        self.batches = list(self._make_batches(case))
        clean(self.device)  # what drawing them took is no part of a run
        self.batch_bytes = allocated(self.device) - before
        self.trainer: Any = build_trainer(self.cfg, self._workload, single(self.device))
        self.built_bytes = allocated(self.device) - before - self.batch_bytes
        self._lr = RATES[getattr(self.cfg.optimizer, "name", "adam")]
        self._ahead: Any = None
        self._turns = itertools.cycle(self.batches)
        self.skipped: Any = None

    def _make_batches(self, case: Case) -> Iterator[Any]:
        if self.cfg.workload == "dlrm":
            model, batch = self.cfg.model, self.cfg.global_batch
            for parts in random_clicks(model, batch, case.ids, self.device):
                yield click_batch(model.table_rows, *parts)
        else:
            yield from self._workload.build_data(self.cfg, "train", 0, 1)

    def __call__(self) -> None:
        """One step; the next batch is prepared ahead, as in a run."""
        if self._ahead is None:
            self._ahead = self.trainer.prepare(next(self._turns))
        prepared, self._ahead = self._ahead, self.trainer.prepare(next(self._turns))
        if prepared.ready is not None:
            prepared.ready.wait()
        _, self.skipped = self.trainer.step(prepared, self._lr)

    def predicted(self) -> dict[str, Any]:
        """By the planner as it is."""
        mesh = single(self.device)
        memory = plan_memory(self.cfg, self._workload, mesh)
        return dataclasses.asdict(forecast(self.cfg, this_cluster(mesh), memory))


def allocated(device: torch.device) -> int:
    return torch.cuda.memory_allocated() if device.type == "cuda" else 0


def peaks(steps: Steps) -> dict[str, int]:
    """Bytes of the allocator, less those of the batches, of which a run has none lying about."""
    if steps.device.type != "cuda":
        return {"allocated_bytes": 0, "reserved_bytes": 0}
    return {
        "allocated_bytes": torch.cuda.max_memory_allocated() - steps.batch_bytes,
        "reserved_bytes": torch.cuda.max_memory_reserved() - steps.batch_bytes,
    }


def host_s(one_step: Callable[[], Any], device: torch.device) -> float:
    """Seconds that the host takes to issue a step, while nothing makes it wait."""
    synchronize(device)
    began, count = time.perf_counter(), 8
    for _ in range(count):
        one_step()
    seconds = (time.perf_counter() - began) / count
    synchronize(device)
    return seconds


def timed(one_step: Callable[[], Any], options: Options) -> dict[str, Any]:
    """The median step once the clock has settled."""
    device = options.device
    one = statistics.median(step_times(one_step, 3, device))
    if options.seconds:
        step_times(one_step, max(2, round(0.5 / one)), device)  # to the power limit
    found = step_times(one_step, max(8, min(2000, round(options.seconds / one))), device)
    power = _power(device)
    tenths = statistics.quantiles(found, n=10)
    return {
        "measured_s": statistics.median(found),
        "mean_s": statistics.fmean(found),
        "spread_s": [tenths[0], tenths[-1]],
        "steps": len(found),
        "host_s": host_s(one_step, device),
    } | power


def _power(device: torch.device) -> dict[str, Any]:
    """Right behind the steps, before the clock rises again."""
    with nvml_device(device) as nvml:
        if nvml.handle is None:
            return {"power_w": None, "clock_mhz": None}
        library = nvml.library
        try:
            watts = library.nvmlDeviceGetPowerUsage(nvml.handle) / 1e3
            clock = library.nvmlDeviceGetClockInfo(nvml.handle, library.NVML_CLOCK_SM)
        except library.NVMLError as error:
            return {"power_w": None, "clock_mhz": None, "nvml": str(error)}
        return {"power_w": watts, "clock_mhz": clock}


def kernels(one_step: Callable[[], Any], device: torch.device) -> list[tuple[str, int, float]]:
    """Of one step, in order: name, stream, microseconds."""
    from torch.profiler import ProfilerActivity, profile

    if device.type != "cuda":
        return []
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(PROFILED):
            one_step()
        synchronize(device)
    results: Any = profiler.profiler
    events = [e for e in results.kineto_results.events() if "CUDA" in str(e.device_type())]
    events.sort(key=lambda event: event.start_ns())
    of_last = events[-(len(events) // PROFILED) :]
    return [(e.name()[:200], e.device_resource_id(), e.duration_ns() / 1e3) for e in of_last]


def clean(device: torch.device) -> None:
    """As in a new process: nothing cached, no workspace of cuBLAS, no peak."""
    if "torch._dynamo" in sys.modules:
        torch.compiler.reset()
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch._C._cuda_clearCublasWorkspaces()
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
