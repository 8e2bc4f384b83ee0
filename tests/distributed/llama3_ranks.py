"""A Llama so small that a run takes a second, and the ranks that train it."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.checkpoint_tensors import save_checkpoint
from tests.distributed import joining
from trainmark import workloads
from trainmark.checkpoint import checkpoints
from trainmark.checkpoint.run_tensors import stored_tensors
from trainmark.distributed import mesh as meshes
from trainmark.distributed.mesh import Mesh
from trainmark.run.assessment import evaluated
from trainmark.run.loop import build_trainer
from trainmark.workloads import resolve
from trainmark.workloads.llama3 import runs
from trainmark.workloads.llama3.runs import LlamaRun, Model

STEPS = 20
SAVED_AT = 10
CHECKED = 4
CONTINUED = 2
"""Steps after a load: the first needs the weights, the second also the optimiser's state."""
CPU = torch.device("cpu")

BF16_STATES: dict[str, Any] = {"precision": "bf16", "optimizer_states": "bf16"}
VARIANTS: dict[str, dict[str, Any]] = {
    "DP2-fsdp": {"parallel": "PP1DP2TP1", "data_parallel": "fsdp"},
    "PP2-interleaved": {"parallel": "PP2DP1TP1", "pipeline": "interleaved"},
    "PP2-full": {"parallel": "PP2DP1TP1", "recompute": "full"},
    "TP2-fp8": {"parallel": "PP1DP1TP2", "precision": "fp8"},
    "DP2-bf16": {"parallel": "PP1DP2TP1", "precision": "bf16"},
}
SPLITS: dict[str, tuple[int, dict[str, dict[str, Any]]]] = {
    "two": (
        2,
        {
            # Larger micro-batches, because a step under TP takes ten times as long here.
            "TP2": {"parallel": "PP1DP1TP2", "micro_batch": 4},
            "DP2": {"parallel": "PP1DP2TP1"},
            "PP2": {"parallel": "PP2DP1TP1"},
        },
    ),
    "two-variants": (2, VARIANTS),
    "two-bf16-states": (
        2,
        {
            "TP2-bf16-states": BF16_STATES | {"parallel": "PP1DP1TP2"},
            "DP2-bf16-states": BF16_STATES | {"parallel": "PP1DP2TP1"},
        },
    ),
    "four": (
        4,
        {
            "PP2xTP2": {"parallel": "PP2DP1TP2"},
            "DP2xTP2": {"parallel": "PP1DP2TP2"},
            "PP2xDP2": {"parallel": "PP2DP2TP1"},
        },
    ),
    "two-on-a-gpu": (
        2,
        {
            "TP2": {"parallel": "PP1DP1TP2", "micro_batch": 4},
            "DP2-zero1": {"parallel": "PP1DP2TP1"},
            "PP2": {"parallel": "PP2DP1TP1"},
            **VARIANTS,
        },
    ),
    "four-on-a-gpu": (
        4,
        {
            "PP2xTP2": {"parallel": "PP2DP1TP2", "micro_batch": 4},
            "DP2xTP2": {"parallel": "PP1DP2TP2"},
            "PP2xDP2-interleaved": {"parallel": "PP2DP2TP1", "pipeline": "interleaved"},
            "DP4-fsdp-fp8": VARIANTS["DP2-fsdp"] | {"parallel": "PP1DP4TP1", "precision": "fp8"},
        },
    ),
    "two-on-cpus": (2, {"DP2-gloo": {"parallel": "PP1DP2TP1"}}),
    "two-on-cpus-again": (2, {"DP2-gloo-again": {"parallel": "PP1DP2TP1"}}),
    "two-alone": (2, {"DP2": {"parallel": "PP1DP2TP1"}}),
    "four-after-two": (4, {"PP2xTP2": {"parallel": "PP2DP1TP2", "micro_batch": 4}}),
    "two-after-four": (2, {"DP2-again": {"parallel": "PP1DP2TP1"}}),
}
"""Groups of splits that must train like one process: (world size, changes by name)."""


def config(world: int = 1, device: torch.device = CPU, **changes: Any) -> LlamaRun:
    """The small run, resolved for `world` ranks."""
    run = LlamaRun(
        name="llama3-demo",
        data="synthetic",
        device=device.type,  # type: ignore[arg-type]
        compile=False,
        model=Model(
            layers=4, hidden=64, ffn=64, heads=4, kv_heads=2, vocab=64, rope_theta=10_000.0,
            init_std=0.05,
        ),
        sequence=16,
        global_batch=8,
        micro_batch=2,
        eval_batch=24,
        lr=5e-3,
        max_steps=STEPS,
        schedule=runs.llama3_demo().schedule,
        seed=3,
    )  # fmt: skip
    return resolve(dataclasses.replace(run, **changes), joining.cluster(device, world))


def train(
    cfg: LlamaRun,
    mesh: Mesh,
    *,
    start: Path | None = None,
    save_to: Path | None = None,
    stop: int = STEPS,
) -> list[float]:
    """Losses of the steps; after the last one also of held-out data, and the norm of its gradient.
    Saves after `SAVED_AT`."""
    workload = workloads.load("llama3")
    trainer = build_trainer(cfg, workload, mesh)
    data = workload.build_data(cfg, "train", mesh.dp_rank, mesh.dp_size)
    step = 0
    if start is not None:
        step = checkpoints.load(start, stored_tensors(trainer), exact=True)["step"]
        data.restore({"samples": step * cfg.global_batch})
    losses = []
    for batch in data:
        prepared, lr = trainer.prepare(batch), cfg.lr * cfg.schedule.factor(step + 30)
        if prepared.ready is not None:
            prepared.ready.wait()
        if step == CHECKED:
            loss, skipped, differ = trainer.checked_step(prepared, lr)  # type: ignore[attr-defined]
            assert not any(differ.values())
        else:
            loss, skipped = trainer.step(prepared, lr)
        assert not skipped
        step += 1
        losses.append(loss.item())
        if save_to is not None and step == SAVED_AT:
            save_checkpoint(save_to, step, stored_tensors(trainer), {"step": step}, keep=1)
        if step == stop:
            break
    if step < STEPS:
        return losses
    held_out = workload.build_data(cfg, "test", mesh.dp_rank, mesh.dp_size)
    held_out_loss = evaluated(workload, trainer, held_out)[0]["loss"]
    assert held_out_loss is not None
    losses.append(held_out_loss)
    losses.append(workload.observed(trainer)["gradient_norm"].item())
    return losses


def main(rank: int, group: str, folder: Path, kind: str = "cpu") -> None:
    """Every split of a group in one process group, started once."""
    world, splits = SPLITS[group]
    device = joining.join(rank, world, folder / f"store-{group}", kind)
    results: dict[str, dict[str, Any]] = {}
    try:
        built = {}
        for name, changes in splits.items():
            cfg = config(world, device, **changes)
            built[name] = cfg, meshes.build(device, runs.mesh_axes(cfg, world))
            results[name] = {"whole": train(*built[name], save_to=folder / name)}
        starts = {path.parent.name: path for path in sorted(folder.glob("*/step-*"))}
        if kind == "cuda":  # of this group, the first: all of them take long
            starts = {n: path for n, path in starts.items() if n not in list(splits)[1:]}
        for name, split in built.items():
            results[name]["continued"] = {
                other: train(*split, start=start, stop=SAVED_AT + CONTINUED)
                for other, start in starts.items()
                if other != name
            }
        if rank == 0:
            (folder / f"{group}.json").write_text(json.dumps(results))
        dist.barrier()
    finally:
        dist.destroy_process_group()
