"""Names that other systems have for our flags, so that a wrong flag can be answered with ours."""

NAMES = {
    "lr": "learning-rate base-lr max-lr peak-lr",
    "global-batch": "batch-size train-batch-size global-batch-size total-batch-size bs",
    "micro-batch": "batch-size micro-batch-size per-device-batch-size per-device-train-batch-size",
    "accumulate": "gradient-accumulation-steps accumulation-steps accumulate-grad-batches",
    "eval-batch": "eval-batch-size valid-batch-size test-batch-size per-device-eval-batch-size",
    "epochs": "num-epochs num-train-epochs max-epochs n-epochs",
    "max-steps": "steps num-steps train-steps train-iters max-iters iterations",
    "output": "output-dir output-path output-folder out-dir save-dir save-path log-dir",
    "data": "data-dir data-path dataset dataset-path dataset-dir train-data input",
    "input": "data data-path data-dir input-path input-file input-dir",
    "from": "init-from pretrained load load-from resume resume-from-checkpoint checkpoint",
    "seed": "random-seed manual-seed random-state",
    "precision": "dtype mixed-precision amp",
    "log-every": "log-interval logging-steps log-freq print-freq",
    "checkpoint-every": "save-steps save-interval save-every checkpoint-interval",
    "evals-per-epoch": "eval-steps eval-every eval-interval",
    "schedule.warmup-steps": "warmup num-warmup-steps lr-warmup-steps warmup-iters",
    "optimizer.name": "optimizer optim opt",
    "model.embedding-dim": "embedding-size embed-dim emb-dim embedding-width",
    "format": "output-format export-format",
    "columns": "schema column-types",
    "frequency-threshold": "min-count min-frequency min-freq",
}
"""Ours -> theirs."""


def ours(flag: str, known: frozenset[str]) -> list[str]:
    """What a flag of another system is called here, among the flags that a verb knows."""
    word = flag.partition("=")[0].lstrip("-").replace("_", "-").lower()
    return [f"--{name}" for name in NAMES if word in NAMES[name].split() and f"--{name}" in known]
