"""Where a DLRM run's tables lie: from its configuration to a checked placement."""

import dataclasses
import json
import math
from functools import lru_cache
from pathlib import Path

from trainmark.config import element_bytes, filled
from trainmark.embeddings.placement import access
from trainmark.embeddings.placement import placement as placements
from trainmark.embeddings.placement.access import AccessProfile
from trainmark.embeddings.placement.auto import DoesNotFitError, auto
from trainmark.embeddings.placement.costs import STATE_BYTES, Load, TableCosts, TableStep
from trainmark.embeddings.placement.placement import Options, Placement
from trainmark.embeddings.placement.strategies import by_strategy
from trainmark.errors import InputError, raise_all
from trainmark.formatting import GIB, readable_size
from trainmark.hardware.machine import machine
from trainmark.hardware.memory import MemoryPlan, what_fits
from trainmark.workloads.dlrm.flops import dense_activation_bytes
from trainmark.workloads.dlrm.resolve import resolve
from trainmark.workloads.dlrm.runs import DlrmRun, has_power_law, is_generated
from trainmark.workloads.dlrm.sizes import cluster, smaller, stored_rows, table_formats


def place(cfg: DlrmRun) -> Placement:
    """The placement of a resolved run's tables over its devices, the same on every rank."""
    rows, dim, sharding = cfg.model.table_rows, cfg.model.embedding_dim, cfg.sharding
    devices = cluster(cfg).world
    if sharding.placement.endswith(".json"):
        return _in_formats(cfg, placements.read(Path(sharding.placement), rows, dim, devices))
    is_narrow = cfg.model.has_narrow_tables  # of which `auto` knows nothing
    if sharding.placement == "auto" and not is_narrow:
        placed = _auto(cfg)
    else:
        strategy = "memory_optimized" if sharding.placement == "auto" else sharding.placement
        placed = by_strategy(strategy, rows, cfg.model.widths, devices, _decided(cfg))
    if is_narrow:
        return placed
    return _in_formats(cfg, placements.checked(placed, rows, dim, devices))


def _in_formats(cfg: DlrmRun, placement: Placement) -> Placement:
    """The placement, if it suits how the tables are stored."""
    for table, kind in zip(placement.tables, table_formats(cfg), strict=True):
        whole_rows = all(shard.num_columns == cfg.model.embedding_dim for shard in table.shards)
        on_many = table.sharding == "data_parallel" and placement.devices > 1
        if kind != "fp32" and (on_many or not whole_rows or table.memory == "host"):
            raise InputError(
                f"Table {table.table} is stored in {kind}: such tables lie whole on one device, or "
                f"are split by rows. Received: {table.sharding} in {table.memory} memory. Place it "
                f"otherwise, or keep it fp32 by --fp32-tables {table.table}."
            )
    return placement


@lru_cache(maxsize=4)  # a run asks several times: to build, to check its memory, to report
def _auto(cfg: DlrmRun) -> Placement:
    try:
        return auto(_profiles(cfg), table_costs(cfg), room(cfg), _decided(cfg))
    except DoesNotFitError:
        raise InputError(what_would_fit(cfg)) from None


def _decided(cfg: DlrmRun) -> Options:
    chosen = cfg.sharding
    return Options(
        column_slice_threshold=chosen.column_slice_threshold or math.inf,
        data_parallel_threshold=chosen.data_parallel_threshold,
        host_tables=chosen.host_tables,
    )


# --- what a placement depends on


def table_costs(cfg: DlrmRun) -> TableCosts:
    """What shards of the run's tables cost there."""
    step = TableStep(
        batch=filled(cfg.global_batch),
        dim=cfg.model.embedding_dim,
        element_bytes=element_bytes(cfg.precision),
        optimizer=cfg.optimizer.name,
    )
    return TableCosts(machine(cluster(cfg), cfg.sharding.network_gb_s), step)


def room(cfg: DlrmRun) -> float:
    """Bytes of a device for tables and the rows on their way; infinite where it is not known."""
    memory = table_costs(cfg).machine.memory
    return math.inf if memory is None else memory - _dense(cfg).total


@lru_cache(maxsize=4)
def profiles(cfg: DlrmRun) -> list[AccessProfile]:
    """How often the rows of each table are looked up, as far as it is known."""
    return _of_tables(cfg, _shares(cfg))


def _of_tables(cfg: DlrmRun, shares: list[AccessProfile]) -> list[AccessProfile]:
    """The profiles with what else is known of each table."""
    return [
        dataclasses.replace(profile, hotness=count, stored=stored)
        for profile, count, stored in zip(
            shares, cfg.model.bag_sizes, stored_rows(cfg), strict=True
        )
    ]


def _shares(cfg: DlrmRun) -> list[AccessProfile]:
    rows = cfg.model.table_rows
    if has_power_law(cfg):
        return [access.power_law(count) for count in rows]
    if not counted(cfg):
        return [access.uniform(count) for count in rows]
    folder = Path(cfg.data or "")
    facts = json.loads((folder / "prepare.json").read_text(encoding="utf-8"))
    features = zip(cfg.model.feature_rows, facts["features"].values(), strict=True)
    own = [
        access.read_vocabulary(
            _vocabulary(folder, table), count, feature["missing_share"] + feature["rare_share"]
        )
        for table, (count, feature) in enumerate(features)
    ]
    return own + [access.uniform(count) for count in rows[len(own) :]]  # of crosses


def _profiles(cfg: DlrmRun) -> list[AccessProfile]:
    """One device holds all rows, whichever are looked up: counts would be read for nothing."""
    if cluster(cfg).world > 1:
        return profiles(cfg)
    return _of_tables(cfg, [access.uniform(count) for count in cfg.model.table_rows])


def counted(cfg: DlrmRun) -> bool:
    """Whether preparation left the counts of all values with the data."""
    if cfg.data is None or is_generated(cfg.data):
        return False
    folder = Path(cfg.data or "")
    tables = range(len(cfg.model.feature_rows))
    return (folder / "prepare.json").is_file() and all(
        _vocabulary(folder, table).is_file() for table in tables
    )


def _vocabulary(folder: Path, table: int) -> Path:
    return folder / "vocabulary" / f"cat_{table}.parquet"


# --- memory


def plan_devices(cfg: DlrmRun) -> list[MemoryPlan]:
    """Bytes on every device of the run's cluster: exact, except for the activations."""
    dense = _dense(cfg)
    return [
        MemoryPlan(
            weights=dense.weights + load.weights,
            gradients=dense.gradients,
            optimizer=dense.optimizer + load.state,
            activations=dense.activations + load.buffers,
        )
        for load in _loads(cfg)
    ]


def activation_bytes(cfg: DlrmRun) -> int:
    """Estimated: what a device keeps for the backward pass, and the rows that it sends."""
    return max(plan.activations for plan in plan_devices(cfg))


def host_bytes(cfg: DlrmRun) -> list[int]:
    """Bytes of tables and their state that every device keeps in its host's memory."""
    return [load.host for load in _loads(cfg)]


def _loads(cfg: DlrmRun) -> list[Load]:
    return table_costs(cfg).loads(place(cfg), _profiles(cfg))


def _dense(cfg: DlrmRun) -> MemoryPlan:
    """Bytes of everything but tables, the same on every device."""
    parameters = cfg.model.dense_parameters
    # The MLPs' rule is Adagrad where the tables' is row-wise.
    name = cfg.optimizer.name.removeprefix("rowwise_")
    # Each parameter counts its own steps; with Adam, so do the tables.
    tensors = sum(1 + layer.has_bias for layer in cfg.model.dense_layers)
    scalars = tensors if name != "sgd" else 0
    scalars += name == "adam"
    scalars += 2 * (cfg.precision == "fp16")  # the loss scale, and its age
    return MemoryPlan(
        weights=parameters * 4,
        gradients=parameters * 4,
        optimizer=parameters * STATE_BYTES[name][0] + scalars * 4,
        activations=dense_activation_bytes(cfg),
    )


def what_would_fit(cfg: DlrmRun) -> str:
    """A message about tables that do not fit, with what would: another placement, more devices,
    host memory, another format."""
    each, devices = room(cfg), cluster(cfg).world
    start = f"{cfg.name} does not fit {cluster(cfg)}"
    if each <= 0:
        return (
            f"{start}: MLPs and activations alone need {readable_size(_dense(cfg).total)} of a "
            "device. Use a smaller micro_batch."
        )
    needed, saved = _needed_and_saved_by_host(cfg)
    if needed <= each * devices and cfg.sharding.placement != "auto":
        return f"{start} by {cfg.sharding.placement}. Use --placement auto."
    return (
        f"{start}: its tables need {readable_size(needed)}, and have {devices} x "
        f"{readable_size(each)}. It would fit {math.ceil(needed / each)} such "
        f"devices{_host_advice(cfg, saved, needed - each * devices)}."
        f"{what_fits(smaller(cfg), _fullest, _dense(cfg).total + each)}"
    )


def _fullest(cfg: DlrmRun) -> MemoryPlan:
    """Memory of the fullest device that the run was resolved for; several are taken to be equally
    full. Refuses a format that these devices do not have.
    """
    resolved, problems = resolve(cfg, cluster(cfg))
    raise_all(problems)
    devices = cluster(cfg).world
    if devices == 1:
        return plan_devices(resolved)[0]
    dense = _dense(resolved)
    needed, _ = _needed_and_saved_by_host(resolved)
    return dataclasses.replace(dense, weights=dense.weights + math.ceil(needed / devices))


def _needed_and_saved_by_host(cfg: DlrmRun) -> tuple[int, dict[int, int]]:
    """Bytes that all tables take on devices; and what each would not if it were in host memory,
    where only fp32 tables may be."""
    needed, saved, costs = 0, {}, table_costs(cfg)
    tables = zip(cfg.model.table_rows, cfg.model.widths, stored_rows(cfg), strict=True)
    for table, (rows, width, stored) in enumerate(tables):
        (whole,) = placements.whole_everywhere(rows, width, 1)
        profile = dataclasses.replace(access.uniform(rows), stored=stored)
        on_host = costs.shard(profile, whole, "host").memory
        here = costs.shard(profile, whole).memory
        needed += on_host if table in cfg.sharding.host_tables else here
        if table not in cfg.sharding.host_tables and stored.is_fp32:
            saved[table] = here - on_host
    return needed, saved


def _host_advice(cfg: DlrmRun, saved: dict[int, int], excess: float) -> str:
    """The fewest, largest tables whose move to host memory makes room for the others."""
    chosen: list[int] = []
    for table in sorted(saved, key=lambda t: -saved[t]):
        chosen.append(table)
        excess -= saved[table]
        if excess <= 0:
            per_node = sum(saved[t] for t in chosen) / cluster(cfg).nodes / GIB
            tables = " ".join(map(str, sorted([*cfg.sharding.host_tables, *chosen])))
            return f", or these with --host-tables {tables} ({per_node:.0f} GiB of host per node)"
    return ""
