"""What the training loop calls of DLRM."""

from typing import Any

from torch import nn

from trainmark.contract import Workload
from trainmark.workloads.dlrm import sharding
from trainmark.workloads.dlrm.data import ClickBatch, build_data, groups, held_out_splits
from trainmark.workloads.dlrm.flops import flops
from trainmark.workloads.dlrm.importance import importance
from trainmark.workloads.dlrm.model import Dlrm, build_model, init_weights
from trainmark.workloads.dlrm.parallelize import parallelize
from trainmark.workloads.dlrm.runs import DlrmRun
from trainmark.workloads.dlrm.step import DlrmTrainer, build_predictor, build_trainer, predict
from trainmark.workloads.dlrm.warnings import warnings

# --- as MLPerf's rules name it and want it logged


def _mlperf(cfg: DlrmRun) -> str:
    """The dot interaction has no entry in the rules any more: it logs under its own name."""
    return "dlrm_dcnv2" if cfg.model.interaction == "dcn" else "dlrm"


def _mlperf_settings(cfg: DlrmRun) -> dict[str, Any]:
    optimizer = cfg.optimizer
    found: dict[str, Any] = {
        "opt_name": optimizer.name,
        "opt_weight_decay": optimizer.weight_decay,
    }
    if "adagrad" in optimizer.name:
        found |= {
            "opt_adagrad_learning_rate_decay": 0,
            "opt_adagrad_initial_accumulator_value": 0,
            "opt_adagrad_epsilon": optimizer.eps,
        }
    return found


DLRM = Workload[DlrmRun, Dlrm, nn.Module, ClickBatch, DlrmTrainer](
    build_model=build_model,
    parallelize=parallelize,
    init_weights=init_weights,
    build_data=build_data,
    build_trainer=build_trainer,
    state_loaded=DlrmTrainer.state_loaded,
    checked_step=DlrmTrainer.checked_step,
    observed=DlrmTrainer.observed,
    warnings=warnings,
    predict=predict,
    groups=groups,
    importance=importance,
    held_out_splits=held_out_splits,
    mlperf=_mlperf,
    mlperf_settings=_mlperf_settings,
    flops=flops,
    activation_bytes=sharding.activation_bytes,
    plan_devices=sharding.plan_devices,
    host_bytes=sharding.host_bytes,
    device_bytes=DlrmTrainer.device_bytes,
    sent_bytes_per_step=DlrmTrainer.sent_bytes_per_step,
    build_predictor=build_predictor,
    predicts_on_ranks=True,
    answers=lambda logits: {"score": logits.float().sigmoid()},
)
