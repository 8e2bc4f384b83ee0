"""What a run writes while it trains: its curves, event logs, and a line for the person."""

import dataclasses
import time
from contextlib import ExitStack
from pathlib import Path
from statistics import fmean
from typing import Any, TextIO

from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from trainmark.config import Run, to_plain
from trainmark.contract import AnyWorkload
from trainmark.errors import require
from trainmark.progress import SafeConsole
from trainmark.run import mlperf
from trainmark.run.curves import CurveWriter, Step, Stretch
from trainmark.run.eventlogs import (
    DlLog,
    PerfLog,
    finished_event,
    flagperf_metrics,
    training_summary,
)
from trainmark.run.mlperf import MlperfLog
from trainmark.run.result import Evaluation, Result

DLLOGGER_FILE = "dllogger.json"


class RunLog:
    """Opened by the main rank only; the others get a `SilentLog`."""

    def __init__(self, folder: Path, cfg: Run, workload: AnyWorkload, started: float) -> None:
        self._folder = folder
        self._cfg = cfg
        self._workload = workload
        self._started_s = time.time() - (time.perf_counter() - started)
        self._stack = ExitStack()
        self._console = SafeConsole(stderr=True)
        if cfg.tensorboard:
            require("--tensorboard", "tensorboard", extra="plots")

    def __enter__(self) -> "RunLog":
        self._perf = PerfLog(self._append_to("perf.log"))
        goes_on = mlperf.goes_on(self._folder)
        self._mlperf = self._mlperf_log(self._append_to(mlperf.FILE_NAME), goes_on)
        self._dllogger = None
        if self._cfg.dllogger:
            self._dllogger = DlLog(self._append_to(DLLOGGER_FILE), self._started_s)
            self._dllogger.describe()
            self._dllogger.log("PARAMETER", to_plain(self._cfg))
        self._perf.event("INIT_START", at_s=self._started_s)
        self._mlperf.init_starts(self._started_s)
        return self

    def __exit__(self, *exc: object) -> None:
        self._stack.close()

    # --- the course of a run

    def say(self, sentence: str) -> None:
        self._console.say(sentence)

    def training_starts(
        self, *, step: int, total_steps: int, samples: int, train_samples: int, eval_samples: int
    ) -> None:
        """After `step` steps and `samples` samples; the others are of a whole split."""
        self._curves, self._total_steps = CurveWriter(self._folder, step), total_steps
        self._stack.callback(self._curves.close)
        self._board = self._board_after(step)
        self._progress, self._task = self._start_progress(step, total_steps)
        self._perf.event("INIT_END", "Finish initialization")
        self._perf.event("TRAIN_START")
        self._mlperf.training_starts(samples, train_samples, eval_samples)

    def looked(self, steps: list[Step], stretch: Stretch) -> None:
        """The steps since the last look, and what they took.

        The person is told their mean loss, because a batch of rare clicks says little by itself;
        and not of the few steps between such a look and an evaluation.
        """
        self._curves.add(steps, stretch)
        last = steps[-1]
        self._mlperf.looked(last.step, last.samples, last.loss)
        rate, loss = stretch.samples_per_s, f"{fmean(step.loss for step in steps):.5f}"
        speed = "-" if rate is None else f"{rate:{',.0f' if rate >= 100 else '.3g'}} samples/s"
        self._progress.update(self._task, completed=last.step, loss=loss, speed=speed)
        is_due = last.step % self._cfg.log_every == 0 or last.step == self._total_steps
        if is_due and not self._console.is_terminal:
            self.say(f"step {last.step:,}  loss {loss}  {speed}  lr {last.lr:.6g}")
        if self._dllogger:
            told = {"loss": last.loss, "learning_rate": last.lr, "samples": last.samples}
            self._dllogger.log(last.step, told)
        if self._board:
            self._draw(steps, stretch)

    def evaluated(self, evaluation: Evaluation, step: int) -> None:
        numbers = {k: v for k, v in evaluation.metrics.items() if v is not None}
        text = [f"{name} {value:.5f}" for name, value in numbers.items()]
        text += [f"{name} undefined" for name, value in evaluation.metrics.items() if value is None]
        where = f"{evaluation.split} after {evaluation.at_sample:,} samples"
        self.say(f"{where}: {', '.join(text)}")
        self._perf.event(
            "EVALUATE" if step else "INIT_EVALUATION",
            {"global_steps": step, "split": evaluation.split,
             **flagperf_metrics(evaluation.metrics), "time": evaluation.seconds},
        )  # fmt: skip
        if self._dllogger:
            self._dllogger.log(step, {"split": evaluation.split, **evaluation.metrics})
        self._mlperf.evaluated(evaluation)
        if self._board:
            for name, value in numbers.items():
                self._board.add_scalar(f"{evaluation.split}/{name}", value, step)

    def checkpointed(self, path: Path) -> None:
        """A checkpoint is on disk."""
        self._perf.event("CHECKPOINT", {"path": str(path)})

    def training_ends(self) -> None:
        self._progress.stop()
        self._perf.event("TRAIN_END")
        self._mlperf.training_ends()

    def finished(self, result: Result) -> None:
        """The last events; after the log was closed, because a result includes its own time."""
        with open(self._folder / "perf.log", "a", encoding="utf-8") as file:
            PerfLog(file).event("FINISHED", finished_event(result))
        with open(self._folder / mlperf.FILE_NAME, "a", encoding="utf-8") as file:
            self._mlperf_log(file, goes_on=True).finished(result)
        if self._cfg.dllogger:
            with open(self._folder / DLLOGGER_FILE, "a", encoding="utf-8") as file:
                DlLog(file, self._started_s).log([], training_summary(result))

    # --- parts

    def _mlperf_log(self, file: TextIO, goes_on: bool) -> MlperfLog:
        return MlperfLog(file, self._cfg, self._workload, goes_on)

    def _append_to(self, name: str) -> TextIO:
        file = open(self._folder / name, "a", newline="", encoding="utf-8")  # noqa: SIM115
        return self._stack.enter_context(file)

    def _board_after(self, step: int) -> Any:
        """TensorBoard's writer, if it is wanted; what came after `step` is not shown any more."""
        if not self._cfg.tensorboard:
            return None
        from torch.utils.tensorboard import SummaryWriter

        folder = str(self._folder / "tensorboard")
        board = SummaryWriter(log_dir=folder, purge_step=step + 1 if step else None)
        self._stack.callback(board.close)
        return board

    def _draw(self, steps: list[Step], stretch: Stretch) -> None:
        """On TensorBoard: of each step what varies, of the last one what hardly does."""
        for at in steps:
            self._board.add_scalar("loss", at.loss, at.step)
            if at.gradient_norm is not None:
                self._board.add_scalar("gradient_norm", at.gradient_norm, at.step)
            if at.skipped:
                self._board.add_scalar("skipped", 1, at.step)
        last = steps[-1]
        others = {"lr": last.lr, "loss_scale": last.loss_scale} | dataclasses.asdict(stretch)
        for name, value in others.items():
            if value is not None:
                self._board.add_scalar(name, value, last.step)

    def _start_progress(self, step: int, total_steps: int) -> tuple[Progress, TaskID]:
        progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("step {task.completed:,.0f}/{task.total:,.0f}"),
            TextColumn("loss {task.fields[loss]}  {task.fields[speed]}  ETA"),
            TimeRemainingColumn(),
            console=self._console,
            disable=not self._console.is_terminal,
        )
        task = progress.add_task(
            self._cfg.name, total=total_steps, completed=step, loss="-", speed="-"
        )
        progress.start()
        self._stack.callback(progress.stop)
        return progress, task


class SilentLog:
    """What ranks other than the main one write: nothing."""

    def __enter__(self) -> "SilentLog":
        return self

    def __exit__(self, *exc: object) -> None: ...

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **kwargs: None
