"""DistilBERT training on one GPU, beside the Hugging Face model: sentences per second.

    PYTHONPATH=. python benchmarks/distilbert_gpu.py          (a CUDA machine with transformers)

Every row is a whole optimiser step (forward, backward, AdamW) on batches that lie on the device, of
sentences with about 25 tokens, and with dropout on. `padded` computes 512 tokens for each sentence
in all dense layers; in bf16, padding attends only within blocks of 128 of its own kind, since no
sentence reads it. `packed` computes the sentences alone. The
Hugging Face model gets the same padded batches with their mask, and, in the rows whose `lengths`
are `full`, batches of 512 real tokens without a mask, for which its kernels are faster.
MFU counts the matrix products of the model over the peak of `trainmark/hardware.py`.
"""

import argparse
import contextlib
import dataclasses
import gc
import itertools
import json
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import common
import torch
from torch import Tensor

from trainmark import hardware, metrics
from trainmark.config import resolve
from trainmark.distributed.mesh import single
from trainmark.precision import set_matmul_precision
from trainmark.workloads.distilbert import data, flops, model, runs, step

DEVICE = torch.device("cuda", 0)
SEQUENCE_LENGTH, LR = 512, 5e-5
BATCHES = 4  # different batches that the timed steps go round
GIB = 2**30


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """One row to measure."""

    system: str
    mode: str
    precision: str
    batch: int
    lengths: str = "sst2"


CASES = [
    Case(system="trainmark", mode="packed", precision="bf16", batch=1024),
    Case(system="trainmark", mode="padded", precision="bf16", batch=96),
    Case(system="trainmark", mode="padded", precision="tf32", batch=96),
    Case(system="huggingface-eager", mode="padded", precision="bf16", batch=96, lengths="full"),
    Case(system="huggingface-compiled", mode="padded", precision="bf16", batch=96, lengths="full"),
    Case(system="huggingface-eager", mode="padded", precision="tf32", batch=96, lengths="full"),
    Case(system="huggingface-compiled", mode="padded", precision="tf32", batch=96, lengths="full"),
    Case(system="huggingface-eager", mode="padded", precision="bf16", batch=96),
    Case(system="huggingface-compiled", mode="padded", precision="bf16", batch=96),
    Case(system="huggingface-eager", mode="padded", precision="tf32", batch=96),
]


# --- systems: each gives a function that makes one training step


def configuration(case: Case) -> runs.DistilbertRun:
    cfg = dataclasses.replace(
        runs.distilbert_sst2(),
        data="synthetic",
        device="cuda",
        mode=case.mode,
        precision=case.precision,
        global_batch=case.batch,
        micro_batch=case.batch,
        synthetic_sentences=case.batch * BATCHES,
        synthetic_tokens=25,
        epochs=1,
    )
    return resolve(cfg, hardware.Cluster(hardware.identify(DEVICE).key, 1, 1))


def trainmark_step(case: Case) -> Callable[[], Any]:
    cfg = configuration(case)
    net = model.build_model(cfg)
    model.init_weights([net], cfg, DEVICE)
    trainer = step.build_trainer([net], single(DEVICE), cfg)
    prepared = [trainer.prepare(batch) for batch in data.build_data(cfg, "train", 0, 1)]
    torch.cuda.synchronize()
    turns = round_robin(prepared)
    return lambda: trainer.step(next(turns), LR)


def huggingface_step(case: Case, *, compiled: bool) -> Callable[[], Any]:
    """A user's loop: autocast for bf16, fused AdamW, SDPA attention."""
    import transformers

    net = transformers.DistilBertForSequenceClassification(
        transformers.DistilBertConfig(attn_implementation="sdpa")
    ).to(DEVICE)
    net.train()
    forward = torch.compile(net) if compiled else net
    optimizer = torch.optim.AdamW(net.parameters(), lr=LR, fused=True)
    turns = round_robin(huggingface_batches(case))

    def one_step() -> None:
        optimizer.zero_grad(set_to_none=True)
        with autocast(case.precision):
            loss = forward(**next(turns)).loss
        loss.backward()
        optimizer.step()

    return one_step


def huggingface_batches(case: Case) -> list[dict[str, Tensor]]:
    """The batches that ours gets, as a mask and padded ids."""
    if case.lengths == "full":
        shape = (case.batch, SEQUENCE_LENGTH)
        labels = torch.arange(case.batch, device=DEVICE) % 2
        return [
            {"input_ids": torch.randint(1000, 30000, shape, device=DEVICE), "labels": labels}
            for _ in range(BATCHES)
        ]
    cfg = configuration(case)
    batches = []
    for batch in data.build_data(cfg, "train", 0, 1):
        ids = batch.ids_KN[0].view(case.batch, SEQUENCE_LENGTH).long()
        mask = (ids != 0).long()
        arguments = {"input_ids": ids, "attention_mask": mask, "labels": batch.labels_KS[0]}
        batches.append({name: tensor.to(DEVICE) for name, tensor in arguments.items()})
    return batches


def autocast(precision: str) -> contextlib.AbstractContextManager[object]:
    if precision == "bf16":
        return torch.autocast("cuda", dtype=torch.bfloat16)
    return contextlib.nullcontext()


def round_robin(batches: list[Any]) -> Iterator[Any]:
    while True:
        yield from batches


# --- measuring


def measure(case: Case, seconds: float) -> dict[str, Any]:
    """Median time of a step, by device events around each."""
    set_matmul_precision(case.precision)
    began = time.perf_counter()
    one_step = make_step(case)
    for _ in range(5):
        one_step()
    torch.cuda.synchronize()
    ready_s = time.perf_counter() - began
    torch.cuda.reset_peak_memory_stats()
    times: list[float] = []
    while sum(times) < seconds:
        times += timed_steps(one_step, 10)
    step_s = statistics.median(times)
    return dataclasses.asdict(case) | {
        "samples_per_s": round(case.batch / step_s, 1),
        "memory_gib": round(torch.cuda.max_memory_reserved() / GIB, 2),
        "mfu": round(mfu(case, step_s), 4),
        "step_ms": round(step_s * 1000, 3),
        "ready_s": round(ready_s, 1),
    }


def make_step(case: Case) -> Callable[[], Any]:
    if case.system == "trainmark":
        return trainmark_step(case)
    return huggingface_step(case, compiled=case.system == "huggingface-compiled")


def timed_steps(one_step: Callable[[], Any], count: int) -> list[float]:
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
    marks[0].record()
    for mark in marks[1:]:
        one_step()
        mark.record()
    torch.cuda.synchronize()
    return [a.elapsed_time(b) / 1000 for a, b in itertools.pairwise(marks)]


def mfu(case: Case, step_s: float) -> float:
    cfg = configuration(case)
    lengths = runs.load_sentences(cfg, "train").lengths
    needed = flops.flops(cfg, case.batch, int(lengths.mean() * case.batch))["model"]
    peak = hardware.peak_flops(hardware.identify(DEVICE), case.precision)
    return metrics.mfu(needed, step_s, 1, peak.flops)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=common.RESULTS)
    parser.add_argument("--seconds", type=float, default=2.0, help="timed seconds per row")
    parser.add_argument("--only", default="", help="measure rows whose system contains this")
    options = parser.parse_args()
    rows = []
    for case in CASES:
        if options.only not in case.system:
            continue
        rows.append(measure(case, options.seconds))
        print(json.dumps(rows[-1]), flush=True)
        torch.compiler.reset()
        gc.collect()
        torch.cuda.empty_cache()
        common.RESULTS = options.output  # written after every row: a time limit loses one row
        common.write_results("distilbert_gpu_h200", rows, DEVICE)


if __name__ == "__main__":
    main()
