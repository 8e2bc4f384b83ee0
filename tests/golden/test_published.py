"""Numbers that the published systems fix: learning rates, tables, sizes, batches."""

import dataclasses

import pytest

from trainmark import workloads
from trainmark.errors import InputError
from trainmark.hardware.devices import Cluster
from trainmark.kernels.interaction import output_width
from trainmark.metrics import evaluation_steps
from trainmark.run.memory import plan_memory
from trainmark.workloads import resolve
from trainmark.workloads.dlrm import runs, sizes

# --- learning rates


@pytest.mark.parametrize(
    ("count", "rate"),
    [(0, 0), (1, 0.003), (4000, 12), (8000, 24), (60000, 6), (64013, 2.658007), (72000, 0)],
)
@pytest.mark.parametrize("name", ["dlrm-small", "dlrm-large", "dlrm-xlarge"])
def test_tensorflow_learning_rates(name: str, count: int, rate: float) -> None:
    run = workloads.named_run(name)
    assert run.lr * run.schedule.factor(count) == pytest.approx(rate, rel=1e-6)


@pytest.mark.parametrize("count", [72001, 96000, 10**6])
def test_tensorflow_rate_stays_at_zero_after_the_decay(count: int) -> None:
    # The published code lets it grow again: 24 at 96,000.
    assert workloads.named_run("dlrm-small").schedule.factor(count) == 0


@pytest.mark.parametrize(
    ("count", "rate"), [(1, 0.003), (8000, 24), (48001, 23.998), (60000, 6), (72001, 0)]
)
def test_pytorch_learning_rates(count: int, rate: float) -> None:
    run = workloads.named_run("dlrm-flagperf")
    # The first optimiser step, step 0 of the loop, counts as 1.
    assert run.lr * run.schedule.factor(count - 1) == pytest.approx(rate, rel=1e-6)


def test_torchrec_rate_is_constant() -> None:
    run = workloads.named_run("dlrm-mlperf")
    assert {run.lr * run.schedule.factor(step) for step in (0, 1, 10**6)} == {15.0}


# --- evaluation points


def test_evaluation_steps() -> None:
    assert evaluation_steps(64013, 2) == {32006, 64012}
    assert evaluation_steps(64013, 1) == {64012}
    assert evaluation_steps(10, 0) == frozenset()
    assert evaluation_steps(1, 3) == {0}
    assert len(evaluation_steps(64013, 20)) == 20
    assert evaluation_steps(10, 15) == {round(i * 9 / 15) for i in range(1, 16)}
    assert evaluation_steps(10, 10**15) == set(range(10))  # and in no time


# --- tables and parameters


@pytest.mark.parametrize(
    ("name", "rows", "gib"),
    [
        ("dlrm-small", 32_709_138, 15.597),
        ("dlrm-flagperf", 32_709_138, 15.597),
        ("dlrm-large", 177_944_275, 84.85),
        ("dlrm-xlarge", 882_774_559, 420.94),
        ("dlrm-full", 882_774_559, 420.94),
        ("dlrm-mlperf", None, 97.36),
        ("dlrm-mlperfx2", None, 174.03),
    ],
)
def test_table_sizes(name: str, rows: int | None, gib: float) -> None:
    run = workloads.named_run(name)
    found = sizes.sizes(run)
    if rows is not None:
        assert found["table rows"] == rows
    assert found["tables bytes"] / 2**30 == pytest.approx(gib, abs=0.005)
    assert len(run.model.table_rows) == 26
    assert run.model.dense_parameters == 2_369_921
    assert found["parameters"] == found["table rows"] * 128 + 2_369_921


def test_the_model_has_the_parameters_that_the_formulas_count() -> None:
    run = resolve(
        dataclasses.replace(workloads.named_run("dlrm-small"), data="synthetic"),
        Cluster.parse("cpux1x1"),
    )
    workload = workloads.load("dlrm")
    model = workload.build_model(run)
    assert sum(p.numel() for p in model.parameters()) == run.model.dense_parameters
    assert list(model.tables.store.weight.shape) == [32_709_138, 128]
    assert model.top[0].in_features == 480 == output_width(26, 128)
    import torch

    from trainmark.distributed.mesh import single

    plan = plan_memory(run, workload, single(torch.device("cpu")))
    assert plan.weights == 4 * sizes.sizes(run)["parameters"]
    assert plan.gradients == 4 * 2_369_921
    assert plan.optimizer == 8  # the loss scale and its counter: SGD has no state


@pytest.mark.parametrize("tables", [1, 2, 3, 26, 40])
@pytest.mark.parametrize("dim", [1, 3, 16, 128])
def test_interaction_width_is_the_same_with_and_without_torch(tables: int, dim: int) -> None:
    model = runs.Model(table_rows=(5,) * tables, embedding_dim=dim)
    assert model.interaction_width == output_width(tables, dim)
    assert model.interaction_width % 8 == 0


# --- batches


@pytest.mark.parametrize(
    ("cluster", "override", "micro_batch"),
    [
        ("a100-40gx1x1", None, 65536),
        ("a100-40gx1x8", None, 8192),
        ("a100-40gx2x8", None, 4096),
        ("a100-40gx1x1", 262144, 262144),
        ("a100-40gx1x8", 2097152, 262144),
        ("a100-40gx2x8", 2752512, 172032),
    ],
)
def test_flagperf_cases(cluster: str, override: int | None, micro_batch: int) -> None:
    run = dataclasses.replace(workloads.named_run("dlrm-flagperf"), data="synthetic")
    if override:
        run = dataclasses.replace(run, global_batch=override)
    resolved = resolve(run, Cluster.parse(cluster))
    assert resolved.global_batch == (override or 65536)
    assert (resolved.micro_batch, resolved.accumulate) == (micro_batch, 1)
    assert resolved.eval_batch == micro_batch
    assert (resolved.precision, resolved.target, resolved.compile) == ("fp16", 0.802, True)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"global_batch": 64}, (64, 16, 1)),
        ({"global_batch": 64, "accumulate": 2}, (64, 8, 2)),
        ({"global_batch": 64, "micro_batch": 4}, (64, 4, 4)),
        ({"micro_batch": 4}, (16, 4, 1)),
        ({"micro_batch": 4, "accumulate": 3}, (48, 4, 3)),
        ({"global_batch": 64, "micro_batch": 8, "accumulate": 2}, (64, 8, 2)),
    ],
)
def test_any_two_batch_sizes_give_the_third(
    given: dict[str, int], expected: tuple[int, int, int]
) -> None:
    nothing = {"global_batch": None, "micro_batch": None, "accumulate": None}
    run = dataclasses.replace(
        workloads.named_run("dlrm-small"), data="synthetic", **(nothing | given)
    )
    resolved = resolve(run, Cluster.parse("h100x1x4"))
    assert (resolved.global_batch, resolved.micro_batch, resolved.accumulate) == expected


@pytest.mark.parametrize(
    "given",
    [
        {"global_batch": 63},
        {"global_batch": 64, "accumulate": 3},
        {"global_batch": 64, "micro_batch": 5},
        {"global_batch": 64, "micro_batch": 8, "accumulate": 3},
        {"global_batch": 2},
        {"global_batch": 0},
        {"global_batch": None},
        {"global_batch": None, "accumulate": 2},
    ],
)
def test_batch_sizes_that_cannot_be(given: dict[str, int | None]) -> None:
    run = dataclasses.replace(workloads.named_run("dlrm-small"), data="synthetic", **given)
    with pytest.raises(InputError, match="batch"):
        resolve(run, Cluster.parse("h100x1x4"))


def test_how_many_named_runs_there_are() -> None:
    names = [name for name in workloads.named_runs() if name.startswith("dlrm-")]
    assert len(names) == 10  # dlrm-auto has no published row
    for name in names:
        run = dataclasses.replace(workloads.named_run(name), data="synthetic")
        assert resolve(run, Cluster.parse("cpux1x1")).name == name
