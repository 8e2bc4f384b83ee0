"""What the training loop calls of Llama-3."""

from typing import Any

from torch import nn

from trainmark.contract import Workload
from trainmark.workloads.llama3.data import TokenBatch, build_data, held_out_splits
from trainmark.workloads.llama3.flops import activation_bytes, flops
from trainmark.workloads.llama3.model import Llama, build_model, init_weights
from trainmark.workloads.llama3.parallelize import parallelize
from trainmark.workloads.llama3.runs import LlamaRun
from trainmark.workloads.llama3.step import LlamaTrainer, evaluate

# --- as MLPerf's rules name it and want it logged


def _mlperf(cfg: LlamaRun) -> str:
    return "llama31_8b" if cfg.name.startswith("llama3-8b") else cfg.workload


def _mlperf_settings(cfg: LlamaRun) -> dict[str, Any]:
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


LLAMA3 = Workload[LlamaRun, Llama, nn.Module, TokenBatch, LlamaTrainer](
    build_model=build_model,
    parallelize=parallelize,
    init_weights=init_weights,
    build_data=build_data,
    build_trainer=LlamaTrainer,
    checked_step=LlamaTrainer.checked_step,
    observed=LlamaTrainer.observed,
    evaluate=evaluate,
    held_out_splits=held_out_splits,
    mlperf=_mlperf,
    mlperf_settings=_mlperf_settings,
    flops=flops,
    activation_bytes=activation_bytes,
    device_bytes=LlamaTrainer.device_bytes,
)
