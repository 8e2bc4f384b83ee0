"""How long a run should take, predicted before its first step: `predicted` in its result."""

import dataclasses

from trainmark import __version__, metrics, workloads
from trainmark.config import Run, filled
from trainmark.errors import in_words
from trainmark.hardware.devices import Cluster
from trainmark.hardware.memory import MemoryPlan
from trainmark.hardware.plans import Plan
from trainmark.run.result import Predicted


def forecast(cfg: Run, cluster: Cluster, memory: MemoryPlan) -> Predicted:
    """The workload's plan as a prediction; if planning fails, the reason.

    Args:
        cfg: resolved for the cluster.
        memory: what a device needs, for a workload without a plan.
    """
    make = workloads.definition(cfg).plan
    no_plan = Plan(memory=[memory], no_time=f"{cfg.workload} has no prediction of times")
    try:
        plan = make(cfg, cluster) if make else no_plan
    except Exception as error:  # a prediction must not cost anybody a run
        failed = f"the prediction failed ({type(error).__name__}: {in_words(error)})"
        plan = dataclasses.replace(no_plan, no_time=failed)
    fullest = max(plan.memory, key=lambda device: device.total)
    step_s = plan.step_s
    return Predicted(
        step_s=step_s,
        p_train=metrics.throughput(filled(cfg.global_batch), step_s) if step_s else None,
        memory_bytes=fullest.total,
        memory_parts=dataclasses.asdict(fullest),
        parts=dict(plan.parts),
        bound_by=plan.bound_by,
        reason=None if step_s else plan.no_time,
        planner=f"trainmark {__version__}",
        constants=dict(plan.constants),
        sources=list(plan.sources),
        interval_s=plan.interval_s,
    )
