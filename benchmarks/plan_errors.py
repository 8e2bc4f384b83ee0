"""Steps as `trainmark plan` predicts them, beside published and committed measurements.

    PYTHONPATH=. python benchmarks/plan_errors.py

Nothing is measured here. Llama-3: each row of FlagPerf is predicted with constants fitted without
that row (`held_out`); our own two rows fix the two constants of their device, and are not held out.
DLRM and DistilBERT: the rows of `plan_sweep.py`, by the constants that the planner has; half of
them were chosen to be held out before any was measured. Its rows of `evaluate`, of `infer` and near
the limits of memory are taken, too, where it has measured any; requests are also those of
`inference_gpu.py`. It prints the constants fitted to all rows of Llama-3, which
`workloads/llama3/step_time.py` has, and writes `results/plan_errors.json`.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.common import read_rows, write_results
from benchmarks.dlrm_systems import with_changes
from trainmark.config import Run, filled
from trainmark.formatting import GIB
from trainmark.hardware.devices import Cluster
from trainmark.report import published
from trainmark.workloads import definition, named_run, resolve
from trainmark.workloads.dlrm.runs import DlrmRun
from trainmark.workloads.dlrm.step_time import evaluation_s, request_s
from trainmark.workloads.llama3.flops import activation_bytes
from trainmark.workloads.llama3.memory import plan_devices
from trainmark.workloads.llama3.runs import LlamaRun, axes_of
from trainmark.workloads.llama3.step_time import (
    MEGATRON_A100,
    MEGATRON_H100,
    OWN_H200,
    Rates,
    predict,
)

SOURCE = "FlagPerf, Llama-3-8B on Megatron-core 0.6"


@dataclass(frozen=True, kw_only=True)
class Case:
    """One measured row; None for what was not measured (out of memory)."""

    name: str
    cfg: LlamaRun
    cluster: Cluster
    measured_s: float | None
    measured_bytes: float | None
    layers: list[int] | None
    """Of each stage, as the measured system splits them."""
    system: str
    source: str

    @property
    def precision(self) -> str:
        return self.cfg.precision

    def predicted_s(self, rates: Rates) -> float:
        return predict(self.cfg, self.cluster, rates, self.layers).step_s or 0.0


def flagperf() -> list[Case]:
    """The published rows, with Megatron's equal stages."""
    rows = [*published.for_run("llama3-8b"), *published.for_run("llama3-8b-fp8")]
    return [_flagperf(row) for row in rows if row.case.partition("x")[0] in ("a100-80g", "h100")]


def _flagperf(row: published.Row) -> Case:
    cluster = Cluster.parse(row.case)
    run = named_run(row.run)
    assert isinstance(run, LlamaRun)
    batch = 1760 if cluster.nodes == 55 else 512
    cfg = resolve(
        dataclasses.replace(run, data="synthetic", parallel=row.parallel, global_batch=batch),
        cluster,
    )
    assert isinstance(cfg, LlamaRun)
    speed, pp = row.tokens_per_device_s, axes_of(cfg)["pp"]
    return Case(
        name=f"{row.case} {row.parallel} {cfg.precision}",
        cfg=cfg,
        cluster=cluster,
        measured_s=batch * cfg.sequence / speed / cluster.world if speed else None,
        measured_bytes=row.mem_gib * GIB if row.mem_gib else None,
        layers=[cfg.model.layers // pp] * pp,
        system="Megatron-core 0.6",
        source=SOURCE,
    )


def own() -> list[Case]:
    """One H200, from `llama3_gpu_h200.json`."""
    name = "llama3_gpu_h200"
    return [_own(row, name) for row in read_rows(name) if row["system"] == "trainmark"]


def _own(row: dict[str, Any], name: str) -> Case:
    cluster = Cluster.parse("h200x1x1")
    cfg = resolve(
        dataclasses.replace(
            named_run("llama3-8b"),
            data="synthetic",
            precision=row["precision"],
            global_batch=row["micro_batch"],
            micro_batch=row["micro_batch"],
            optimizer_states="bf16",
        ),
        cluster,
    )
    assert isinstance(cfg, LlamaRun)
    return Case(
        name=f"h200x1x1 {row['name']}",
        cfg=cfg,
        cluster=cluster,
        measured_s=row["step_s"],
        measured_bytes=row["allocated_gib"] * GIB,
        layers=None,
        system="trainmark",
        source=f"benchmarks/results/{name}.json",
    )


# --- fits: a step's time is linear in the reciprocals of the rates


def fitted(cases: Sequence[Case], start: Rates, names: Sequence[str]) -> Rates:
    """`start` with the rates of these names as the timed cases have them: least relative error."""
    timed = [case for case in cases if case.measured_s]
    rows, rest = [], []
    for case in timed:
        seconds = filled(case.measured_s)
        base = case.predicted_s(start)
        halved = {name: getattr(start, name) / 2 for name in names}
        slopes = [
            case.predicted_s(dataclasses.replace(start, **{name: rate})) - base
            for name, rate in halved.items()
        ]  # of a reciprocal, in units of the start's
        rows.append([slope / seconds for slope in slopes])
        rest.append(1 - (base - sum(slopes)) / seconds)
    factors, *_ = np.linalg.lstsq(np.array(rows), np.array(rest), rcond=None)
    found = {
        name: getattr(start, name) / float(factor)
        for name, factor in zip(names, factors, strict=True)
    }
    return dataclasses.replace(start, **found)


def rates_from(cases: Sequence[Case], hardware: str) -> Rates:
    """The constants of a device, from the cases that are given."""
    a100 = fitted(_on(cases, "a100-80g"), MEGATRON_A100, ["matmul", "link"])
    if hardware == "a100-80g":
        return a100
    here = _on(cases, hardware)
    start = MEGATRON_H100 if hardware == "h100" else OWN_H200
    start = dataclasses.replace(start, link=a100.link)
    wide = fitted([case for case in here if case.precision == "bf16"], start, ["matmul"])
    return fitted([case for case in here if case.precision == "fp8"], wide, ["fp8"])


def _on(cases: Sequence[Case], hardware: str) -> list[Case]:
    return [case for case in cases if case.cluster.hardware == hardware]


# --- memory of Megatron-core, as it was published


def megatron_bytes(case: Case, constants: Sequence[float]) -> float:
    """Of the last pipeline rank, which is the one that prints Megatron's log.

    Args:
        constants: bytes for each logit; the share of what is counted that is lost between
            allocations; and bytes of all else (contexts, buffers of collectives).
    """
    return _counted(case) + float(np.dot(_unknowns(case), constants))


def _counted(case: Case) -> float:
    """Weights and gradients (6 bytes), shared-out states (12), and what blocks keep.

    Transformer Engine keeps weights in fp8 twice, as they are and transposed; ours once.
    """
    model, axes = case.cfg.model, axes_of(case.cfg)
    kept: float = activation_bytes(case.cfg, axes["pp"] - 1)
    if case.precision == "fp8":
        kept += model.layers / axes["pp"] * model.block_parameters / axes["tp"]
    return _weights(case) * (6 + 12 / axes["dp"]) + kept


def _weights(case: Case) -> float:
    """Of the last rank: embedding and head are tied, and positions are learned."""
    model, axes = case.cfg.model, axes_of(case.cfg)
    blocks = model.layers // axes["pp"] * model.block_parameters
    return (blocks + (model.vocab + case.cfg.sequence) * model.hidden) / axes["tp"]


def _unknowns(case: Case) -> tuple[float, float, float]:
    cfg = case.cfg
    logits = filled(cfg.micro_batch) * cfg.sequence * cfg.model.vocab / axes_of(cfg)["tp"]
    return logits, _counted(case), 1.0


def fitted_bytes(cases: Sequence[Case]) -> list[float]:
    known = [case for case in cases if case.measured_bytes]
    rows = np.array([_unknowns(case) for case in known])
    rest = np.array([filled(case.measured_bytes) - _counted(case) for case in known])
    found, *_ = np.linalg.lstsq(rows / rows.max(axis=0), rest, rcond=None)
    return [float(value) for value in found / rows.max(axis=0)]


# --- rows


def own_bytes(case: Case) -> float:
    return max(plan.total for plan in plan_devices(case.cfg))


def _row(case: Case, rates: Rates, predicted_bytes: float, *, held_out: bool) -> dict[str, Any]:
    return {
        "system": case.system,
        "workload": "llama3",
        "case": case.name,
        "held_out": held_out,
        "predicted_s": case.predicted_s(rates),
        "measured_s": case.measured_s,
        "predicted_bytes": round(predicted_bytes),
        "measured_bytes": None if case.measured_bytes is None else round(case.measured_bytes),
        "ran_out_of_memory": case.measured_s is None,
        "source": case.source,
    }


SWEEP = "plan_sweep_h200"
H200 = Cluster("h200", 1, 1)


def configured(row: dict[str, Any], cluster: Cluster) -> Run:
    """The run that a row of the sweep measured."""
    changes = tuples(row["changes"]) | {"data": "synthetic", "device": "cuda"}
    cfg = resolve(with_changes(named_run(row["run"]), changes), cluster)
    if row["ids"] == "power_law":
        cfg = with_changes(cfg, {"synthetic_ids": "planted"})
    return cfg


def tuples(value: Any) -> Any:
    """Lists of JSON as configurations have them."""
    if isinstance(value, dict):
        return {name: tuples(one) for name, one in value.items()}
    return tuple(map(tuples, value)) if isinstance(value, list) else value


def swept() -> list[dict[str, Any]]:
    """DLRM and DistilBERT on one H200."""
    rows = (row for row in read_rows(SWEEP) if "error" not in row)
    return [found for row in rows if (found := _swept(row))]


def _swept(row: dict[str, Any]) -> dict[str, Any] | None:
    cfg = configured(row, H200)
    rest = {"case": row["case"], "held_out": row["held_out"], "source": SWEEP}
    if row["kind"] == "train":
        measured = {"measured_s": row["measured_s"], "measured_bytes": row["allocated_bytes"]}
        return planned(cfg, **rest, **measured)
    if row["kind"] == "limits":
        return limited(cfg, row) if row["limit_bytes"] else None
    assert isinstance(cfg, DlrmRun)
    if row["kind"] == "evaluate":
        return answered(evaluation_s(cfg), row["measured_s"], **rest)
    rest["case"] += f", {row['samples']} samples"
    return answered(request_s(cfg, row["samples"]), row["measured_s"], **rest)


def planned(
    cfg: Run, *, case: str, held_out: bool, source: str, measured_s: float,
    measured_bytes: int | None = None,
) -> dict[str, Any]:  # fmt: skip
    """A step as it was measured on one H200, and as it is planned."""
    plan = filled(definition(cfg).plan)(cfg, H200)
    return _of_h200(case, held_out, source, cfg.workload) | {
        "predicted_s": plan.step_s,
        "interval_s": plan.interval_s,
        "measured_s": measured_s,
        "predicted_bytes": plan.memory[0].total,
        "measured_bytes": measured_bytes,
    }


def limited(cfg: Run, row: dict[str, Any]) -> dict[str, Any]:
    """Steps with so much memory: whether they fitted, beside what the plan needs."""
    plan = filled(definition(cfg).plan)(cfg, H200)
    case = f"{row['case']} in {row['limit_bytes'] / GIB:.2f} GiB"
    return _of_h200(case, True, SWEEP, cfg.workload) | {
        "predicted_bytes": plan.memory[0].total,
        "limit_bytes": row["limit_bytes"],
        "ran_out_of_memory": not row["fits"],
    }


def answered(
    predicted_s: float | None, measured_s: float, *, case: str, held_out: bool, source: str
) -> dict[str, Any]:
    """A batch of `evaluate`, or a request of `infer`."""
    times = {"predicted_s": predicted_s, "measured_s": measured_s}
    return _of_h200(case, held_out, source, "dlrm") | times


def _of_h200(case: str, held_out: bool, source: str, workload: str) -> dict[str, Any]:
    return {
        "system": "trainmark",
        "workload": workload,
        "case": f"{H200} {case}",
        "held_out": held_out,
        "predicted_s": None,
        "measured_s": None,
        "predicted_bytes": None,
        "measured_bytes": None,
        "ran_out_of_memory": False,
        "source": f"benchmarks/results/{source}.json",
    }


EXCHANGES, REQUESTS, BAGS = "dlrm_exchange_h200", "inference_h200", "dlrm_dcnv2_h200"


def exchanged() -> list[dict[str, Any]]:
    """A forced exchange, tables in host memory and tables in 8 bits on one H200, to which nothing
    was fitted but the rate of single rows on the link to the host."""
    rows = []
    for row in read_rows(EXCHANGES):
        by_case: dict[str, dict[str, Any]] = {
            "exchange": {"sharding": {"force_exchange": True}},
            "host": {"sharding": {"host_tables": largest(row.get("table_rows", ()))}},
            "int8": {"table_format": {"table_precision": "int8"}},
        }
        if row["case"] not in by_case:
            continue
        changes = by_case[row["case"]]
        if "table_rows" in row:
            changes["model"] = {"table_rows": tuple(row["table_rows"])}
        changes |= {"data": "synthetic", "device": "cuda", "precision": "bf16"}
        changes |= {"synthetic_ids": "planted", "global_batch": row["batch"]}
        cfg = resolve(with_changes(named_run(f"dlrm-{row['size']}"), changes), H200)
        case = f"dlrm-{row['size']} {row['case']} {row['batch']}"
        measured_s = row["step_ms"] / 1e3
        rows.append(planned(cfg, case=case, held_out=True, source=EXCHANGES, measured_s=measured_s))
    return rows


def requests() -> list[dict[str, Any]]:
    """Of one client on one H200; those of one sample fixed the host's part of all."""
    rows = []
    for row in read_rows(REQUESTS):
        asked = (row["system"], row.get("clients"), row.get("tables_memory"))
        if asked != ("trainmark", 1, "device") or not row["request"].startswith("pinned"):
            continue
        changes = {"data": "synthetic", "device": "cuda", "precision": row["precision"]}
        changes |= {"table_format": {"table_precision": row["tables_precision"]}}
        cfg = resolve(with_changes(named_run(row["run"]), changes), H200)
        assert isinstance(cfg, DlrmRun)
        case = f"infer {row['run']} {row['precision']}, tables {row['tables_precision']}, "
        case += f"{row['batch']} samples"
        rest = {"held_out": row["batch"] > 1, "source": REQUESTS}
        seconds = request_s(cfg, row["batch"])
        rows.append(answered(seconds, row["median_ms"] / 1e3, case=case, **rest))
    return rows


def with_bags() -> list[dict[str, Any]]:
    """DLRM-DCNv2; the constants of bags are fitted to its rows with bf16 tables."""
    rows = []
    for row in read_rows(BAGS):
        if row["system"] != "trainmark":
            continue
        formats = (row["mlp_precision"], row["tables_precision"])
        changes = {"data": "synthetic", "device": "cuda", "precision": formats[0]}
        changes |= {"table_format": {"table_precision": formats[1], "state_precision": "bf16"}}
        changes |= {"synthetic_ids": "uniform" if row["indices"] == "uniform" else "planted"}
        cfg = resolve(with_changes(named_run("dlrm-dcnv2"), changes), H200)
        case = f"dlrm-dcnv2 {formats[0]}, tables {formats[1]}, {row['indices']}"
        rest = {"held_out": formats[1] != "bf16", "source": BAGS}
        rows.append(planned(cfg, case=case, measured_s=row["step_ms"] / 1e3, **rest))
    return rows


def largest(table_rows: Sequence[int], count: int = 5) -> tuple[int, ...]:
    """The tables that the benchmark keeps in host memory."""
    by_rows = sorted(range(len(table_rows)), key=lambda table: -table_rows[table])
    return tuple(sorted(by_rows[:count]))


def on_cpus() -> list[dict[str, Any]]:
    """Runs on calibrated CPUs, with what their results say was predicted; no constant is fitted."""
    name = "plan_cpu"
    rest: dict[str, Any] = {"held_out": True, "predicted_bytes": None, "measured_bytes": None}
    rest |= {"ran_out_of_memory": False, "source": f"benchmarks/results/{name}.json"}
    return [row | rest for row in read_rows(name)]


def all_rows() -> list[dict[str, Any]]:
    return [*of_llama3(), *swept(), *exchanged(), *with_bags(), *requests(), *on_cpus()]


def of_llama3() -> list[dict[str, Any]]:
    """Every case, FlagPerf's each without itself in the fit."""
    theirs, ours = flagperf(), own()
    rows = []
    for case in theirs:
        others = [other for other in theirs if other is not case]
        rates = rates_from(others, case.cluster.hardware)
        memory = megatron_bytes(case, fitted_bytes(others))
        rows.append(_row(case, rates, memory, held_out=True))
    rates = rates_from([*theirs, *ours], "h200")
    return rows + [_row(case, rates, own_bytes(case), held_out=False) for case in ours]


def main() -> None:
    theirs = flagperf()
    for hardware in ("a100-80g", "h100", "h200"):
        print(f"{hardware}: {rates_from([*theirs, *own()], hardware)}")
    print(f"Megatron's bytes for a logit, share lost, bytes besides: {fitted_bytes(theirs)}")
    rows = all_rows()
    for row in rows:
        seconds, memory = row["measured_s"], row["measured_bytes"]
        time = f"{row['predicted_s'] / seconds - 1:+.1%}" if seconds else "-"
        size = f"{(row['predicted_bytes'] - memory) / GIB:+.1f} GiB" if memory else "-"
        if "limit_bytes" in row:
            fits = row["predicted_bytes"] <= row["limit_bytes"]
            size = "wrong" if fits == row["ran_out_of_memory"] else "right"
        predicted = f"{1e3 * row['predicted_s']:.2f} ms" if row["predicted_s"] else "-"
        print(f"{row['case']:58} {predicted:>14} {time:>7} {size:>10}")
    write_results("plan_errors", rows)


if __name__ == "__main__":
    main()
