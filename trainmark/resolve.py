"""Fill in and check a run's configuration; one error lists all problems."""

import dataclasses
from collections.abc import Iterator

from trainmark import validation
from trainmark.config import Interval, Run, parse_profile
from trainmark.contract import Definition, RunT
from trainmark.errors import InputError, raise_all
from trainmark.hardware.backends import has_own_kernels
from trainmark.hardware.devices import Cluster, lacks


def resolve_run(run: RunT, cluster: Cluster, workload: Definition[RunT]) -> RunT:
    """Fill in and check everything, for one kind of machine."""
    out_of_bounds = validation.problems(run)
    problems = [*out_of_bounds, *_common_problems(run, cluster)]
    if run.precision not in workload.precisions:
        problems.append(
            f"{workload.name} has no precision {run.precision}; it has "
            f"{', '.join(workload.precisions)}."
        )
    if out_of_bounds:  # the other checks need sensible numbers
        raise_all(problems)
    run = dataclasses.replace(run, compile=_compiles(run, cluster))
    axes = workload.mesh_axes(run, cluster.world)
    resolved, more = workload.resolve(run, cluster)
    problems += [*more, *resolved.schedule.problems()]
    resolved, more = resolve_batches(resolved, axes.get("dp", 1))
    raise_all(problems + more)
    return resolved


def _compiles(run: Run, cluster: Cluster) -> bool:
    if run.eager:
        return False
    if run.compile is not None:
        return run.compile
    return cluster.hardware != "cpu" and has_own_kernels(run.device)


def _common_problems(run: Run, cluster: Cluster) -> Iterator[str]:
    if run.patience and run.evals_per_epoch == 0:
        yield "patience counts evaluations: evals_per_epoch must be at least 1, not 0."
    if run.precision == "tf32" and cluster.hardware == "cpu":
        yield "precision tf32 needs a GPU; on a CPU use fp32, bf16 or fp16."
    if run.precision == "fp8" and lacks(cluster.hardware, "fp8"):
        yield (
            f"precision fp8 needs a GPU that multiplies fp8 numbers, such as an H100. "
            f"Received: {cluster}. Use bf16 or fp16."
        )
    if run.submission is not None and not all(run.submission.partition(",")):
        yield f"submission must be ORG,PLATFORM. Received: {run.submission!r}."
    for text, parser in ((run.profile, parse_profile), (run.checkpoint_every, Interval.parse)):
        try:
            if text is not None:
                parser(text)
        except InputError as error:
            yield str(error)


def target_problems(run: Run) -> list[str]:
    """What is wrong with a target, for a metric between 0 and 1."""
    if run.target is None or 0 <= run.target <= 1:
        return []
    return [f"target must lie between 0 and 1, as {run.metric} does. Received: {run.target}."]


# --- batches


def resolve_batches(run: RunT, data_parallel: int) -> tuple[RunT, list[str]]:
    """global_batch = micro_batch x accumulate x data-parallel size: any two give the third."""
    total, micro, accumulate = run.global_batch, run.micro_batch, run.accumulate
    if total is None:
        if micro is None:
            return run, ["Give global_batch, or micro_batch (and accumulate)."]
        accumulate = accumulate or 1
        total = micro * accumulate * data_parallel
    elif micro is None:
        accumulate = accumulate or 1
        micro = total // (accumulate * data_parallel)
    elif accumulate is None:
        accumulate = total // (micro * data_parallel)
    if micro * accumulate * data_parallel != total:
        return run, [
            f"global_batch {total} must equal micro_batch x accumulate x data-parallel size; "
            f"received {_given_factors(run)}data-parallel size {data_parallel}."
            f"{_nearest_batches(run, data_parallel)}"
        ]
    return dataclasses.replace(
        run,
        global_batch=total,
        micro_batch=micro,
        accumulate=accumulate,
        eval_batch=run.eval_batch or micro,
    ), []


def accumulation_remark(named: Run, given: Run, resolved: Run) -> str | None:
    """A remark for somebody who gave only a micro-batch, and gets several in each step."""
    micro, total, added = resolved.micro_batch, resolved.global_batch, resolved.accumulate
    if given.micro_batch in (None, named.micro_batch) or given.accumulate or not given.global_batch:
        return None
    if not micro or not total or added in (None, 1):
        return None
    return (
        f"micro_batch {micro:,} makes each step add up {added:,} micro-batches, because "
        f"global_batch stays {total:,}; for steps of one micro-batch, give --global-batch "
        f"{total // added}."
    )


def _given_factors(run: Run) -> str:
    given = {"micro_batch": run.micro_batch, "accumulate": run.accumulate}
    return "".join(f"{name} {value}, " for name, value in given.items() if value is not None)


def _nearest_batches(run: Run, data_parallel: int) -> str:
    """The nearest global batches that divide evenly, unless all three factors are fixed."""
    if run.global_batch is None or (run.micro_batch and run.accumulate):
        return ""
    unit = (run.micro_batch or run.accumulate or 1) * data_parallel
    below = run.global_batch // unit * unit
    return f" Nearest: {f'{below} or ' if below else ''}{below + unit}."
