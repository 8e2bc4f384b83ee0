"""The cases of a `trainmark suite`: read from their file and checked, all of them at once."""

import dataclasses
import re
import shlex
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from trainmark import workloads
from trainmark.bounds import Repeats
from trainmark.config import OBSERVATION, Run, TrainOptions, differences
from trainmark.errors import InputError, raise_all
from trainmark.hardware import backends, devices, known
from trainmark.hardware.backends import Kind
from trainmark.hardware.devices import Cluster
from trainmark.run import result, run_folder
from trainmark.validation import parse, read_mapping
from trainmark.verbs.flags import parse_run

NOT_OF_A_CASE = {
    "output": "its folder is OUTPUT/NAME",
    "repeats": "give the case 'repeats'",
    "cluster": "give the case 'case'",
    "dry_run": "give it to suite",
    "fresh": "a suite that was stopped goes on",
}
"""Options of `train` that a case's flags cannot have, and why."""


@dataclass(frozen=True, kw_only=True)
class Given:
    """A case as the file has it."""

    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}

    run: str
    case: str
    """HARDWARExNODESxDEVICES that it is for."""
    name: str | None = None
    """By default RUN-CASE."""
    repeats: Repeats = 1
    flags: str = ""
    """Flags as they would be typed after `train RUN`."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """A case that was checked."""

    name: str
    cfg: Run
    cluster: Cluster
    repeats: int
    flags: list[str]
    output: Path
    skipped: str | None = None
    """Why it cannot be run on this machine."""

    @property
    def folders(self) -> list[Path]:
        """The folder of each result."""
        if self.repeats == 1:
            return [self.output]
        return [self.output / str(repeat) for repeat in range(self.repeats)]

    @property
    def is_done(self) -> bool:
        return all((folder / result.FILE_NAME).is_file() for folder in self.folders)

    @property
    def words(self) -> list[str]:
        """What to type after `train`."""
        device = ["--device", "cpu"] if self.cluster.hardware == "cpu" else []
        repeats = ["--repeats", str(self.repeats)] if self.repeats > 1 else []
        return [self.cfg.name, *self.flags, *device, *repeats, "--output", str(self.output)]


class _Problems(list[str]):
    """All that is wrong with a file, by case."""

    @contextmanager
    def of(self, name: str) -> Iterator[None]:
        try:
            yield
        except InputError as error:
            self.append(f"case {name}: {error}".replace("\n", "\n  "))


def read_cases(path: Path, output: Path) -> list[Case]:
    """The cases of a file, checked; one error lists all that is wrong with them."""
    entries = _entries(path)
    problems = _Problems()
    given: dict[str, Given] = {}
    for number, entry in enumerate(entries, start=1):
        name = _name(entry) or str(number)
        with problems.of(name):
            given[name] = parse(Given, entry, str(path))
    for shared, times in Counter(filter(None, map(_name, entries))).items():
        if times > 1:
            problems.append(f"case {shared}: {times} cases have this name. Give each its own.")
    on_cpus = all(one.case.strip().lower().startswith("cpux") for one in given.values())
    here = [] if on_cpus else devices.accelerators()
    cases = []
    for name, one in given.items():
        cases += _checked(name, one, output, here, problems)
    raise_all(problems)
    return cases


def _entries(path: Path) -> list[dict[str, Any]]:
    data = read_mapping(path)
    entries = data.get("case")
    if set(data) != {"case"} or not isinstance(entries, list) or not entries:
        raise InputError(
            f"{path} must be a list of [[case]], each with 'run' and 'case'. "
            f"Received: {', '.join(data) or 'nothing'}."
        )
    return [entry if isinstance(entry, dict) else {} for entry in entries]


def _name(entry: dict[str, Any]) -> str | None:
    """A case's own name, or RUN-CASE."""
    if "name" in entry:
        return str(entry["name"])
    return f"{entry['run']}-{entry['case']}" if {"run", "case"} <= entry.keys() else None


def _checked(
    name: str, given: Given, output: Path, here: list[str], problems: _Problems
) -> list[Case]:
    """The case, or none where something is wrong with it."""
    cluster, cfg, flags = None, None, []
    with problems.of(name):
        _check_name(name)
    with problems.of(name):
        cluster = Cluster.parse(given.case, (*known.keys(), *here))
    with problems.of(name):
        flags = _split(given.flags)
        cfg, options = parse_run("train", [given.run, *flags], TrainOptions)
        _check_options(options)
    if cluster is None or cfg is None:
        return []
    case = Case(
        name=name,
        cfg=cfg,
        cluster=cluster,
        repeats=given.repeats,
        flags=flags,
        output=output / name,
    )
    case = dataclasses.replace(case, skipped=_why_not_here(case, here))
    with problems.of(name):
        _check_folders(case)
    return [case]


def _check_name(name: str) -> None:
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_+=-]*", name):
        raise InputError(
            "the name is that of a folder: use letters, digits and any of _ + = - in it. "
            f"Received: {name!r}."
        )


def _split(flags: str) -> list[str]:
    try:
        words = shlex.split(flags)
    except ValueError as error:
        raise InputError(f"flags cannot be read: {error}. Received: {flags!r}.") from None
    if {"-h", "--help"} & set(words):
        raise InputError("flags cannot have --help: see 'trainmark train RUN --help'.")
    return words


def _check_options(options: TrainOptions) -> None:
    raise_all(
        f"flags cannot have --{name.replace('_', '-')}: {reason}."
        for name, reason in NOT_OF_A_CASE.items()
        if getattr(options, name) != getattr(TrainOptions(), name)
    )


# --- what this machine can run, and what it has run


def _why_not_here(case: Case, here: list[str]) -> str | None:
    cluster = case.cluster
    if cluster.nodes > 1:
        shape = f"{cluster.nodes}x{cluster.devices}"
        launch = ["trainmark", "launch", "--on", "slurm", "-j", shape, "train", *case.words]
        return (
            f"it is for {cluster.nodes} machines; start it with trainmark launch, and its result "
            f"will be a row here: {shlex.join(launch)}"
        )
    wanted = [cluster.hardware] * cluster.devices
    if cluster.hardware == "cpu" or here[: cluster.devices] == wanted:
        return None
    found = ", ".join(f"{count} x {key}" for key, count in Counter(here).items())
    return f"it is for {cluster}, and this machine has {found or 'no accelerator'}."


def _check_folders(case: Case) -> None:
    """Refuse settings that cannot be resolved here, and folders that are another case's."""
    if case.repeats > 1 and (case.output / run_folder.CONFIG_FILE).exists():
        raise InputError(f"{case.output} holds a single run. Give the case another name.")
    for repeat, folder in enumerate(case.folders):
        cfg = None if case.skipped else _resolved(case, repeat)
        if (folder / result.FILE_NAME).is_file():
            _check_result(case, cfg, folder)
        elif cfg:
            run_folder.check(folder, cfg, fresh=False)


def _resolved(case: Case, repeat: int) -> Run:
    """The run as `train` would resolve it."""
    kind: Kind = "cpu" if case.cluster.hardware == "cpu" else backends.here() or "cuda"
    if case.cfg.device not in ("auto", kind):
        raise InputError(f"it is for {case.cluster}, but its flags say --device {case.cfg.device}.")
    seed = case.cfg.seed + repeat
    return workloads.resolve(dataclasses.replace(case.cfg, device=kind, seed=seed), case.cluster)


def _check_result(case: Case, cfg: Run | None, folder: Path) -> None:
    """Refuse a result with other settings: a measurement is never overwritten."""
    found = result.read(folder)
    if (found.run, found.case) != (case.cfg.name, str(case.cluster)):
        other = f"of {found.run} on {found.case}"
    elif cfg and (changed := _changed(found, cfg)):
        other = f"with other settings ({', '.join(changed)})"
    else:
        return
    raise InputError(f"{folder} has a result {other}. Give the case another name.")


def _changed(found: result.Result, cfg: Run) -> list[str]:
    earlier = parse(type(cfg), found.config, "its configuration")
    return differences(earlier, cfg, ignore=OBSERVATION)
