"""DistilBERT training on one GPU, beside the Hugging Face model: sentences per second.

    PYTHONPATH=. python benchmarks/distilbert_gpu.py          (CUDA, transformers; about 4 minutes)
    PYTHONPATH=. python benchmarks/distilbert_gpu.py --tiny --output build/tiny     (does it run?)

Every row is a whole optimiser step (forward, backward, AdamW) on batches that lie on the device, of
sentences with about 25 tokens, and with dropout on. `padded` computes 512 tokens for each sentence,
`packed` the sentences alone. What attends to what is in `attention`:

- `masked`: every position attends to the sentence's tokens, as the published model does;
- `full`: sentences of 512 tokens and no mask. On an H200 the Hugging Face model was faster on them
  eager and in tf32; compiled in bf16, its fastest row, it was faster with the mask.

MFU counts the matrix products of the model over the peak of `trainmark/hardware/devices.py`.
"""

import dataclasses
import gc
import itertools
import json
import statistics
import time
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor

from benchmarks import common
from benchmarks.timing import step_times
from trainmark import metrics
from trainmark.distributed.mesh import single
from trainmark.hardware import devices
from trainmark.hardware.devices import Precision
from trainmark.training.precision import set_matmul_precision
from trainmark.workloads import resolve
from trainmark.workloads.distilbert import data, flops, model, runs, step

LR = 5e-5
BATCHES = 4  # different batches that the timed steps go round
GIB = 2**30


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """One row to measure."""

    system: str
    mode: Literal["padded", "packed"]
    precision: Precision
    batch: int
    attention: str = "masked"


def cases() -> list[Case]:
    """Ours, then the peer without a mask, then the peer on our batches."""
    ours = [
        Case(system="trainmark", mode="padded", precision="bf16", batch=96),
        Case(system="trainmark", mode="padded", precision="tf32", batch=96),
        Case(system="trainmark", mode="packed", precision="bf16", batch=1024),
    ]
    theirs = [
        Case(system=system, mode="padded", precision=precision, batch=96, attention=attention)
        for attention in ("full", "masked")
        for precision in ("bf16", "tf32")
        for system in ("huggingface-eager", "huggingface-compiled")
    ]
    return ours + theirs


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scale:
    """How large the network and its batches are, and where they lie."""

    device: torch.device
    model: runs.Model
    length: int
    largest_batch: int
    backend: str
    """Of torch.compile."""


FULL = Scale(
    device=torch.device("cuda", 0), model=runs.Model(), length=512, largest_batch=1024,
    backend="inductor",
)  # fmt: skip
TINY = Scale(
    device=torch.device("cpu"),
    model=runs.Model(vocabulary=100, positions=64, hidden=32, layers=2, heads=2, feed_forward=64),
    length=64,
    largest_batch=4,
    backend="eager",
)


# --- systems: each gives a function that makes one training step


def configuration(case: Case, scale: Scale) -> runs.DistilbertRun:
    cfg = dataclasses.replace(
        runs.distilbert_sst2(),
        data="synthetic",
        device="cuda" if scale.device.type == "cuda" else "cpu",
        model=scale.model,
        sequence_length=scale.length,
        mode=case.mode,
        precision=case.precision,
        global_batch=case.batch,
        micro_batch=case.batch,
        synthetic_sentences=case.batch * BATCHES,
        synthetic_tokens=25,
        epochs=1,
    )
    return resolve(cfg, devices.Cluster(devices.identify(scale.device).key, 1, 1))


def trainmark_step(case: Case, scale: Scale) -> Callable[[], Any]:
    cfg = configuration(case, scale)
    net = model.build_model(cfg)
    model.init_weights([net], cfg, scale.device)
    trainer = step.SentenceTrainer(net, single(scale.device), cfg)
    prepared = [trainer.prepare(batch) for batch in data.build_data(cfg, "train", 0, 1)]
    turns = itertools.cycle(prepared)
    return lambda: trainer.step(next(turns), LR)


def huggingface_step(case: Case, scale: Scale) -> Callable[[], Any]:
    """A user's loop: autocast for bf16, fused AdamW, SDPA attention."""
    net = huggingface_model(scale).to(scale.device).train()
    compiled = case.system == "huggingface-compiled"
    forward = torch.compile(net, backend=scale.backend) if compiled else net
    optimizer = torch.optim.AdamW(net.parameters(), lr=LR, fused=True)
    turns = itertools.cycle(huggingface_batches(case, scale))
    halves = torch.autocast(scale.device.type, torch.bfloat16, enabled=case.precision == "bf16")

    def one_step() -> None:
        optimizer.zero_grad(set_to_none=True)
        with halves:
            loss = forward(**next(turns)).loss
        loss.backward()
        optimizer.step()

    return one_step


def huggingface_model(scale: Scale) -> torch.nn.Module:
    import transformers

    net = scale.model
    attention: dict[str, Any] = {"attn_implementation": "sdpa"}
    config = transformers.DistilBertConfig(
        vocab_size=net.vocabulary, max_position_embeddings=net.positions, dim=net.hidden,
        n_layers=net.layers, n_heads=net.heads, hidden_dim=net.feed_forward,
        **attention,
    )  # fmt: skip
    return transformers.DistilBertForSequenceClassification(config)


def huggingface_batches(case: Case, scale: Scale) -> list[dict[str, Tensor]]:
    """The batches that ours gets, as a mask and padded ids; or full ones."""
    shape = (case.batch, scale.length)
    batches = []
    for batch in data.build_data(configuration(case, scale), "train", 0, 1):
        ids = batch.ids_KN[0].view(shape).long()
        arguments = {"input_ids": ids, "attention_mask": (ids != 0).long()}
        if case.attention == "full":
            arguments = {"input_ids": torch.randint(3, scale.model.vocabulary, shape)}
        arguments["labels"] = batch.labels_KS[0]
        batches.append({name: tensor.to(scale.device) for name, tensor in arguments.items()})
    return batches


# --- measuring


def measure(case: Case, scale: Scale, seconds: float) -> dict[str, Any]:
    """Median time of a step, by device events around each."""
    set_matmul_precision(case.precision)
    began = time.perf_counter()
    make = trainmark_step if case.system == "trainmark" else huggingface_step
    one_step = make(case, scale)
    step_times(one_step, 5, scale.device)
    ready_s = time.perf_counter() - began
    on_gpu = scale.device.type == "cuda"
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    times = step_times(one_step, 10, scale.device)
    while sum(times) < seconds:
        times += step_times(one_step, 10, scale.device)
    step_s = statistics.median(times)
    share = mfu(case, scale, step_s)
    return dataclasses.asdict(case) | {
        "samples_per_s": round(case.batch / step_s, 1),
        "memory_gib": round(torch.cuda.max_memory_reserved() / GIB, 2) if on_gpu else None,
        "mfu": None if share is None else round(share, 4),
        "step_ms": round(step_s * 1000, 3),
        "step_ms_spread": [round(1000 * edge, 3) for edge in (min(times), max(times))],
        "steps": len(times),
        "ready_s": round(ready_s, 1),
    }


def mfu(case: Case, scale: Scale, step_s: float) -> float | None:
    peak = devices.peak_flops(devices.identify(scale.device), case.precision)
    if isinstance(peak, devices.Unknown):
        return None
    cfg = configuration(case, scale)
    tokens = case.batch * scale.length
    if case.attention != "full":
        tokens = int(runs.load_sentences(cfg, "train").lengths.mean() * case.batch)
    needed = flops.flops(cfg, case.batch, tokens)["model"]
    return metrics.mfu(needed, step_s, 1, peak.flops)


def main(arguments: list[str] | None = None) -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--seconds", type=float, default=2.0, help="timed seconds per row")
    parser.add_argument("--only", default="", help="measure rows whose system contains this")
    options = parser.parse_args(arguments)
    scale = TINY if options.tiny else FULL
    seconds = 0.0 if options.tiny else options.seconds
    rows = []
    for case in cases():
        if options.only not in case.system:
            continue
        case = dataclasses.replace(case, batch=min(case.batch, scale.largest_batch))
        if options.tiny and case.precision == "tf32":  # which a CPU does not have
            case = dataclasses.replace(case, precision="fp32")
        rows.append(measure(case, scale, seconds))
        print(json.dumps(rows[-1]), flush=True)
        torch.compiler.reset()
        gc.collect()
        torch.cuda.empty_cache()
        name = "distilbert_tiny" if options.tiny else "distilbert_gpu_h200"
        # After every row: a time limit loses one row.
        common.write_results(name, rows, scale.device, folder=options.output, commit=options.commit)


if __name__ == "__main__":
    main()
