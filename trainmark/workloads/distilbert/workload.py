"""What the training loop calls of DistilBERT."""

from trainmark.contract import Workload
from trainmark.workloads.distilbert.data import SentenceBatch, build_data, held_out_splits
from trainmark.workloads.distilbert.flops import activation_bytes, flops
from trainmark.workloads.distilbert.model import SentenceClassifier, build_model, init_weights
from trainmark.workloads.distilbert.runs import DistilbertRun
from trainmark.workloads.distilbert.step import (
    SentenceTrainer,
    answers,
    build_predictor,
    evaluate,
    save_model,
)

DISTILBERT = Workload[
    DistilbertRun, SentenceClassifier, SentenceClassifier, SentenceBatch, SentenceTrainer
](
    build_model=build_model,
    parallelize=lambda model, mesh, cfg: [model],  # whole on every rank
    init_weights=init_weights,
    build_data=build_data,
    build_trainer=lambda parts, mesh, cfg: SentenceTrainer(parts[0], mesh, cfg),
    checked_step=SentenceTrainer.checked_step,
    observed=SentenceTrainer.observed,
    evaluate=evaluate,
    held_out_splits=held_out_splits,
    flops=flops,
    activation_bytes=activation_bytes,
    build_predictor=build_predictor,
    answers=answers,
    save_model=save_model,
)
