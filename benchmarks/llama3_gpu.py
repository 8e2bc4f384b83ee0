"""Llama-3-8B on one GPU at sequence 8192, beside a plain `transformers` + torch.compile step.

    PYTHONPATH=. python benchmarks/llama3_gpu.py [--only NAME ...]   (CUDA, transformers)

Every timed step is a whole one: forward, backward, clipping and an AdamW update of all weights.
Batches lie in host memory and are copied as in training. Weights are random and tokens made up:
neither changes how long a step takes.
"""

import argparse
import dataclasses
import gc
import itertools
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.common import write_results
from trainmark import hardware, metrics, workloads
from trainmark.config import resolve
from trainmark.distributed.mesh import single
from trainmark.hardware import Cluster
from trainmark.loop import build_trainer
from trainmark.workloads.llama3 import runs
from trainmark.workloads.llama3.flops import flops

DEVICE = torch.device("cuda")
WARMUP, MEASURED = 3, 6


@dataclass(frozen=True)
class Case:
    name: str
    changes: dict[str, Any]
    system: str = "trainmark"


CASES = (
    Case("bf16-mb1", {"micro_batch": 1}),
    Case("bf16-mb2", {"micro_batch": 2}),
    Case("fp8-mb2", {"micro_batch": 2, "precision": "fp8"}),
    Case("transformers-mb1", {"micro_batch": 1}, "transformers + torch.compile"),
)


def config(case: Case) -> runs.LlamaRun:
    batch = case.changes["micro_batch"]
    cfg = dataclasses.replace(
        runs.llama3_8b(),
        **{"data": "synthetic", "device": "cuda", "optimizer_states": "bf16"} | case.changes,
        global_batch=batch,
        max_steps=WARMUP + MEASURED,
    )
    key = hardware.identify(DEVICE).key
    return resolve(cfg, Cluster(key, 1, 1))


def trainmark_step(cfg: runs.LlamaRun) -> Callable[[], Any]:
    workload = workloads.load("llama3")
    trainer = build_trainer(cfg, workload, single(DEVICE))
    batches = iter(list(workload.build_data(cfg, "train", 0, 1)))

    def step() -> Any:
        prepared = trainer.prepare(next(batches))
        prepared.ready.wait()
        return trainer.step(prepared, 1e-5)[0]

    return step


def transformers_step(cfg: runs.LlamaRun) -> Callable[[], Any]:
    """What one would write: bf16 weights, SDPA, compiled layers, PyTorch's fused AdamW in bf16."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from trainmark.workloads.llama3.huggingface import config_json

    theirs = LlamaConfig(**config_json(cfg.model, cfg.sequence, "bfloat16"), use_cache=False)
    with torch.device(DEVICE):
        torch.set_default_dtype(torch.bfloat16)
        model = LlamaForCausalLM._from_config(theirs, attn_implementation="sdpa")
        torch.set_default_dtype(torch.float32)
    for layer in model.model.layers:
        layer.compile()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, betas=(0.9, 0.95), fused=True)
    batches = iter(list(workloads.load("llama3").build_data(cfg, "train", 0, 1)))

    def step() -> Any:
        tokens = next(batches).tokens.to(DEVICE, non_blocking=True).long()[:, :-1]
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return step


def measure(case: Case) -> dict[str, Any]:
    """A row of the result."""
    torch.cuda.reset_peak_memory_stats()
    cfg = config(case)
    began = time.perf_counter()
    step = (trainmark_step if case.system == "trainmark" else transformers_step)(cfg)
    losses = [step() for _ in range(WARMUP)]
    torch.cuda.synchronize()
    ready_s = time.perf_counter() - began
    events = [torch.cuda.Event(enable_timing=True) for _ in range(MEASURED + 1)]
    events[0].record()
    for event in events[1:]:
        losses.append(step())
        event.record()
    torch.cuda.synchronize()
    seconds = [a.elapsed_time(b) / 1000 for a, b in itertools.pairwise(events)]
    tokens = (cfg.global_batch or 0) * cfg.sequence
    return _row(case, cfg, seconds, tokens) | {
        "ready_s": round(ready_s, 1),
        "first_loss": losses[0].item(),
        "last_loss": losses[-1].item(),
    }


def _row(case: Case, cfg: runs.LlamaRun, seconds: list[float], tokens: int) -> dict[str, Any]:
    mean = statistics.mean(seconds)
    needed = flops(cfg, 0, tokens)
    peak = hardware.peak_flops("h200", "bf16")
    assert isinstance(peak, hardware.Peak)
    return {
        "system": case.system,
        "name": case.name,
        "precision": cfg.precision,
        "sequence": cfg.sequence,
        "parameters": runs.parameters(cfg.model),
        "micro_batch": cfg.micro_batch,
        "recompute": cfg.recompute,
        "attention": cfg.attention,
        "optimizer": "AdamW, bf16 weights and states"
        + (", stochastic rounding" if case.system == "trainmark" else ", torch's fused one"),
        "tokens_per_s": tokens / mean,
        "step_s": mean,
        "step_s_spread": [min(seconds), max(seconds)],
        "steps": len(seconds),
        "mfu_published": metrics.mfu(needed["6N"], mean, 1, peak.flops),
        "mfu_palm": metrics.mfu(needed["palm"], mean, 1, peak.flops),
        "mfu_peak": f"{peak.dtype} {peak.flops:.4g}",
        # Against the fp8 peak, the lower end of the published range; null for other precisions.
        "mfu_published_fp8_peak": _against_fp8(needed["6N"], mean, cfg.precision),
        "memory_gib": torch.cuda.max_memory_reserved() / 2**30,
        "allocated_gib": torch.cuda.max_memory_allocated() / 2**30,
    }


def _against_fp8(needed: float, seconds: float, precision: str) -> float | None:
    peak = hardware.peak_flops("h200", "fp8")
    assert isinstance(peak, hardware.Peak)
    return metrics.mfu(needed, seconds, 1, peak.flops) if precision == "fp8" else None


def release() -> None:
    """Give the memory of one case back before the next."""
    torch._dynamo.reset()
    gc.collect()
    torch.cuda.empty_cache()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="*", default=[case.name for case in CASES])
    parser.add_argument("--name", default="llama3_gpu_h200")
    arguments = parser.parse_args()
    rows = []
    for case in CASES:
        if case.name not in arguments.only:
            continue
        try:
            rows.append(measure(case))
        except torch.OutOfMemoryError:
            rows.append({"system": case.system, "name": case.name, "tokens_per_s": "OOM"})
        print(rows[-1], flush=True)
        release()
        write_results(arguments.name, rows, DEVICE)


if __name__ == "__main__":
    main()
