"""What the training loop calls of Llama-3."""

from torch import nn

from trainmark.contract import Workload
from trainmark.workloads.llama3 import mlperf
from trainmark.workloads.llama3.data import TokenBatch, build_data, held_out_splits
from trainmark.workloads.llama3.flops import activation_bytes, flops
from trainmark.workloads.llama3.model import Llama, build_model, init_weights
from trainmark.workloads.llama3.parallelize import parallelize
from trainmark.workloads.llama3.runs import LlamaRun
from trainmark.workloads.llama3.step import LlamaTrainer, build_trainer, evaluate

LLAMA3 = Workload[LlamaRun, Llama, nn.Module, TokenBatch, LlamaTrainer](
    build_model=build_model,
    parallelize=parallelize,
    init_weights=init_weights,
    build_data=build_data,
    build_trainer=build_trainer,
    checked_step=LlamaTrainer.checked_step,
    observed=LlamaTrainer.observed,
    evaluate=evaluate,
    held_out_splits=held_out_splits,
    mlperf=mlperf.benchmark,
    mlperf_settings=mlperf.settings,
    flops=flops,
    activation_bytes=activation_bytes,
    device_bytes=LlamaTrainer.device_bytes,
)
