"""DLRM as MLPerf's rules name it and want it logged."""

from typing import Any

from trainmark.workloads.dlrm.runs import DlrmRun


def benchmark(cfg: DlrmRun) -> str:
    """The dot interaction has no entry in the rules any more: it logs under its own name."""
    return "dlrm_dcnv2" if cfg.model.interaction == "dcn" else "dlrm"


def settings(cfg: DlrmRun) -> dict[str, Any]:
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
