"""THE training loop, shared by all workloads: it owns time, counting, logging and checkpoints.

The mathematics is the workload's (`trainer.step`), the bytes are the reader's, the ranks are the
mesh's. Read `Training.run` from top to bottom; the rest explains one line of it each.
"""

import dataclasses
import math
import time
from collections.abc import Callable
from itertools import takewhile
from pathlib import Path
from typing import Any

from torch import Tensor

from trainmark import metrics
from trainmark.checkpoint import checkpoints, folders
from trainmark.checkpoint.room import check_room
from trainmark.checkpoint.run_tensors import stored_tensors, stored_weights
from trainmark.checkpoint.saver import HostMemory, Saver, copy_bytes
from trainmark.checkpoint.writer import plan_share
from trainmark.config import Interval, Run, to_plain
from trainmark.contract import AnyWorkload, Data, Predictions, Prepared, Trainer
from trainmark.distributed.mesh import Mesh
from trainmark.errors import InputError
from trainmark.hardware.backends import synchronizer
from trainmark.run.assessment import evaluated
from trainmark.run.checks import can_check, check
from trainmark.run.clocks import ENERGY, Clocks, global_counts, global_state
from trainmark.run.curves import Step, Stretch
from trainmark.run.feed import Feed
from trainmark.run.memory import has_room_for_copies
from trainmark.run.profiler import Profiler
from trainmark.run.progress import Progress, Watch, best_after, watched_split, why_ended
from trainmark.run.result import Best, Evaluation
from trainmark.run.run_folder import CHECKPOINTS
from trainmark.run.runlog import RunLog, SilentLog
from trainmark.run.signals import StopRequest
from trainmark.run.start import Start
from trainmark.run.unread import Unread
from trainmark.validation import parse


class Interrupted(Exception):  # noqa: N818  (no error: it was asked for)
    """The run was asked to stop, and saved first."""

    def __init__(self, signal_number: int, path: Path) -> None:
        super().__init__(
            f"Stopped by request, saved {path}; the same command continues from there."
        )
        self.exit_code = 128 + signal_number


class Training:
    """One run of one workload on this rank: build it, `set_up`, then `run`.

    Nothing is written before `run`: data or weights that cannot be used leave no trace.

    Args:
        cfg: a resolved configuration.
        workload: the functions to train with.
        mesh: this rank's place and device.
        output: folder of the run; a checkpoint of the same run in it is continued.
        started: `time.perf_counter()` when the process began its work.
        start: what to begin with, if not with random weights.
        watch: what may end the run early.
        joules: the energy that this rank's device has used so far; None where it does not count.
        power_w: the mean power of this rank's device since the last call; None if not known.
        host_bytes_left: unused host memory of this machine. If a copy of the weights fits into it,
            they are saved from there while training goes on.
    """

    def __init__(
        self,
        cfg: Run,
        workload: AnyWorkload,
        mesh: Mesh,
        output: Path,
        *,
        started: float,
        start: Start | None = None,
        watch: Watch | None = None,
        joules: Callable[[], float | None] = lambda: None,
        power_w: Callable[[], float | None] = lambda: None,
        host_bytes_left: int = 0,
    ) -> None:
        can_check(cfg, workload)
        self.cfg, self.workload, self.mesh, self.output = cfg, workload, mesh, output
        self.start, self._watch = start, watch
        self.began_with = start.identity if start else None
        self._host_bytes_left, self._power_w = host_bytes_left, power_w
        self.saves_stand_still = False
        self.clocks = Clocks(started, cfg.warmup_clock, synchronizer(mesh.device), joules)
        self.progress = Progress()
        self.log = RunLog(output, cfg, workload, started) if mesh.is_main else SilentLog()
        held_out = workload.held_out_splits(cfg)
        self._watched = watched_split(cfg, held_out)
        self._best_taken: Best | None = None
        self.data = self._data("train")
        splits = dict.fromkeys([*held_out, cfg.quality_split])
        self._held_out = {split: self._data(split) for split in splits}
        self._predictions: dict[str, tuple[int, Predictions]] = {}
        self._unread = Unread(mesh.device)
        self._samples_looked_at = 0
        self._interval = Interval.parse(cfg.checkpoint_every)
        self._saved_at = time.perf_counter()

    def run(self) -> None:
        """Train until the last step, the target or the end of patience; evaluate, and save."""
        cfg, clocks, progress, total_steps = self.cfg, self.clocks, self.progress, self.total_steps
        self._saver = self._build_saver()
        with self.log, StopRequest() as stop, self._saver:
            self._start_log()
            eval_steps = metrics.evaluation_steps(self.data.steps_per_epoch, cfg.evals_per_epoch)
            self._evaluate_first_weights()
            clocks.train_starts()
            self.feed = Feed(iter(self.data), self.trainer, clocks, self.mesh.device)
            profiler = Profiler(cfg.profile if self.mesh.is_main else None, self.output)
            while self.ended is None:
                batch = next(self.feed)
                lr = cfg.lr * cfg.schedule.factor(progress.step)
                loss, skipped, differ = self._step(batch, lr)
                self._count(batch, lr, loss, skipped, differ)
                profiler.step_done(progress.step)
                if progress.step % cfg.log_every == 0:
                    self._look()
                if progress.step == total_steps:
                    break
                if (progress.step - 1) % self.data.steps_per_epoch in eval_steps:
                    self._evaluate_on_the_way()
                if self._must_save(stop):
                    self._save_on_the_way(stop)

            clocks.last_step_done()
            self._look()
            profiler.stop()
            self.log.training_ends()
            self._evaluate_at_end()
            clocks.run_ends()

    # --- beginning

    def _data(self, split: str) -> Data[Any]:
        return self.workload.build_data(self.cfg, split, self.mesh.dp_rank, self.mesh.dp_size)

    def set_up(self) -> None:
        """Allocate the model, and continue from the newest checkpoint if there is one."""
        if self.cfg.device == "cpu" and self.cfg.precision == "fp16":
            self.log.say("Most CPUs have no fast fp16 GEMMs: try --precision fp32.")
        self.trainer = build_trainer(self.cfg, self.workload, self.mesh)
        path = folders.latest(self.output / CHECKPOINTS)
        self._unsaved = path is None
        if path is not None:
            self._restore(path)
        elif self.start is not None:
            self._begin_with(self.start)

    def _begin_with(self, start: Start) -> None:
        tensors = stored_tensors if start.with_optimizer else stored_weights
        start.load(tensors(self.trainer))
        if start.with_optimizer:
            self.workload.state_loaded(self.trainer)
        self.log.say(f"Beginning with the {start}.")

    def _build_saver(self) -> Saver:
        """Check the disk, and reserve host memory for copies of the weights.

        Both before training: a full disk must not cost steps, and no step must wait for memory.
        """
        root, mesh = self.output / CHECKPOINTS, self.mesh
        if self.cfg.checkpoint_every == "never" and self.cfg.patience is None:
            self.log.say(
                "Nothing will be saved but the result: checkpoint_every is 'never'. To continue, "
                "evaluate or export this run, give --checkpoint-every '10 minutes'."
            )
            return Saver(root)
        share = plan_share(stored_tensors(self.trainer))
        check_room(root, share.all_bytes)
        needed = copy_bytes(share)
        self.saves_stand_still = not has_room_for_copies(needed, self._host_bytes_left, mesh)
        memory = None if self.saves_stand_still else HostMemory(needed, mesh.device)
        return Saver(root, memory, mesh.host_group)

    def _start_log(self) -> None:
        self._samples_looked_at = self._samples()
        self.log.training_starts(
            step=self.progress.step,
            total_steps=self.total_steps,
            samples=self._samples_looked_at,
            train_samples=self.data.samples,
            eval_samples=self._held_out[self.cfg.quality_split].samples,
        )

    @property
    def total_steps(self) -> int:
        """The last step, unless the target or patience ends the run earlier."""
        all_epochs: int = self.cfg.epochs * self.data.steps_per_epoch
        return all_epochs if self.cfg.max_steps is None else min(self.cfg.max_steps, all_epochs)

    @property
    def ended(self) -> str | None:
        """Why there is no step left to do; None while there is one."""
        return why_ended(self.progress, self.cfg, self.total_steps)

    def _restore(self, path: Path) -> None:
        state = checkpoints.load(path, stored_tensors(self.trainer), exact=True)
        self.workload.state_loaded(self.trainer)
        self.progress = parse(Progress, state["progress"], str(path))
        self.began_with = state.get("start")
        if self.cfg.patience is None:
            self.progress.best = None
        self.data.restore(state["data"])
        if self.mesh.dp_rank == 0:  # the counts in a checkpoint are sums over these ranks
            counted = {} if self.mesh.is_main else dict.fromkeys(ENERGY, 0.0)
            self.clocks.restore(state["clocks"] | counted)
        self.log.say(f"Continuing {path} at step {self.progress.step:,}.")

    # --- one step

    def _step(self, batch: Prepared, lr: float) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        checked_step, every = self.workload.checked_step, self.cfg.check_every
        if checked_step is None or every is None or (self.progress.step + 1) % every:
            return *self.trainer.step(batch, lr), {}
        return checked_step(self.trainer, batch, lr)

    def _count(
        self,
        batch: Prepared,
        lr: float,
        loss: Tensor,
        skipped: Tensor,
        differ: dict[str, Tensor],
    ) -> None:
        self.progress.step += 1
        self._unsaved = True
        self.clocks.step_done(samples=batch.samples, tokens=batch.tokens, partial=batch.partial)
        self._unread.add(
            {"loss": loss, "skipped": skipped, **self.workload.observed(self.trainer)},
            differ,
            step=self.progress.step,
            samples=batch.position,
            lr=lr,
        )

    def _look(self) -> None:
        """Read the losses since the last look. Stop at a loss that is not finite, and at a checked
        step whose two computations differ."""
        read = self._unread.read()
        if not read:
            return
        self.feed.collect_waits()
        seconds = self.clocks.looked()
        for at, differ in read:
            if differ:
                check(at.step, differ, self.trainer, self.mesh, self._last_checkpoint)
        if self._saver.is_done and not self._saver.has_failed:
            self._wait_for_save()
        steps = [at for at, _ in read]
        good = list(takewhile(self._is_good, steps))
        self.progress.skipped += sum(at.skipped for at in good)
        if len(good) < len(steps):
            self._note(good, None)
            raise self._not_finite(steps[len(good)])
        self._note(good, seconds)

    def _is_good(self, at: Step) -> bool:
        """In fp16 a gradient may overflow: the step is skipped, and the next has another scale."""
        return math.isfinite(at.loss) and (not at.skipped or self.cfg.precision == "fp16")

    def _note(self, steps: list[Step], seconds: float | None) -> None:
        """Log good steps, and how long they took."""
        if not steps:
            return
        self.progress.last_loss = steps[-1].loss
        if self.progress.first_loss is None:
            self.progress.first_loss = steps[0].loss
        before, self._samples_looked_at = self._samples_looked_at, steps[-1].samples
        stretch = Stretch(
            time_s=self.clocks.e2e_so_far,
            samples_per_s=metrics.throughput(self._samples_looked_at - before, seconds or 0.0),
            power_w=self._power_w(),
        )
        self.log.looked(steps, stretch)

    def _not_finite(self, at: Step) -> InputError:
        what = "gradient" if math.isfinite(at.loss) else "loss"
        return InputError(
            f"The {what} of step {at.step} is not finite (loss {at.loss}); the step was not "
            f"applied and the run stops. Its samples: {self.data.describe(at.samples)}. Check "
            f"these rows, or lower lr (now {at.lr:g}); {self._last_checkpoint()}."
        )

    def _last_checkpoint(self) -> str:
        """Which checkpoint is the last one, as the end of a message."""
        self._saver.finish()
        last = folders.latest(self.output / CHECKPOINTS)
        return f"the last checkpoint is {last}" if last else "there is no checkpoint yet"

    # --- evaluation

    def _evaluate_first_weights(self) -> None:
        """Those of another run may stay the best, so they are saved as other best ones are."""
        cfg, progress, split = self.cfg, self.progress, self._watched
        taken = self.began_with is not None and split in self.workload.held_out_splits(cfg)
        is_due = progress.step == 0 and not self._is_evaluated(split)
        if is_due and (taken or cfg.initial_evaluation):
            self._evaluate(split)
            if progress.is_best:
                self._save()

    def _evaluate_on_the_way(self) -> None:
        """Evaluate between two steps, and save weights that are the best so far."""
        self._look()
        with self.clocks.pause("evaluation"):
            self._evaluate(self._watched)
        if self.progress.is_best:
            with self.clocks.pause("checkpoint"):
                self._save()
        if self._watch:
            self._watch(self.progress.evaluations)

    def _evaluate(self, split: str) -> None:
        began, progress, taken = time.perf_counter(), self.progress, self._best_taken
        found, predictions = evaluated(self.workload, self.trainer, self._held_out[split])
        evaluation = Evaluation(
            at_sample=self._weights_at_sample(),
            split=split,
            metrics=found,
            seconds=time.perf_counter() - began,
        )
        progress.evaluations.append(evaluation)
        progress.evaluated_at_s.append(self.clocks.e2e_so_far)
        self.log.evaluated(evaluation, taken.step if taken else progress.step)
        has_learned = progress.step > 0 or self.began_with is not None
        if self.cfg.patience is not None and split == self._watched and has_learned:
            progress.best = best_after(progress.best, evaluation, progress.step, self.cfg)
        if predictions is not None and self.ended:  # they are assessed after the last step
            self._predictions[split] = (evaluation.at_sample, predictions)

    def _evaluate_at_end(self) -> None:
        """Save the last weights, and evaluate those that the run ends with on all splits."""
        if self.cfg.checkpoint_every != "never":
            self._save()  # first: an evaluation that fails costs none of the steps
        known = len(self.progress.evaluations)
        if self.cfg.patience is not None:
            self._take_best_weights()
        for split in self.workload.held_out_splits(self.cfg):
            if not self._is_evaluated(split):
                self._evaluate(split)
        self._wait_for_save()
        if len(self.progress.evaluations) > known and not self._unsaved:
            self._save_evaluations()

    def final_predictions(self) -> dict[str, Predictions]:
        """What the current weights predict for every held-out split; all ranks must call this."""
        if self.workload.predict is None:
            return {}
        found, now = {}, self._weights_at_sample()
        for split in self.workload.held_out_splits(self.cfg):
            at_sample, kept = self._predictions.get(split, (None, None))
            if kept is None or at_sample != now:  # of other weights, or of an earlier session
                kept = self.workload.predict(self.trainer, self._held_out[split])
            found[split] = kept
        return found

    def _is_evaluated(self, split: str) -> bool:
        """Whether the current weights were evaluated on `split`."""
        now = self._weights_at_sample()
        return any(e.split == split and e.at_sample == now for e in self.progress.evaluations)

    def _weights_at_sample(self) -> int:
        """How many global samples the current weights have learned from."""
        return self._best_taken.at_sample if self._best_taken else self._samples()

    def _samples(self) -> int:
        """Samples that all ranks have trained on."""
        return global_counts(self.clocks.totals, self.mesh)["samples"]

    # --- patience

    def _take_best_weights(self) -> None:
        """Replace the last weights by the best ones, after both were saved."""
        if not self._is_evaluated(self._watched):
            self._evaluate(self._watched)
        best = self.progress.best
        if self.cfg.checkpoint_every != "never" or self.progress.is_best:
            self._save()
        self._wait_for_save()
        if best is None:  # the metric was never defined: nothing to choose by
            return
        path = folders.folder_of(self.output / CHECKPOINTS, best.step)
        if not self.progress.is_best:
            if not path.is_dir():
                raise InputError(
                    f"{path}, the best checkpoint, is gone; the last weights are saved. Evaluate "
                    "them with --checkpoint last."
                )
            checkpoints.load(path, stored_weights(self.trainer))
        self._best_taken = best
        self.log.say(f"Best {best.metric} on {best.split}: {best.value:.5f}, of {path}.")

    # --- checkpoints

    def _must_save(self, stop: StopRequest) -> bool:
        """Whether to save now.

        All ranks must agree, but their clocks and signals differ. So they ask each other, though
        only at every look; in between they go by the number of steps, which is the same on all.
        """
        step, seconds = self.progress.step, time.perf_counter() - self._saved_at
        if self.mesh.world_size == 1 or step % self.cfg.log_every == 0:
            due = self._interval.due(step, seconds)
            return self.mesh.any(stop.requested or due or self._saver.has_failed)
        return self._interval.steps is not None and self._interval.due(step, seconds)

    def _save_on_the_way(self, stop: StopRequest) -> None:
        """Save between two steps; then end the run, if any rank was asked to stop."""
        self._look()
        with self.clocks.pause("checkpoint"):
            path = self._save()
        if signal_number := self.mesh.max_over_ranks([stop.signal_number])[0]:
            self._wait_for_save()
            raise Interrupted(int(signal_number), path)

    def _save(self) -> Path:
        """Begin to save this step, unless it is saved already; then the weights may change.

        Returns the checkpoint's folder.
        """
        path = folders.folder_of(self._saver.root, self.progress.step)
        if not self._unsaved:
            return path
        self._wait_for_save()
        best = self.progress.best
        state = {
            "config": to_plain(self.cfg),
            "progress": dataclasses.asdict(self.progress),
            "clocks": global_state(self.clocks, self.mesh),
            "data": {"samples": self._samples()},
            "start": self.began_with,
        }
        self._saver.save(
            self.progress.step,
            stored_tensors(self.trainer),
            state,
            keep=self.cfg.keep_checkpoints,
            best=best.step if best else None,
        )
        self._saved_at, self._unsaved = time.perf_counter(), False
        return path

    def _wait_for_save(self) -> None:
        """Wait until the last checkpoint is on disk."""
        if saved := self._saver.wait():
            self.clocks.saved(saved.background_s)
            self.log.checkpointed(saved.path)

    def _save_evaluations(self) -> None:
        """Add the last evaluations to this step's checkpoint, which was saved before them."""
        path = folders.folder_of(self.output / CHECKPOINTS, self.progress.step)
        clocks = global_state(self.clocks, self.mesh)
        if self.mesh.is_main and path.is_dir():
            progress = dataclasses.asdict(self.progress)
            checkpoints.update_state(path, {"progress": progress, "clocks": clocks})
        self.mesh.barrier()


def build_trainer(cfg: Run, workload: AnyWorkload, mesh: Mesh) -> Trainer[Any, Any]:
    """Build on the meta device, cut to this rank's parts, then allocate each part once."""
    parts = workload.parallelize(workload.build_model(cfg), mesh, cfg)
    workload.init_weights(parts, cfg, mesh.device)
    built: Trainer[Any, Any] = workload.build_trainer(parts, mesh, cfg)
    return built
