"""`trainmark sweep`: one run (or dry run) per value of a field; an out-of-memory is a row.

Each value is a process of its own, in a folder of its own: what one leaves behind, no other sees,
and a sweep that was stopped goes on where it was.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from rich.console import RenderableType

from trainmark.config import Run
from trainmark.errors import InputError
from trainmark.files import write_atomically
from trainmark.hardware.devices import Cluster
from trainmark.progress import SafeConsole
from trainmark.run import result
from trainmark.verbs.attempt import DONE, FAILED, OUT_OF_MEMORY, attempt
from trainmark.verbs.attempt_tables import Attempt, PlannedRun, attempts_table, plans_table

FILE_NAME = "sweep.json"


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """What to vary, and how to run each value."""

    run: str
    field: str
    values: list[str]
    flags: list[str]
    """Flags of `train` that all values share."""
    output: Path
    devices: int = 1


def parse_over(text: str) -> tuple[str, list[str]]:
    """`FIELD=V1,V2,...`"""
    field, equals, values = text.partition("=")
    parts = [value.strip() for value in values.split(",") if value.strip()]
    if not equals or not field.strip() or not parts:
        raise InputError(
            "--over must be FIELD=V1,V2,..., such as global_batch=1024,2048. "
            f"Received: {text or 'nothing'}."
        )
    return field.strip().replace("_", "-"), list(dict.fromkeys(parts))


def sweep(plan: Sweep) -> RenderableType:
    """Run every value that has no outcome yet; the table of all of them."""
    if plan.devices < 1:
        raise InputError(f"devices must be at least 1. Received: {plan.devices}.")
    known = _read(plan)
    for value in plan.values:
        if value not in known:
            known[value] = _run_one(plan, value)
            _write(plan, known)
    return _table(plan, known)


def _folder(plan: Sweep, value: str) -> Path:
    return plan.output / f"{plan.field}={value}".replace("/", "_")


def _run_one(plan: Sweep, value: str) -> str:
    """`done`, `OOM`, or why the run failed."""
    SafeConsole(stderr=True).print(f"{plan.run} with {plan.field} {value}", highlight=False)
    folder = _folder(plan, value)
    words = [plan.run, f"--{plan.field}", value, *plan.flags, "--output", str(folder)]
    ended = attempt(words, plan.devices, folder.with_name(f"{folder.name}.log"))
    return ended.reason if ended.kind == FAILED else ended.kind


# --- what is known already


def _identity(plan: Sweep) -> dict[str, object]:
    return {"run": plan.run, "field": plan.field, "flags": plan.flags, "devices": plan.devices}


def _read(plan: Sweep) -> dict[str, str]:
    path = plan.output / FILE_NAME
    if not path.is_file():
        return {}
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        outcomes = dict(data["outcomes"])
    except (ValueError, KeyError, TypeError):
        raise InputError(f"{path} is damaged; remove it to sweep again.") from None
    if data["sweep"] != _identity(plan):
        raise InputError(f"{plan.output} holds another sweep. Give another --output.")
    # What failed for another reason than memory is worth another try.
    return {value: found for value, found in outcomes.items() if found in (DONE, OUT_OF_MEMORY)}


def _write(plan: Sweep, outcomes: dict[str, str]) -> None:
    plan.output.mkdir(parents=True, exist_ok=True)
    text = json.dumps({"sweep": _identity(plan), "outcomes": outcomes}, indent=2)
    write_atomically(plan.output / FILE_NAME, text + "\n")


# --- the tables


def _table(plan: Sweep, outcomes: dict[str, str]) -> RenderableType:
    """A row for every value, and below them why some failed."""
    rows = []
    for value in plan.values:
        outcome = outcomes[value]
        failed = outcome not in (DONE, OUT_OF_MEMORY)
        rows.append(
            Attempt(
                label=value,
                outcome=FAILED if failed else outcome,
                result=result.read(_folder(plan, value)) if outcome == DONE else None,
                reason=f"{plan.field} {value}: {outcome}" if failed else None,
            )
        )
    return attempts_table(plan.field, rows, f"{plan.run} over {plan.field}")


def dry_runs(runs: Mapping[str, Run], field: str, cluster: str) -> RenderableType:
    """Bytes per device for every value, without running."""
    parsed = Cluster.parse(cluster)
    plans = [
        PlannedRun(name=f"{field} {value}", cells=[value], run=run, cluster=parsed)
        for value, run in runs.items()
    ]
    return plans_table([field], plans, f"{cluster}: GiB per device, activations estimated")
