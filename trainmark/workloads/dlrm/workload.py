"""What the training loop calls of DLRM."""

from torch import nn

from trainmark.contract import Workload
from trainmark.workloads.dlrm import mlperf, sharding
from trainmark.workloads.dlrm.data import ClickBatch, build_data, groups, held_out_splits
from trainmark.workloads.dlrm.flops import flops
from trainmark.workloads.dlrm.importance import importance
from trainmark.workloads.dlrm.model import Dlrm, build_model, init_weights
from trainmark.workloads.dlrm.parallelize import parallelize
from trainmark.workloads.dlrm.runs import DlrmRun
from trainmark.workloads.dlrm.step import DlrmTrainer, build_predictor, build_trainer, predict
from trainmark.workloads.dlrm.warnings import warnings

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
    mlperf=mlperf.benchmark,
    mlperf_settings=mlperf.settings,
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
