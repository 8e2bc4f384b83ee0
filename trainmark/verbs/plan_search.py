"""`trainmark plan --search`: other layouts of a run, by predicted time, and what does not fit."""

from collections.abc import Sequence
from dataclasses import dataclass

from rich.table import Table

from trainmark import workloads
from trainmark.config import Run, or_synthetic
from trainmark.errors import InputError
from trainmark.formatting import GIB, human
from trainmark.hardware.devices import Cluster
from trainmark.hardware.memory import card_bytes
from trainmark.verbs.plan import empty_table, make_plan, unit_of, wide_console

SHOWN = 10
"""Layouts in each table."""


@dataclass(frozen=True, kw_only=True)
class Choice:
    """One layout that can run, if its devices are large enough."""

    flags: str
    step_s: float
    """In three digits: no prediction is better than that, and so many layouts are equally fast."""
    needed: int
    """Bytes of the fullest device."""
    fits: bool


def search(cfg: Run, cluster: Cluster) -> None:
    """Print the fastest layouts that fit, then the faster ones that do not."""
    found, refused = choices(cfg, cluster)
    fitting = [choice for choice in found if choice.fits]
    best = fitting[0].step_s if fitting else float("inf")
    too_large = [choice for choice in found if not choice.fits and choice.step_s < best]
    console = wide_console()
    if fitting:
        console.print(_table(f"{cfg.name} on {cluster}, fastest first", fitting, cluster))
    if too_large:
        console.print(_table("faster, but too large", too_large, cluster))
    for line in _sentences(len(fitting), len(found), refused) if found else []:
        console.say(line)
    if not found:
        raise InputError(" ".join([f"No layout of {cfg.name} can run on {cluster}.", *refused[:1]]))
    if not fitting:
        raise InputError(f"No layout of {cfg.name} fits {cluster}. Use more or larger devices.")


def choices(cfg: Run, cluster: Cluster) -> tuple[list[Choice], list[str]]:
    """The layouts by predicted time, and why others cannot run. Of equally fast ones the workload's
    order decides."""
    workload = workloads.definition(cfg)
    if workload.alternatives is None:
        raise InputError(f"--search has nothing to choose from for {cfg.workload}.")
    found, refused = [], []
    for flags, run in workload.alternatives(or_synthetic(cfg), cluster):
        try:
            plan = make_plan(run, cluster)
        except InputError as error:
            refused.append(f"{flags}: {error}")
            continue
        if plan.step_s is None:
            raise InputError(f"--search needs predicted times: {plan.no_time}.")
        needed = max(memory.total for memory in plan.memory)
        fits = plan.too_large is None
        step_s = float(f"{plan.step_s:.3g}")
        found.append(Choice(flags=flags, step_s=step_s, needed=needed, fits=fits))
    return sorted(found, key=lambda choice: choice.step_s), refused


def _table(title: str, found: Sequence[Choice], cluster: Cluster) -> Table:
    table = empty_table(title)
    table.add_column("flags", overflow="fold")
    unit, scale = unit_of(found[0].step_s)
    for header in (f"step, {unit}", "GiB"):
        table.add_column(header, justify="right")
    card = card_bytes(cluster)
    for choice in found[:SHOWN]:
        of = "" if card is None else f"/{card / GIB:.0f}"
        step = human(scale * choice.step_s)
        table.add_row(choice.flags, step, f"{choice.needed / GIB:.2f}{of}")
    return table


def _sentences(fitting: int, planned: int, refused: Sequence[str]) -> list[str]:
    lines = [f"{planned} layouts were planned; {fitting} fit."]
    if refused:
        lines.append(f"{len(refused)} cannot run, such as {refused[0]}")
    return lines
