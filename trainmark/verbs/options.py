"""The flags of the verbs: those that belong to no other module."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from trainmark.bounds import Positive
from trainmark.config import TrainOptions
from trainmark.hardware.backends import DeviceChoice
from trainmark.inference.options import Checkpoint


@dataclass(frozen=True, kw_only=True)
class Nothing:
    """This verb takes no flags."""


@dataclass(frozen=True, kw_only=True)
class ShowOptions:
    """Show a run with everything filled in."""

    config: Path | None = None
    """Configuration file between the named run and the flags: TOML, or a run's result.json or
    config.json."""
    cluster: str | None = None
    """Hardware to resolve for, as HARDWARExNODESxDEVICES; default cpux1x1."""
    hardware: Path | None = None
    """A hardware.toml (by hand, or from `calibrate`), preferred to the datasheets; --cluster may
    name its key."""


@dataclass(frozen=True, kw_only=True)
class PlanOptions(ShowOptions):
    """Plan a run on a cluster."""

    json: Path | None = None
    """File to write the placement of the tables to, for --placement; it may be edited."""
    search: bool = False
    """Rank other splits, micro-batches and recomputation by predicted time, instead of one plan."""
    check: tuple[Path, ...] = ()
    """Instead of RUN and all other flags: print the errors of the predictions of finished runs."""


@dataclass(frozen=True, kw_only=True)
class CheckOptions:
    """How far predictions were from what was measured then."""

    check: tuple[Path, ...]
    """Output folders of runs, their result.json, or folders to search for them."""


@dataclass(frozen=True, kw_only=True)
class CalibrateOptions:
    """Measure this machine, in less than two minutes."""

    device: DeviceChoice = "auto"
    """`auto` takes a GPU if there is one."""
    output: Path = Path("hardware.toml")
    """The file to write; reading from disk is measured in its folder."""


@dataclass(frozen=True, kw_only=True)
class ReportOptions:
    """Report on finished runs."""

    folders: Annotated[tuple[Path, ...], tyro.conf.Positional]
    """Output folders of runs. Of several, as in SWEEP/*, those without a result are left out."""
    output: Path | None = None
    """Where to write; default report.html in the run's folder; other formats are printed."""
    like: Literal["flagperf", "nvidia", "torchrec"] | None = None
    """The tables of a published page, with its columns: our results above the published rows."""
    format: Literal["markdown", "csv", "html", "json"] | None = None
    """Default html, or markdown with --like."""


@dataclass(frozen=True, kw_only=True)
class PublishedOptions:
    """List published results; no run is needed."""

    system: str | None = None
    """One of them: flagperf-dlrm, nvidia-tf2-dlrm, torchrec-dlrm, flagperf-distilbert or
    flagperf-llama3. Default: all."""
    format: Literal["markdown", "csv", "json"] | None = None
    """Default: tables for a terminal. json has the figures as they were printed."""


@dataclass(frozen=True, kw_only=True)
class CompareOptions:
    """Compare two finished runs."""

    first: Annotated[Path, tyro.conf.Positional]
    """Output folder of a run."""
    second: Annotated[Path, tyro.conf.Positional]
    """Output folder of another."""


@dataclass(frozen=True, kw_only=True)
class BoardOptions:
    """Show many runs on one page, results of earlier versions too."""

    runs: Annotated[tuple[Path, ...], tyro.conf.Positional]
    """Output folders of runs, their result.json, or folders to search for them."""
    output: Path | None = None
    """Where to write; default board.html here."""
    serve: bool = False
    """Serve the page over HTTP instead, and show new results as they come."""
    host: str = "127.0.0.1"
    """Address to serve at; 0.0.0.0 opens the page to everyone who reaches this machine."""
    port: int = 8080
    """Port to serve at; 0 takes a free one."""


@dataclass(frozen=True, kw_only=True)
class AlignOptions:
    """Compare a loss curve with a reference; exit code 1 if they do not agree."""

    folder: Annotated[Path, tyro.conf.Positional]
    """Output folder of a run (or its loss.csv)."""
    reference: Annotated[Path, tyro.conf.Positional]
    """Another run's folder, a loss.csv, a Megatron log or an MLPerf log."""


@dataclass(frozen=True, kw_only=True)
class ExportOptions:
    """Export a checkpoint in a run's folder."""

    folder: Annotated[Path, tyro.conf.Positional]
    """Output folder of a run."""
    checkpoint: Checkpoint = None
    """Which one; default: the best if the run had --patience, else the last."""
    format: Literal["onnx", "torch", "safetensors"] = "safetensors"
    """safetensors: weights in the layout of Hugging Face's transformers or, for a recommender, with
    a few lines of plain PyTorch that load them. onnx (extra `export`) and torch, a program of
    torch.export: of models that score rows, at any batch. All of a recommender's carry its
    vocabularies."""
    output: Path | None = None
    """Folder to write; default in the run's folder: export, export-onnx or export-torch."""


@dataclass(frozen=True, kw_only=True)
class VerifyOptions:
    """Read everything that has a checksum, and compare."""

    folder: Annotated[Path, tyro.conf.Positional]
    """A dataset, a run's output folder, a checkpoint, an exported model, or a folder of these."""


@dataclass(frozen=True, kw_only=True)
class ReplayOptions:
    """Print the command that gives a result again, or run it."""

    result: Annotated[Path, tyro.conf.Positional]
    """A result.json, or the output folder of a run."""
    run: bool = False
    """Run the command, instead of only printing it."""
    output: Path | None = None
    """Folder for the new run; default: the old one's name with -again."""


@dataclass(frozen=True, kw_only=True)
class GateOptions:
    """Compare the step time of two commits, or of two configurations. The flags that configure the
    run hold for both. Exit code 0: not slower; 1: slower; 2: not comparable; 3: undecided."""

    base: str | None = None
    """Commit to compare with: a branch, a tag or a hash. Default: this tree."""
    candidate: str | None = None
    """Commit that may be slower. Default: this tree, with what is not committed."""
    base_flags: str = ""
    """Flags of the base alone, as one word: '--precision fp32'."""
    candidate_flags: str = ""
    """Flags of the candidate alone."""
    slower_by: Positive = 3.0
    """The slow-down that must be found, in percent; one half as large may be found or not."""
    budget: Positive = 1800.0
    """Seconds after which it is left undecided; most verdicts take far fewer."""
    clock: Literal["wall", "cpu"] = "wall"
    """What times a step: the clock on the wall, or the time that its threads have on CPUs, which
    other programs disturb less, and which does not see waiting; for runs on a CPU."""
    config: Path | None = None
    """Configuration file between the named run and the flags: TOML, or a run's result.json or
    config.json."""


@dataclass(frozen=True, kw_only=True)
class SweepOptions(TrainOptions):
    """Train runs that differ in some fields. The flags of `train` hold for all of them."""

    over: tuple[str, ...] = ()
    """FIELD=V1,V2,... for each field to vary; in a search, also FIELD=LOW..HIGH, with :log behind
    it where factors count (lr=0.001..1:log). Several words are a list: 'model.top_mlp=64 1'."""
    trials: int | None = None
    """Search with so many runs, instead of one for each combination (needs the extra `search`);
    those that do worse than half of the others at the same evaluation are ended."""
    devices: int = 1
    """Devices of this machine to run each on."""
    isolate: bool = False
    """A process of its own for each run, as with several devices: it starts more slowly, no run of
    a search is ended early, and one that the host's memory is too small for ends alone."""


@dataclass(frozen=True, kw_only=True)
class SuiteOptions:
    """Run the cases of a file; finished ones are not run again. Exit code 1 if one failed."""

    cases: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="CASES.toml")]
    """A list of [[case]], each with `run`, `case` (HARDWARExNODESxDEVICES that it is for), and, if
    they are wanted, `name`, `repeats` and `flags` (as after `train RUN`)."""
    output: Path | None = None
    """Folder for the results, each in OUTPUT/NAME, and report.html; default runs/CASES."""
    dry_run: bool = False
    """List the cases, what would be run here, and the memory it would need."""
