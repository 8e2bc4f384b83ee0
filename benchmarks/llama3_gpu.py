"""Llama-3-8B on one GPU at sequence 8192, beside a plain `transformers` + torch.compile step.

    PYTHONPATH=. python benchmarks/llama3_gpu.py                        (CUDA, transformers; 2 min)
    PYTHONPATH=. python benchmarks/llama3_gpu.py --only bf16-mb2 fp8-mb2                (a minute)
    PYTHONPATH=. python benchmarks/llama3_gpu.py --tiny --output build/tiny         (does it run?)

Every timed step is a whole one: forward, backward, clipping and an AdamW update of all weights.
Batches lie in host memory and are copied as in training. Weights are random and tokens made up:
neither changes how long a step takes. Cases that are not run keep their rows in the result.
"""

import dataclasses
import gc
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks import common
from benchmarks.dlrm_systems import step as step_of
from benchmarks.timing import step_times
from trainmark import metrics, workloads
from trainmark.distributed.mesh import single
from trainmark.hardware import devices
from trainmark.hardware.devices import Cluster
from trainmark.hardware.environment import environment
from trainmark.run.loop import build_trainer
from trainmark.workloads import resolve
from trainmark.workloads.llama3 import runs
from trainmark.workloads.llama3.flops import flops

WARMUP, MEASURED = 3, 6
PEER = "transformers + torch.compile"


@dataclass(frozen=True)
class Case:
    name: str
    changes: dict[str, Any]
    system: str = "trainmark"


CASES = (
    Case("bf16-mb1", {"micro_batch": 1}),
    Case("bf16-mb2", {"micro_batch": 2}),
    Case("fp8-mb2", {"micro_batch": 2, "precision": "fp8"}),
    Case("transformers-mb1", {"micro_batch": 1}, PEER),
    Case("transformers-mb2", {"micro_batch": 2}, PEER),
)


@dataclass(frozen=True)
class Scale:
    """How large the network is, and where it lies."""

    device: torch.device
    model: runs.Model
    sequence: int
    backend: str
    """Of torch.compile, for the peer."""


FULL = Scale(torch.device("cuda"), runs.Model(), 8192, "inductor")
TINY = Scale(
    torch.device("cpu"),
    runs.Model(layers=2, hidden=64, ffn=128, heads=4, kv_heads=2, vocab=128, init_std=0.02),
    32,
    "eager",
)


def config(case: Case, scale: Scale) -> runs.LlamaRun:
    cfg = dataclasses.replace(
        runs.llama3_8b(),
        **{"data": "synthetic", "optimizer_states": "bf16"} | case.changes,
        device="cuda" if scale.device.type == "cuda" else "cpu",
        model=scale.model,
        sequence=scale.sequence,
        global_batch=case.changes["micro_batch"],
        max_steps=WARMUP + MEASURED,
    )
    return resolve(cfg, Cluster(devices.identify(scale.device).key, 1, 1))


def trainmark_step(cfg: runs.LlamaRun, scale: Scale) -> Callable[[], Any]:
    workload = workloads.load("llama3")
    trainer = build_trainer(cfg, workload, single(scale.device))
    batches = iter(list(workload.build_data(cfg, "train", 0, 1)))

    return lambda: step_of(trainer, trainer.prepare(next(batches)), 1e-5)


def transformers_step(cfg: runs.LlamaRun, scale: Scale) -> Callable[[], Any]:
    """What one would write: bf16 weights, SDPA, compiled layers, PyTorch's fused AdamW in bf16."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from trainmark.workloads.llama3.huggingface import config_json

    theirs = LlamaConfig(**config_json(cfg.model, cfg.sequence, "bfloat16"), use_cache=False)
    with scale.device:
        torch.set_default_dtype(torch.bfloat16)
        model = LlamaForCausalLM._from_config(theirs, attn_implementation="sdpa")
        torch.set_default_dtype(torch.float32)
    for layer in model.model.layers:
        layer.compile(backend=scale.backend)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, betas=(0.9, 0.95), fused=True)
    batches = iter(list(workloads.load("llama3").build_data(cfg, "train", 0, 1)))

    def step() -> Any:
        tokens = next(batches).ids.to(scale.device, non_blocking=True).long()[:, :-1]
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return step


def measure(case: Case, scale: Scale) -> dict[str, Any]:
    """A row of the result; without figures where memory runs out."""
    cfg = config(case, scale)
    try:
        seconds, measured = _measure(case, cfg, scale)
    except torch.OutOfMemoryError:
        return _described(case, cfg) | {"tokens_per_s": None, "outcome": "OOM"}
    return _described(case, cfg) | _figures(cfg, scale, seconds) | measured


def _measure(
    case: Case, cfg: runs.LlamaRun, scale: Scale
) -> tuple[list[float], dict[str, float | None]]:
    """Seconds of each step, and what was seen on the way."""
    on_gpu = scale.device.type == "cuda"
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    began = time.perf_counter()
    step = (trainmark_step if case.system == "trainmark" else transformers_step)(cfg, scale)
    losses: list[Any] = []

    def one_step() -> None:
        losses.append(step())

    step_times(one_step, WARMUP, scale.device)
    ready_s = time.perf_counter() - began
    return step_times(one_step, MEASURED, scale.device), {
        "memory_gib": torch.cuda.max_memory_reserved() / 2**30 if on_gpu else None,
        "allocated_gib": torch.cuda.max_memory_allocated() / 2**30 if on_gpu else None,
        "ready_s": round(ready_s, 1),
        "first_loss": losses[0].item(),
        "last_loss": losses[-1].item(),
    }


def _described(case: Case, cfg: runs.LlamaRun) -> dict[str, Any]:
    ours = "8 more bits of each weight, rounded stochastically"
    return {
        "system": case.system,
        "name": case.name,
        "precision": cfg.precision,
        "sequence": cfg.sequence,
        "parameters": cfg.model.parameters,
        "micro_batch": cfg.micro_batch,
        "recompute": cfg.recompute,
        "attention": cfg.attention,
        "optimizer": "AdamW, bf16 weights and states, "
        + (ours if case.system == "trainmark" else "torch's fused one"),
    }


def _figures(cfg: runs.LlamaRun, scale: Scale, seconds: list[float]) -> dict[str, Any]:
    mean = statistics.mean(seconds)
    tokens = (cfg.global_batch or 0) * cfg.sequence
    needed = flops(cfg, 0, tokens)
    device = devices.identify(scale.device)
    peaks = {kind: devices.peak_flops(device, kind) for kind in ("bf16", "fp8")}

    def mfu(convention: str, kind: str) -> float | None:
        peak = peaks[kind]
        if isinstance(peak, devices.Unknown):
            return None
        return metrics.mfu(needed[convention], mean, 1, peak.flops)

    bf16 = peaks["bf16"]
    return {
        "tokens_per_s": tokens / mean,
        "step_s": mean,
        "step_s_spread": [min(seconds), max(seconds)],
        "steps": len(seconds),
        "mfu_published": mfu("6N", "bf16"),
        "mfu_palm": mfu("palm", "bf16"),
        "mfu_peak": None if isinstance(bf16, devices.Unknown) else f"{bf16.dtype} {bf16.flops:.4g}",
        # Against the fp8 peak, the lower end of the published range; null for other precisions.
        "mfu_published_fp8_peak": mfu("6N", "fp8") if cfg.precision == "fp8" else None,
    }


def release() -> None:
    """Give the memory of one case back before the next."""
    torch._dynamo.reset()
    gc.collect()
    torch.cuda.empty_cache()


def main(arguments: list[str] | None = None) -> None:
    parser = common.parser(__doc__)
    names = [case.name for case in CASES]
    parser.add_argument("--only", nargs="*", choices=names, default=names)
    parser.add_argument("--name", default="llama3_gpu_h200")
    options = parser.parse_args(arguments)
    scale = TINY if options.tiny else FULL
    name = "llama3_tiny" if options.tiny else options.name
    commit = options.commit or environment(scale.device)[1]["commit"]
    earlier = common.read_rows(name, options.output) or common.read_rows(name)
    rows = {row["name"]: {"commit": None} | row for row in earlier}
    for case in CASES:
        if case.name in options.only:
            rows[case.name] = measure(case, scale) | {"commit": commit}
            print(rows[case.name], flush=True)
            release()
            in_order = [rows[known] for known in names if known in rows]
            common.write_results(name, in_order, scale.device, folder=options.output, commit=commit)


if __name__ == "__main__":
    main()
