"""The command line: the verbs, one function each, and no logic.

`main` turns an `InputError` into one sentence and exit code 2. torch and other heavy packages are
imported by the verbs that need them, so that `--help` answers at once.
"""

import dataclasses
import importlib
import io
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from trainmark import __version__
from trainmark.config import TrainOptions
from trainmark.errors import InputError, in_words, out_of_memory, unknown
from trainmark.hardware.amx import avoid_missing_amx
from trainmark.hardware.devices import Cluster
from trainmark.verbs.flags import (
    first_line,
    first_word,
    parse,
    parse_run,
    split_at,
    take_words,
)
from trainmark.verbs.options import (
    AlignOptions,
    BoardOptions,
    CalibrateOptions,
    CheckOptions,
    CompareOptions,
    ExportOptions,
    GateOptions,
    Nothing,
    PlanOptions,
    PublishedOptions,
    ReplayOptions,
    ReportOptions,
    ShowOptions,
    SuiteOptions,
    SweepOptions,
    VerifyOptions,
)

SPIN_COUNT = "10000"
"""How often a thread of GNU OpenMP (torch's threads on a CPU) looks for work before it sleeps. The
default, 300,000, takes cores away from other programs' threads. Beside two busy programs on 2
cores, two runs of the demo had 32,700 and 2,700 samples/s by default, and 36,500 and 48,600 with
this. Alone they had 112,000 to 118,000, and 111,000 to 121,000 with this; a count of 2000 costs
17 %. OpenMP reads the setting when torch is loaded."""


def main(
    arguments: Sequence[str] | None = None, tell: Callable[[Exception, bool], None] | None = None
) -> int:
    """Run one verb; returns the exit code. `tell` prints an error; by default, `_tell` does."""
    started = time.perf_counter()
    os.environ.setdefault("GOMP_SPINCOUNT", SPIN_COUNT)
    avoid_missing_amx()
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="surrogateescape")  # a path's bytes leave as they came
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    debug = "--debug" in arguments
    arguments = [word for word in arguments if word != "--debug"]  # every verb takes it
    try:
        return _dispatch(arguments, started)
    # OSError: a full disk, no permission. UnicodeEncodeError: a path that Arrow takes as text only.
    except (InputError, OSError, MemoryError, UnicodeEncodeError) as error:
        (tell or _tell)(error, debug)
        return 2
    except RuntimeError as error:
        if (told := out_of_memory(error)) is None:
            raise
        (tell or _tell)(told, debug)
        return 2
    except KeyboardInterrupt as stop:
        print(f"trainmark: {str(stop) or 'interrupted'}", file=sys.stderr)
        return 130


def _tell(error: Exception, debug: bool) -> None:
    from trainmark.progress import printable

    if debug:
        traceback.print_exception(error)
    print(f"trainmark: {printable(in_words(error))}", file=sys.stderr)


def _dispatch(arguments: list[str], started: float) -> int:
    if not arguments or arguments[0] in ("-h", "--help"):
        print(_overview())
        return 0
    if arguments[0] == "--version":
        print(f"trainmark {__version__}")
        return 0
    verb, *rest = arguments
    if verb not in VERBS:
        raise unknown("verb", verb, VERBS)
    return VERBS[verb](rest, started) or 0


def _overview() -> str:
    width = max(map(len, VERBS))
    lines = [
        line
        for title, verbs in GROUPS.items()
        for line in (f"{title}:", *(f"  {v:<{width}}  {first_line(verbs[v])}" for v in verbs), "")
    ]
    return "\n".join(
        [
            "usage: trainmark VERB ...",
            "",
            "Train reference models and report throughput and quality in comparable numbers.",
            "",
            *lines,
            "trainmark VERB --help shows a verb's flags; --debug shows the traceback of an error.",
            "Start with trainmark list, then trainmark train RUN: a run whose name ends in -demo",
            "needs neither data nor a GPU.",
        ]
    )


# --- the verbs


def _list(arguments: list[str], started: float) -> None:
    """The named runs, with size, data and target."""
    from trainmark.progress import SafeConsole
    from trainmark.verbs.runs import runs_table

    parse(Nothing, arguments, "list")
    SafeConsole().print(runs_table())


def _show(arguments: list[str], started: float) -> None:
    """The resolved configuration of a run, and the size of its model."""
    from trainmark.progress import SafeConsole
    from trainmark.verbs.runs import resolved_run

    cfg, options = parse_run("show", arguments, ShowOptions)
    with _cluster(options) as cluster:
        SafeConsole().print(resolved_run(cfg, cluster))


def _plan(arguments: list[str], started: float) -> None:
    """Memory and predicted time per device, and where each table lies."""
    if arguments[:1] == ["--check"]:  # which needs no RUN
        from trainmark.verbs.plan_check import check

        check(parse(CheckOptions, arguments, "plan").check)
        return
    from trainmark.verbs.plan import plan
    from trainmark.verbs.plan_search import search

    cfg, options = parse_run("plan", arguments, PlanOptions)
    if options.check:
        raise InputError("--check needs no RUN: trainmark plan --check RUNS...")
    with _cluster(options) as cluster:
        if options.search:
            search(cfg, cluster)
        else:
            plan(cfg, cluster, options.json)


@contextmanager
def _cluster(options: ShowOptions | TrainOptions) -> Iterator[Cluster]:
    """The cluster to resolve a run for. Inside the block, --hardware holds."""
    from trainmark.hardware.hardware_file import described

    with described(options.hardware) as found:
        yield Cluster.parse(options.cluster or f"{found.key if found else 'cpu'}x1x1")


def _calibrate(arguments: list[str], started: float) -> None:
    """Measure this machine for plan; under torchrun, also the links between ranks."""
    options = parse(CalibrateOptions, arguments, "calibrate")
    from trainmark.verbs.calibrate import calibrate

    if path := calibrate(options.device, options.output):
        print(f"{path}: give it as --hardware.")


def _prepare(arguments: list[str], started: float) -> None:
    """Make raw data ready to train on: criteo, csv, parquet, npy, synthetic, tokens, sst2."""
    kind, rest = first_word("prepare", "KIND", arguments, list(PREPARATIONS))
    if kind not in PREPARATIONS:
        raise unknown("kind of data", kind, PREPARATIONS)
    module = importlib.import_module(PREPARATIONS[kind])
    options = parse(module.Options, rest, f"prepare {kind}")
    with doing_without(*(() if getattr(options, "engine", "") == "spark" else NOT_NEEDED)):
        module.prepare(options)


NOT_NEEDED = ("pandas", "scipy")
"""Arrow and numba load these wherever they are installed, in case somebody uses the two
together; no preparation on this machine does. It is a fifth of the time that starting takes."""


@contextmanager
def doing_without(*packages: str) -> Iterator[None]:
    """Have imports of packages fail that are not loaded yet, as where they are not installed.

    None in `sys.modules` would do so, too, but Arrow takes that for a loaded pandas.
    """

    class Absent:
        @staticmethod
        def find_spec(name: str, *_: object) -> None:
            if name in packages:
                raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    sys.meta_path.insert(0, Absent)
    try:
        yield
    finally:
        sys.meta_path.remove(Absent)


PREPARATIONS = {
    "criteo": "trainmark.clicklog.criteo",
    "csv": "trainmark.clicklog.csv_data",
    "parquet": "trainmark.clicklog.parquet_data",
    "npy": "trainmark.clicklog.npy",
    "synthetic": "trainmark.clicklog.synthetic",
    "sst2": "trainmark.corpus.sst2",
    "tokens": "trainmark.corpus.tokens",
}
"""Kinds of data -> the module with their `Options` and `prepare`."""


def _train(arguments: list[str], started: float) -> int:
    """Train a run; also under torchrun: torchrun ... -m trainmark train RUN."""
    cfg, options = parse_run("train", arguments, TrainOptions)
    if options.dry_run:
        from trainmark.verbs.runs import dry_run

        with _cluster(options) as cluster:
            dry_run(cfg, cluster)
        return 0
    _refuse_cluster(options)
    from trainmark.verbs.runs import train

    return train(cfg, options, started)


def _refuse_cluster(options: TrainOptions) -> None:
    if options.cluster:
        raise InputError("--cluster is for --dry-run; a real run uses the machine it is on.")


def _evaluate(arguments: list[str], started: float) -> None:
    """How good a run's checkpoint is on held-out data, or on raw files."""
    from trainmark.verbs.evaluate import EvaluateOptions, evaluate

    evaluate(parse(EvaluateOptions, arguments, "evaluate"))


def _infer(arguments: list[str], started: float) -> None:
    """Latency and throughput of a run's checkpoint, by batch size."""
    from trainmark.inference.options import InferOptions
    from trainmark.verbs.runs import infer

    infer(parse(InferOptions, arguments, "infer"))


def _report(arguments: list[str], started: float) -> None:
    """An HTML page, or tables, for one or more results."""
    from trainmark.progress import printable
    from trainmark.report import reports

    options = parse(ReportOptions, arguments, "report")
    folders = list(options.folders)
    kind = options.format or ("markdown" if options.like else "html")
    if options.like is None and kind == "html":
        print(reports.report(folders, options.output))
    else:
        print(printable(reports.table_report(folders, options.like, kind, options.output)))


def _published(arguments: list[str], started: float) -> None:
    """The published results that runs can be compared with."""
    from trainmark.progress import SafeConsole
    from trainmark.report import formats, listing

    options = parse(PublishedOptions, arguments, "published")
    if options.format is None:
        console = SafeConsole()
        tables = listing.tables(options.system)
        console.print(formats.terminal(tables, console.width), crop=False)
    else:
        print(listing.text(options.system, options.format))


def _compare(arguments: list[str], started: float) -> None:
    """Two results side by side."""
    from trainmark.progress import SafeConsole
    from trainmark.report import reports

    options = parse(CompareOptions, arguments, "compare")
    SafeConsole().print(reports.compare(options.first, options.second))


def _board(arguments: list[str], started: float) -> None:
    """One page of many results: a table, changes, curves over time."""
    options = parse(BoardOptions, arguments, "board")
    from trainmark.verbs import board

    if options.serve:
        board.serve(options.runs, options.host, options.port)
    else:
        print(board.write(options.runs, options.output))


def _align(arguments: list[str], started: float) -> int:
    """Whether a run's loss curve agrees with a reference."""
    from trainmark.report.alignment_page import write_page
    from trainmark.run import alignment

    options = parse(AlignOptions, arguments, "align")
    found = alignment.align(options.folder, options.reference)
    print(alignment.sentence(found))
    print(write_page(options.folder, options.reference, found))
    return 0 if found.passed else 1


def _export(arguments: list[str], started: float) -> None:
    """Write a run's checkpoint in the layout of other software."""
    options = parse(ExportOptions, arguments, "export")
    from trainmark.verbs.export import export

    print(export(options.folder, options.format, options.output, options.checkpoint))


def _predict(arguments: list[str], started: float) -> None:
    """Score every row of files with a run's checkpoint or an exported model."""
    from trainmark.inference.options import PredictOptions

    options = parse(PredictOptions, arguments, "predict")
    from trainmark.inference.predict import predict

    print(predict(options))


def _serve(arguments: list[str], started: float) -> None:
    """Serve scores of a run's checkpoint or an exported model over HTTP."""
    from trainmark.inference.options import ServeOptions

    options = parse(ServeOptions, arguments, "serve")
    from trainmark.inference.serving import serve

    serve(options)


def _verify(arguments: list[str], started: float) -> None:
    """Whether every byte of a dataset, a run or an export is as it was written."""
    options = parse(VerifyOptions, arguments, "verify")
    from trainmark.verbs.verify import verify

    verify(options.folder)


def _replay(arguments: list[str], started: float) -> int | None:
    """Print, or run, the command that gives a result again."""
    options = parse(ReplayOptions, arguments, "replay")
    from trainmark.verbs import replay

    words = replay.command(options.result, options.output)
    print(replay.described(options.result, words))
    return _dispatch(words, started) if options.run else None


def _gate(arguments: list[str], started: float) -> int:
    """Whether a step is slower than at another commit or with other flags; for CI."""
    flags, words = take_words(arguments, ("--base-flags", "--candidate-flags"))
    cfg, options = parse_run("gate", words, GateOptions)
    from trainmark.verbs.gate import gate

    return gate(cfg, dataclasses.replace(options, **flags), words)


def _sweep(arguments: list[str], started: float) -> None:
    """Train runs that differ in some fields (a grid or a search), and find the best."""
    from trainmark.progress import SafeConsole
    from trainmark.verbs import sweep

    cfg, options = parse_run("sweep", arguments, SweepOptions)
    plan = sweep.asked_for(cfg, options, arguments[1:])
    if options.dry_run:
        with _cluster(options) as cluster:
            SafeConsole().print(sweep.dry_runs(plan, cluster))
    else:
        SafeConsole().print(sweep.sweep(plan))


def _suite(arguments: list[str], started: float) -> int:
    """Train a list of cases from a file: one table and one page of results."""
    options = parse(SuiteOptions, arguments, "suite")
    from trainmark.verbs.suite import suite

    output = options.output or Path("runs") / options.cases.stem
    return suite(options.cases, output, dry_run=options.dry_run)


def _launch(arguments: list[str], started: float) -> int:
    """Start a run on many devices; status, logs and stop look after it."""
    from trainmark.distributed import launch
    from trainmark.distributed.launch_options import JobOptions, LaunchOptions, LogOptions

    asked, rest = (arguments[0], arguments[1:]) if arguments else ("", [])
    if asked == "status":
        return launch.status(parse(JobOptions, rest, "launch status"))
    if asked == "logs":
        return launch.logs(parse(LogOptions, rest, "launch logs"))
    if asked == "stop":
        return launch.stop(parse(JobOptions, rest, "launch stop"))
    flags, command = split_at(("train", "evaluate", "infer"), arguments)
    if not command and not {"-h", "--help"} & set(flags):
        raise InputError(
            "'trainmark launch' needs its flags, then what to launch, such as: "
            "launch --on torchrun -j 1x2 train RUN, or evaluate or infer and a FOLDER; or status, "
            "logs or stop and a HANDLE. "
            f"Received: {' '.join(arguments) or 'nothing'}."
        )
    options = parse(LaunchOptions, flags, "launch")
    return launch.launch(options, _name_of_launched(*command), flags, command)


def _name_of_launched(verb: str, *words: str) -> str:
    """The name of the run to launch. Wrong flags of its command are refused before ranks start."""
    if verb == "evaluate":
        from trainmark.verbs.evaluate import EvaluateOptions

        return parse(EvaluateOptions, list(words), verb).folder.name
    if verb == "infer":
        from trainmark.inference.options import InferOptions

        return parse(InferOptions, list(words), verb).folder.name
    cfg, of_train = parse_run("train", list(words), TrainOptions)
    if of_train.dry_run:
        raise InputError(
            "--dry-run needs no devices, and so no launch: "
            f"trainmark train {cfg.name} --dry-run --cluster HARDWARExNODESxDEVICES. "
            "For a dry run of the launch, give it before 'train'."
        )
    _refuse_cluster(of_train)
    with _cluster(of_train):  # refuses a bad --hardware here
        pass
    return cfg.name


GROUPS: dict[str, dict[str, Callable[[list[str], float], int | None]]] = {
    "Before a run": {
        "list": _list,
        "show": _show,
        "prepare": _prepare,
        "plan": _plan,
        "calibrate": _calibrate,
    },
    "Runs": {
        "train": _train,
        "launch": _launch,
        "sweep": _sweep,
        "suite": _suite,
        "gate": _gate,
    },
    "A trained model": {
        "evaluate": _evaluate,
        "predict": _predict,
        "infer": _infer,
        "export": _export,
        "serve": _serve,
    },
    "Results": {
        "report": _report,
        "compare": _compare,
        "board": _board,
        "published": _published,
        "align": _align,
        "replay": _replay,
        "verify": _verify,
    },
}
VERBS = {name: verb for verbs in GROUPS.values() for name, verb in verbs.items()}
