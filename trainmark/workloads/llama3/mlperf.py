"""Llama-3 as MLPerf's rules name it and want it logged."""

from typing import Any

from trainmark.workloads.llama3.runs import LlamaRun


def benchmark(cfg: LlamaRun) -> str:
    return "llama31_8b" if cfg.name.startswith("llama3-8b") else cfg.workload


def settings(cfg: LlamaRun) -> dict[str, Any]:
    optimizer, schedule = cfg.optimizer, cfg.schedule
    return {
        "max_sequence_length": cfg.sequence,
        "max_steps": cfg.max_steps,
        "opt_name": "adamw",
        "opt_end_learning_rate": cfg.lr * schedule.end_factor,
        "opt_learning_rate_decay_schedule": f"{schedule.decay} with linear warmup",
        "opt_adamw_beta_1": optimizer.beta1,
        "opt_adamw_beta_2": optimizer.beta2,
        "opt_adamw_epsilon": optimizer.eps,
        "opt_adamw_weight_decay": optimizer.weight_decay,
        "opt_gradient_clip_norm": optimizer.clip,
    }
