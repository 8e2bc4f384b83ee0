"""Do fp8 and the low-memory optimiser learn like bf16 with fp32 masters? Llama-3-1b on real text.

    PYTHONPATH=. python benchmarks/llama3_alignment.py --data TOKENS --vocab N   (CUDA)

Same weights, same samples, same order: 300 steps of 16 sequences of 2048 tokens. The text is
repeated as often as that needs, and the result says how often.
"""

import argparse
import dataclasses
import time
from pathlib import Path
from typing import Any

from benchmarks.common import write_results
from trainmark import runner, workloads
from trainmark.config import TrainOptions
from trainmark.corpus import dataset
from trainmark.report.alignment import FIRST_STEP, compare, read_curve
from trainmark.workloads.llama3.runs import LlamaRun

REFERENCE = "bf16, fp32 masters"
VARIANTS: dict[str, dict[str, Any]] = {
    REFERENCE: {"precision": "bf16", "optimizer_states": "fp32"},
    # Both at once, as Llama-3-8B runs on one device.
    "fp8, bf16 states": {"precision": "fp8", "optimizer_states": "bf16"},
    "bf16, bf16 states": {"precision": "bf16", "optimizer_states": "bf16"},
}
LIMIT = 0.01
START_S = 18  # what a variant takes besides its steps, mostly compilation


def config(arguments: argparse.Namespace, steps: int, changes: dict[str, Any]) -> LlamaRun:
    named: LlamaRun = workloads.named_run("llama3-1b")
    return dataclasses.replace(
        named,
        data=str(arguments.data),
        model=dataclasses.replace(named.model, vocab=arguments.vocab),
        max_steps=steps,
        micro_batch=arguments.micro_batch,
        train_samples=arguments.steps * 16,
        log_every=10,
        **changes,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--vocab", type=int, required=True)
    parser.add_argument("--output", type=Path, default=Path("build/llama3_alignment"))
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--micro-batch", type=int, default=16)
    parser.add_argument("--seconds", type=float, default=1e9, help="shorten the last variant")
    arguments = parser.parse_args()
    tokens = int(dataset.find(arguments.data).tokens.lengths.sum())
    rows: list[dict[str, Any]] = []
    began = time.perf_counter()
    for name, changes in VARIANTS.items():
        folder = arguments.output / name.replace(", ", "-").replace(" ", "_")
        steps = arguments.steps
        if len(rows) == len(VARIANTS) - 1:
            left = arguments.seconds - (time.perf_counter() - began) - START_S
            speed = rows[0]["tokens_per_s"] / rows[0]["tokens_per_step"]
            steps = min(steps, int(left * speed))
        if steps <= FIRST_STEP:
            break
        cfg = config(arguments, steps, changes)
        options = TrainOptions(output=folder)
        ((result, _),) = runner.train(cfg, options, time.perf_counter())
        reference = arguments.output / REFERENCE.replace(", ", "-").replace(" ", "_")
        found = compare(read_curve(folder), read_curve(reference), REFERENCE)
        rows.append(
            {
                "system": "trainmark",
                "variant": name,
                "run": cfg.name,
                "parameters": result.config["model"] | {"count": _parameters(cfg)},
                "sequence": cfg.sequence,
                "tokens_per_step": (cfg.global_batch or 0) * cfg.sequence,
                "steps": steps,
                "steps_compared": found.steps,
                "passes_over_text": (result.tokens or 0) / tokens,
                "first_loss": result.loss.first,
                "last_loss": result.loss.last,
                "mean_relative_error_from_step_21": found.error,
                "below_limit": found.error < LIMIT,
                "tokens_per_s": result.tokens_per_device_s,
                "memory_gib": result.memory.peak_bytes / 2**30,
                "curve": [round(loss, 5) for _, loss in sorted(read_curve(folder).items())],
            }
        )
        print({key: value for key, value in rows[-1].items() if key != "curve"}, flush=True)
        write_results("llama3_alignment_h200", rows, "cuda")


def _parameters(cfg: LlamaRun) -> int:
    from trainmark.workloads.llama3.runs import parameters

    return parameters(cfg.model)


if __name__ == "__main__":
    main()
