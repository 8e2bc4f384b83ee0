"""From a finished training to its result: every number that `result.json` has."""

import dataclasses
import resource
import statistics
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import torch

from trainmark import metrics, workloads
from trainmark.config import SYNTHETIC, changed_fields, to_plain
from trainmark.distributed.mesh import Mesh
from trainmark.errors import InputError
from trainmark.formatting import counted
from trainmark.hardware import backends, devices
from trainmark.hardware.devices import Cluster
from trainmark.hardware.environment import environment
from trainmark.run import alignment, result
from trainmark.run.clocks import Totals, global_counts
from trainmark.run.energy import energy_note, make_energy
from trainmark.run.loop import Training
from trainmark.run.progress import reaches_target
from trainmark.run.result import Result


def make_result(
    training: Training, cluster: Cluster, monitor: dict[str, Any], began: datetime
) -> Result:
    """The result. All ranks must call this, because some numbers are maxima over ranks."""
    cfg, mesh, progress = training.cfg, training.mesh, training.progress
    measured_here = training.clocks.totals
    totals = dataclasses.replace(measured_here, **global_counts(measured_here, mesh))
    machine, software = environment(mesh.device)
    measured = totals.samples - totals.samples_warmup
    tokens = totals.tokens or None
    times = _times(training)
    closed = workloads.definition(cfg).closed(cfg)
    changed = changed_fields(workloads.named_run(cfg.name), cfg, closed)
    mfu, mfu_reason = _mfu(training, measured, totals.tokens - totals.tokens_warmup, times.train)
    return Result(
        run=cfg.name,
        workload=cfg.workload,
        case=str(cluster),
        precision=cfg.precision,
        parallel={**mesh.axes, **_sent_bytes(training)},
        division="open" if changed else "closed",
        changed=changed,
        samples=totals.samples,
        samples_measured=measured,
        tokens=tokens,
        steps=result.Steps(all=totals.steps, warmup=totals.steps_warmup, skipped=progress.skipped),
        time_s=times,
        throughput=result.Throughput(
            p_whole=metrics.throughput(totals.samples, times.whole),
            p_train=metrics.throughput(measured, times.train),
            p_core=metrics.throughput(measured, times.core),
        ),
        tokens_per_device_s=metrics.throughput(
            totals.tokens - totals.tokens_warmup, times.train * mesh.world_size
        ),
        tokens_per_device_s_spread=_spread(totals, mesh),
        mfu=mfu,
        mfu_reason=mfu_reason,
        quality=_quality(training),
        evaluations=progress.evaluations,
        best=progress.best,
        ended=training.ended,
        memory=_memory(mesh, monitor),
        energy=make_energy(training, totals, times, monitor),
        loss=result.Loss(first=progress.first_loss, last=progress.last_loss),
        notes=[*_notes(training), *energy_note(monitor)],
        config=to_plain(cfg),
        hardware={**machine, "monitor": monitor},
        software=software,
        started=began.isoformat(timespec="seconds"),
    )


def with_verdict(finished: Result, output: Path, reference: Path) -> Result:
    """The result with the verdict on its loss curve; a note if the curve is too short for one."""
    try:
        found = alignment.align(output, reference)
    except InputError as error:
        return dataclasses.replace(finished, notes=[*finished.notes, f"Not judged: {error}"])
    return dataclasses.replace(finished, aligned=alignment.verdict(found))


def _spread(totals: Totals, mesh: Mesh) -> list[float] | None:
    """Tokens per second and device in the slowest and the fastest stretch between two looks."""
    if not totals.fastest_tokens_s:
        return None
    share = mesh.dp_size / mesh.world_size
    return [totals.slowest_tokens_s * share, totals.fastest_tokens_s * share]


def _sent_bytes(training: Training) -> dict[str, dict[str, float]]:
    """Bytes that a device sends to others in a step, by kind; the maximum over devices."""
    mesh, trainer = training.mesh, training.trainer
    sent = training.workload.sent_bytes_per_step(trainer) if mesh.world_size > 1 else {}
    if not sent:
        return {}
    most = mesh.max_over_ranks(list(sent.values()))
    return {"sent_bytes_per_step": dict(zip(sent, most, strict=True))}


def _times(training: Training) -> result.Times:
    totals = training.clocks.totals
    names = [field.name for field in dataclasses.fields(result.Times)]
    slowest = training.mesh.max_over_ranks([getattr(totals, name) for name in names])
    return result.Times(**dict(zip(names, slowest, strict=True)))


def _mfu(
    training: Training, samples: int, tokens: int, seconds: float
) -> tuple[list[result.Mfu], str | None]:
    cfg, mesh = training.cfg, training.mesh
    peak = devices.peak_flops(devices.identify(mesh.device), cfg.precision)
    if isinstance(peak, devices.Unknown):
        return [], peak.reason
    if samples == 0:
        return [], "the run was too short to measure: all of its steps were warm-up"
    needed = training.workload.flops(cfg, samples, tokens)
    # An fp8 run does part of its arithmetic in bf16: its MFU is a range between the two peaks.
    wider = devices.peak_flops(devices.identify(mesh.device), "bf16")
    high = wider.flops if cfg.precision == "fp8" and isinstance(wider, devices.Peak) else None

    def over(flops: float, peak_flops: float) -> float:
        return metrics.mfu(flops, seconds, mesh.world_size, peak_flops)

    return [
        result.Mfu(
            convention=convention,
            value=over(flops, peak.flops),
            low=over(flops, peak.flops) if high else None,
            high=over(flops, high) if high else None,
            peak_flops=peak.flops,
            peak_dtype=peak.dtype,
            peak_source=peak.source,
        )
        for convention, flops in needed.items()
    ], None


def _quality(training: Training) -> result.Quality:
    cfg, progress = training.cfg, training.progress
    final = result.final_metrics(progress.evaluations, progress.best)
    timed = zip(progress.evaluations, progress.evaluated_at_s, strict=True)
    reached = [(e.at_sample, at_s) for e, at_s in timed if reaches_target(e, cfg)]
    # What the run began with is not its work; it counts where the run ends with it.
    least = 0 if progress.best and progress.best.at_sample == 0 else 1
    at_sample, at_s = next((found for found in reached if found[0] >= least), (None, None))
    return result.Quality(
        metric=cfg.metric,
        split=cfg.quality_split,
        value=final.get(cfg.quality_split, {}).get(cfg.metric),
        target=cfg.target,
        better=cfg.better,
        reached=None if cfg.target is None else at_sample is not None,
        at_sample=at_sample,
        at_s=at_s,
        best_possible=workloads.definition(cfg).best_possible(cfg),
    )


def _memory(mesh: Mesh, monitor: dict[str, Any]) -> result.Memory:
    host_peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    total = devices.identify(mesh.device).memory_bytes
    if mesh.device.type == "cpu":
        peak, allocated = host_peak, None
    else:
        allocated, reserved = backends.peak_bytes(mesh.device)
        seen = (monitor.get("memory_bytes") or {}).get("max") or 0
        # The device's own figure includes the context and the cache; sampling may miss a peak.
        peak = max(int(seen), reserved)
    peaks = mesh.max_over_ranks([peak, allocated or 0, host_peak])
    return result.Memory(
        peak_bytes=int(peaks[0]),
        allocated_peak_bytes=int(peaks[1]) if allocated is not None else None,
        total_bytes=total,
        host_peak_bytes=int(peaks[2]),
    )


def _notes(training: Training) -> Iterator[str]:
    cfg, totals = training.cfg, training.clocks.totals
    if totals.steps_partial:
        yield f"{counted(totals.steps_partial, 'step')} had fewer samples than a global batch."
    if training.progress.skipped:
        skipped = counted(training.progress.skipped, "step")
        yield f"Skipped {skipped}, because a gradient overflowed."
    steps = training.progress.step
    idle = sum(cfg.schedule.factor(step) == 0 for step in range(1, steps))  # a decay ends with one
    if idle > 1:
        yield (
            f"The learning rate was 0 in {idle:,} of {steps:,} steps: its schedule ended before "
            "the run did."
        )
    if best := training.progress.best:
        waited = " after as many evaluations as --patience allows" * (training.ended == "patience")
        yield (
            f"Quality is that of step {best.step:,} of {steps:,}, whose {best.metric} on "
            f"{best.split}, {best.value:.6g}, was the best{waited}."
        )
    if training.saves_stand_still:
        yield (
            "Training stood still while checkpoints were written: host memory has no room for a "
            "copy of the weights."
        )
    if totals.sessions > 1:
        yield (
            f"Continued {totals.sessions - 1} time(s) from a checkpoint; time between the "
            "checkpoint and the stop is not counted."
        )
    if cfg.data == SYNTHETIC:
        yield "Synthetic data: the quality says nothing about real data."
    if torch.is_anomaly_enabled():
        yield "torch.autograd anomaly detection was on."
    if cfg.profile:
        yield f"Steps {cfg.profile} ran under torch.profiler."
    if training.start:
        yield f"Started from the {training.start}."
    elif training.began_with:  # in an earlier session
        yield f"Started from {training.began_with['path']}."
    yield from workloads.definition(cfg).notes(cfg)


def spread(results: list[Result]) -> str:
    """One sentence on how much the repeats of a run differ."""
    quality = [r.quality.value for r in results if r.quality.value is not None]
    speed = [r.throughput.p_train for r in results if r.throughput.p_train is not None]
    parts = [
        f"{name} {statistics.mean(values):.6g} +- {float(f'{statistics.stdev(values):.2g}'):g}"
        for name, values in ((results[0].quality.metric, quality), ("p_train", speed))
        if len(values) > 1
    ]
    return f"{len(results)} repeats: " + ", ".join(parts)
