"""Around the loop: from a configuration to a checked output folder, a run, and its result."""

import dataclasses
import os
import shutil
import sys
import time
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from datetime import UTC, datetime
from pathlib import Path

from trainmark import workloads
from trainmark.config import AnyRun, Run, TrainOptions
from trainmark.contract import MODEL_FOLDER, Predictions
from trainmark.distributed import launched
from trainmark.distributed import mesh as meshes
from trainmark.distributed.mesh import Mesh
from trainmark.errors import InputError
from trainmark.hardware import backends, hardware_file
from trainmark.hardware.devices import identify
from trainmark.hardware.known import Known
from trainmark.hardware.monitor import Monitor
from trainmark.resolve import accumulation_remark
from trainmark.run import alignment, result, run_folder, start, trials
from trainmark.run.assessment import assessments, write_scores
from trainmark.run.forecast import forecast
from trainmark.run.loop import Training
from trainmark.run.memory import check_memory, this_cluster
from trainmark.run.outcome import make_result, with_verdict
from trainmark.run.process import joined, resolved_here, set_process_options
from trainmark.run.progress import Watch
from trainmark.run.result import Result
from trainmark.run.warnings import warnings


def train(
    cfg: Run, options: TrainOptions, started: float, watch: Watch | None = None
) -> list[tuple[Result, Path]]:
    """Train a run (or several seeds of it) and write its results.

    Args:
        started: `time.perf_counter()` when the process began its work.
        watch: what may end the run early.
    """
    if options.repeats < 1:
        raise InputError(f"repeats must be at least 1. Received: {options.repeats}.")
    output = options.output or Path("runs") / cfg.name
    finished = []
    with hardware_file.described(options.hardware) as described, joined(cfg) as mesh:
        if described:
            _check_described(described, mesh)
        for repeat in range(options.repeats):
            folder = output / str(repeat) if options.repeats > 1 else output
            trials.settle(folder, mesh)
            # Resolved per seed, because synthetic data (and so its target) depends on the seed.
            seeded = start.like_the_earlier(
                options, folder, dataclasses.replace(cfg, seed=cfg.seed + repeat)
            )
            seeded, of_trial = _with_choices(seeded, options, mesh, folder)
            remark = accumulation_remark(workloads.named_run(cfg.name), cfg, seeded)
            if remark and mesh.is_main and not repeat:
                print(remark, file=sys.stderr)
            done = of_trial or _train_one(seeded, options, mesh, folder, started, watch)
            finished.append((done, folder))
            started = time.perf_counter()
    return finished


def _with_choices(
    cfg: AnyRun, options: TrainOptions, mesh: Mesh, output: Path
) -> tuple[AnyRun, Result | None]:
    """The resolved run, with what its data choose by trial; and the result of the trial, if it was
    made now."""
    resolved = run_folder.with_full_path(resolved_here(cfg, mesh))
    # What is found in the data may depend on the last bits, and these on the processor.
    candidates = mesh.from_main(workloads.definition(cfg).candidates(cfg, resolved))
    if not candidates:
        return resolved, None
    if mesh.is_main:  # before any trial costs time
        run_folder.check(output, resolved, fresh=options.fresh)
        if options.fresh and not launched.is_restart():
            trials.clear(output)
    mesh.barrier()
    alone, was_finished = dataclasses.replace(options, fresh=False), _has_result(output)

    def train(candidate: AnyRun, folder: Path) -> Result:
        if mesh.is_main:
            _remove_another(folder, candidate)
        mesh.barrier()
        return _train_one(candidate, alone, mesh, folder, time.perf_counter(), None)

    here = {
        flags: run_folder.with_full_path(resolved_here(candidate, mesh))
        for flags, candidate in candidates.items()
    }
    chosen = trials.choose(here, train, output, mesh)
    why = trials.reasons(output, mesh)
    if mesh.is_main:
        print(*why, sep="\n", file=sys.stderr)
    is_new = _has_result(output) and not was_finished
    return chosen, result.read(output) if is_new else None


def _remove_another(folder: Path, cfg: Run) -> None:
    """Remove a trial that was begun with other flags: nobody asked for it by name."""
    try:
        run_folder.check(folder, cfg, fresh=False)
    except InputError:
        shutil.rmtree(folder)


def _train_one(
    cfg: Run,
    options: TrainOptions,
    mesh: Mesh,
    output: Path,
    started: float,
    watch: Watch | None,
) -> Result:
    began = datetime.now(UTC)
    workload = workloads.load(cfg.workload)
    set_process_options(cfg, mesh)
    _reset_peaks(mesh)
    begin = start.find(options, cfg, output)
    if mesh.is_main:
        _check_files(cfg, options, output, begin)
    needed, host_bytes_left = check_memory(cfg, workload, mesh)
    predicted = forecast(cfg, this_cluster(mesh), needed)
    with Monitor(mesh.device) as monitor, ExitStack() as claims:
        training = Training(
            cfg,
            workload,
            mesh,
            output,
            started=started,
            start=begin,
            watch=watch,
            joules=monitor.joules if _counts_energy(mesh) else lambda: 0.0,
            power_w=monitor.power_w,
            host_bytes_left=host_bytes_left,
        )
        training.set_up()
        if earlier := _finished_before(training):
            return earlier
        if mesh.is_main:
            if warning := run_folder.newer_data(output, cfg):
                training.log.say(warning)
            claims.enter_context(run_folder.claimed(output, cfg))
        mesh.barrier()
        training.run()
    predictions, reasons = training.final_predictions(), trials.reasons(output, mesh)
    finished = make_result(training, this_cluster(mesh), monitor.summary(), began)
    if mesh.is_main:
        notes = [*finished.notes, *reasons]
        finished = dataclasses.replace(finished, predicted=predicted, notes=notes)
        finished = _write(training, finished, predictions, options.reference)
    return finished


def _check_files(cfg: Run, options: TrainOptions, output: Path, begin: start.Start | None) -> None:
    """Check before the first step that the reference can be read and the folder is this run's."""
    if options.reference:
        alignment.read_curve(options.reference)
    if launched.is_restart():  # what this run wrote itself is to be continued
        run_folder.check(output, cfg, fresh=False)
    else:
        run_folder.check(
            output, cfg, fresh=options.fresh, began_with=begin.identity if begin else None
        )


def _has_result(output: Path) -> bool:
    return (output / result.FILE_NAME).exists()


def _finished_before(training: Training) -> Result | None:
    """The result of a run that has no step left to do; None if it must be judged by another
    target."""
    output = training.output
    if training.ended is None or not _has_result(output):
        return None
    earlier = result.read(output)
    if earlier.quality.target != training.cfg.target:
        return None
    training.log.say(f"{output} is finished already; nothing was done.")
    return earlier


def _write(
    training: Training,
    finished: Result,
    predictions: Mapping[str, Predictions],
    reference: Path | None,
) -> Result:
    """Write the model, the scores and the result; returns the result with all that they add."""
    cfg, workload, output = training.cfg, training.workload, training.output
    if workload.save_model:
        workload.save_model(training.trainer, output / MODEL_FOLDER)
    samples = finished.best.at_sample if finished.best else finished.samples
    assessed = assessments(cfg, workload, predictions)
    write_scores(output, predictions, most=cfg.keep_scores, samples=samples, data=cfg.data)
    found = warnings(cfg, finished, output, began_with=training.began_with)
    finished = dataclasses.replace(finished, warnings=found, assessments=assessed)
    if reference:
        finished = with_verdict(finished, output, reference)
    finished.write(output)
    training.log.finished(finished)
    return finished


def _check_described(described: Known, mesh: Mesh) -> None:
    """Check that --hardware describes this device, and is the same on all ranks, because tables are
    placed by it."""
    device = identify(mesh.device)
    if (device.key, device.name.lower()) != (described.key, described.name.lower()):
        raise InputError(
            f"--hardware describes {described.name!r} (key {described.key}), and this device is "
            f"{device.name!r} (key {device.key}). Give its own, as trainmark calibrate writes it."
        )
    if any(other != described for other in meshes.of_all_ranks(described)):
        raise InputError("--hardware must say the same on all ranks: give them one file.")


def _counts_energy(mesh: Mesh) -> bool:
    """Whether this rank counts energy: each GPU has a counter; a machine's CPUs share theirs."""
    return mesh.device.type != "cpu" or os.environ.get("LOCAL_RANK", "0") == "0"


def _reset_peaks(mesh: Mesh) -> None:
    """Reset peak memory, so that a run does not report that of a run before it here."""
    backends.reset_peaks(mesh.device)
    # Only Linux has this file, and a sandbox may refuse it; then a peak may be too high.
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")  # the peak of the resident set
