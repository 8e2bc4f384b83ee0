"""Do fp8 and the low-memory optimiser learn like bf16 with fp32 masters? Llama-3-1b on real text.

    python benchmarks/llama3_alignment.py --prepare TEXT --data TOKENS              (once, on a CPU)
    python benchmarks/llama3_alignment.py --data TOKENS                    (CUDA; about 6 minutes)
    python benchmarks/llama3_alignment.py --data TOKENS --only low-memory    (about 140 seconds)
    python benchmarks/llama3_alignment.py --tiny --output build/tiny          (does it run? a CPU)

all with PYTHONPATH=. Same weights, same samples, same order: 300 steps of 16 sequences of 2048
tokens. The text is repeated as often as that needs, and the result says how often. Variants that
are not run keep their rows in the result; that they had the same weights and data is checked by the
loss of the first step.
"""

import argparse
import dataclasses
import lzma
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks import common
from trainmark import workloads
from trainmark.config import SYNTHETIC, TrainOptions
from trainmark.corpus import dataset, tokens
from trainmark.run import runner
from trainmark.run.alignment import compare, read_curve
from trainmark.workloads.llama3.runs import LlamaRun, Model

REFERENCE = "reference"
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    REFERENCE: ("bf16, fp32 masters", {"precision": "bf16", "optimizer_states": "fp32"}),
    # Both at once, as Llama-3-8B runs on one device.
    "fp8": ("fp8, bf16 states", {"precision": "fp8", "optimizer_states": "bf16"}),
    "low-memory": ("bf16, bf16 states", {"precision": "bf16", "optimizer_states": "bf16"}),
}
LIMIT = 0.01
VOCAB = 8192
STEPS, TINY_STEPS = 300, 24


# --- data


def prepare(text: Path, folder: Path) -> None:
    """A byte-level BPE tokenizer of 8,192 ids, learned from the text itself, and its tokens."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    encoder = Tokenizer(models.BPE())
    encoder.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    with tempfile.TemporaryDirectory() as temporary:
        plain = Path(temporary) / "text.txt"
        content = text.read_bytes()
        plain.write_bytes(lzma.decompress(content) if text.suffix == ".xz" else content)
        encoder.train([str(plain)], trainer)
        encoder.save(str(Path(temporary) / "tokenizer.json"))
        tokens.prepare(
            tokens.Options(input=str(plain), tokenizer=Path(temporary), output=folder, workers=1)
        )


def config(options: argparse.Namespace, changes: dict[str, Any]) -> LlamaRun:
    named: LlamaRun = workloads.named_run("llama3-1b")
    run = dataclasses.replace(
        named,
        data=str(options.data),
        model=dataclasses.replace(named.model, vocab=VOCAB),
        max_steps=STEPS,
        micro_batch=options.micro_batch,
        train_samples=STEPS * (named.global_batch or 0),
        log_every=10,
        **changes,
    )
    if not options.tiny:
        return run
    toy = Model(layers=1, hidden=32, ffn=64, heads=2, kv_heads=1, vocab=64, init_std=0.02)
    return dataclasses.replace(
        run, data=SYNTHETIC, device="cpu", model=toy, sequence=16, max_steps=TINY_STEPS
    )


# --- measuring


def measure(name: str, options: argparse.Namespace, reference: list[float] | None) -> Any:
    """Train one variant. Returns its row; `reference` is the curve to compare with."""
    variant, changes = VARIANTS[name]
    cfg = config(options, changes)
    folder = options.runs / name
    ((result, _),) = runner.train(cfg, TrainOptions(output=folder), time.perf_counter())
    curve = [loss for _, loss in sorted(read_curve(folder).items())]
    found = compare(numbered(curve), numbered(reference or curve), VARIANTS[REFERENCE][0])
    return {
        "system": "trainmark",
        "variant": variant,
        "run": cfg.name,
        "parameters": result.config["model"] | {"count": cfg.model.parameters},
        "sequence": cfg.sequence,
        "tokens_per_step": (cfg.global_batch or 0) * cfg.sequence,
        "steps": len(curve),
        "steps_compared": found.steps,
        "passes_over_text": None if options.tiny else (result.tokens or 0) / text_tokens(options),
        "first_loss": result.loss.first,
        "last_loss": result.loss.last,
        "mean_relative_error_from_step_21": found.error,
        "below_limit": found.error < LIMIT,
        "tokens_per_s": result.tokens_per_device_s,
        "memory_gib": result.memory.peak_bytes / 2**30,
        "commit": options.commit or result.software["commit"],
        "curve": [round(loss, 5) for loss in curve],
    }


def numbered(curve: list[float]) -> dict[int, float]:
    return dict(enumerate(curve, start=1))


def text_tokens(options: argparse.Namespace) -> int:
    return int(dataset.find(options.data).tokens.lengths.sum())


def check_same_start(rows: dict[str, dict[str, Any]]) -> None:
    """bf16 variants begin with the same weights and samples, so with the same loss."""
    first = [rows[name]["curve"][0] for name in (REFERENCE, "low-memory") if name in rows]
    assert max(first) - min(first) < 5e-4, f"not the reference's data or weights: {first}"


def main(arguments: list[str] | None = None) -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--data", type=Path, help="tokens of the text")
    parser.add_argument("--prepare", type=Path, metavar="TEXT", help="make --data, and end")
    parser.add_argument("--only", nargs="*", choices=list(VARIANTS), default=list(VARIANTS))
    parser.add_argument("--runs", type=Path, default=Path("build/llama3_alignment"))
    parser.add_argument("--micro-batch", type=int, default=16)
    options = parser.parse_args(arguments)
    if options.prepare:
        prepare(options.prepare, options.data)
        return
    result = "llama3_alignment_tiny" if options.tiny else "llama3_alignment_h200"
    rows = known_rows(result)
    if REFERENCE not in (*rows, options.only[0] if options.only else REFERENCE):
        parser.error(f"no reference was measured yet; give it first: --only {REFERENCE} ...")
    for name in options.only:
        reference = rows[REFERENCE]["curve"] if name != REFERENCE else None
        rows[name] = measure(name, options, reference)
        print({key: value for key, value in rows[name].items() if key != "curve"}, flush=True)
        in_order = [rows[known] for known in VARIANTS if known in rows]
        device = "cpu" if options.tiny else "cuda"
        common.write_results(result, in_order, device, folder=options.output, commit=options.commit)
        check_same_start(rows)


def known_rows(result: str) -> dict[str, dict[str, Any]]:
    """Rows that were measured before, by the names of their variants."""
    names = {variant: name for name, (variant, _) in VARIANTS.items()}
    return {names[row["variant"]]: {"commit": None} | row for row in common.read_rows(result)}


if __name__ == "__main__":
    main()
