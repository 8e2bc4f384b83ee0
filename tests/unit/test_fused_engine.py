"""The fused engine against the plain one, in all formats; here by its kernels' references."""

import dataclasses
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests import engines, small
from trainmark.cli import main
from trainmark.distributed.mesh import single
from trainmark.embeddings.engine import LocalEngine
from trainmark.embeddings.fused import FusedEngine
from trainmark.embeddings.sharded import ShardedEngine
from trainmark.embeddings.tables.batch import IdGroup
from trainmark.embeddings.tables.formats import Formats
from trainmark.embeddings.tables.update import Sgd, make_rule
from trainmark.kernels.sparse_update import RuleName
from trainmark.workloads.dlrm.model import Dlrm, build_model
from trainmark.workloads.dlrm.parallelize import parallelize
from trainmark.workloads.dlrm.runs import Optimizer, Sharding

ROWS, DIM = (5, 70_000, 3), 8
ON = torch.ones(())
SETTINGS = {"eps": 1e-6, "beta1": 0.9, "beta2": 0.999}
RULES: list[RuleName] = ["sgd", "adagrad", "rowwise_adagrad"]


def groups(seed: int) -> list[IdGroup]:
    random = torch.Generator().manual_seed(seed)
    ids = [torch.randint(0, rows, (engines.SAMPLES,), generator=random) for rows in ROWS]
    small = torch.stack([ids[0], ids[2]]).to(torch.int8)
    return [IdGroup([0, 2], small), IdGroup([1], ids[1].to(torch.int32)[None])]


def fused(formats: tuple[str, ...], rule: RuleName, weight_decay: float = 0.0) -> FusedEngine:
    chosen = make_rule(rule, **SETTINGS, weight_decay=weight_decay)
    return engines.ready(FusedEngine(ROWS, DIM, chosen, Formats(of_tables=formats, seed=1)))


def plain(rule: str, weight_decay: float = 0.0) -> LocalEngine:
    chosen = make_rule(rule, **SETTINGS, weight_decay=weight_decay)
    return engines.ready(LocalEngine(ROWS, DIM, chosen))


train = partial(engines.train, groups=groups, dim=DIM)


def decoded(engine: FusedEngine, table: int) -> Tensor:
    """A table's weights in fp32, whatever its format."""
    tensors = engine.table_weights()
    if f"tables.{table}.weight" in tensors:
        return tensors[f"tables.{table}.weight"].float()
    return tensors[f"tables.{table}.codes"].float() * tensors[f"tables.{table}.scales"][:, None]


@pytest.mark.parametrize("micro_batches", [1, 3])
@pytest.mark.parametrize("rule", RULES)
def test_fp32_is_the_plain_engine(rule: RuleName, micro_batches: int) -> None:
    decay = 0.2 if micro_batches == 3 else 0.0
    ours, theirs = fused(("fp32",) * 3, rule, decay), plain(rule, decay)
    for mine, expected in zip(
        train(ours, steps=range(4), micro_batches=micro_batches),
        train(theirs, steps=range(4), micro_batches=micro_batches),
        strict=True,
    ):
        torch.testing.assert_close(mine, expected, rtol=1e-5, atol=1e-6)
    expected_tensors = theirs.table_weights() | theirs.table_state()
    got = ours.table_weights() | ours.table_state()
    assert got.keys() == expected_tensors.keys()  # any engine can go on with them
    for name, tensor in expected_tensors.items():
        torch.testing.assert_close(got[name], tensor, rtol=1e-5, atol=5e-6)


def test_the_same_features_may_come_in_other_groups() -> None:
    """As of a dataset, by type, and of requests, in one array."""
    engine, random = fused(("fp32",) * 3, "sgd"), torch.Generator().manual_seed(1)
    ids = torch.stack([torch.randint(0, rows, (9,), generator=random) for rows in ROWS])
    ways = ([[0], [1, 2]], [[0, 1, 2]], [[0, 1], [2]], [[2], [0, 1]])
    found = [engine.prepare([IdGroup(f, ids[f]) for f in way], [9]).ids_BF for way in ways]
    assert all(torch.equal(one, found[0]) for one in found[1:])


@pytest.mark.parametrize(
    ("large", "bound"), [("bf16", 0.01), ("fp16", 0.002), ("int8", 0.02), ("fp8", 0.1)]
)
def test_other_formats_are_near(large: str, bound: float) -> None:
    """Within what the format can say; the small tables, in fp32, nearer still."""
    formats = ("fp32", large, "fp32")
    ours, theirs = fused(formats, "sgd"), plain("sgd")
    assert ours.stores[1].weight.dtype != torch.float32
    train(ours, steps=range(4))
    train(theirs, steps=range(4))
    expected = theirs.table_weights()
    touched = torch.cat([groups(step)[1].ids[0] for step in range(4)]).unique().long()
    mine = decoded(ours, 1)[touched]
    true = expected["tables.1.weight"][touched]
    assert (mine - true).norm() <= bound * true.norm()
    small = decoded(ours, 0)
    assert (small - expected["tables.0.weight"]).norm() <= bound * small.norm() / 2


def test_rounding_goes_on_after_a_resumption_as_if_nothing_had_happened() -> None:
    formats = ("fp32", "int8", "int8")
    whole, first, second = (fused(formats, "rowwise_adagrad") for _ in range(3))
    train(whole, steps=range(6))
    train(first, steps=range(3))
    saved = first.table_weights() | first.table_state()
    for name, tensor in (second.table_weights() | second.table_state()).items():
        tensor.copy_(saved[name])
    second.state_loaded()
    train(second, steps=range(3, 6))
    expected = whole.table_weights() | whole.table_state()
    for name, tensor in (second.table_weights() | second.table_state()).items():
        assert torch.equal(tensor, expected[name]), name


@pytest.mark.parametrize(("seed", "expected"), [(1, 2 / 127), (None, 0.0)])
def test_small_updates_need_stochastic_rounding(seed: int | None, expected: float) -> None:
    """One row, moved 200 times by a hundredth of its smallest step."""
    formats = Formats(of_tables=["int8"], seed=seed)
    engine = engines.ready(FusedEngine((1,), DIM, Sgd(), formats))
    store: Any = engine.stores[0]
    store.weight.copy_(torch.tensor([[127] + [0] * (DIM - 1)]))
    store.scales.fill_(1 / 127)
    move = torch.zeros(DIM)
    move[1:] = -0.01 / 127
    for _ in range(200):
        lookup = engine.prepare([IdGroup([0], torch.zeros(1, 1, dtype=torch.int8))], [1])
        engine.begin(lookup)
        engine._gradient_rows = {0: move.clone()}
        engine.apply_gradients(1.0, ON)
    moved = store.weight[0, 1:].float().mean() * store.scales[0]
    assert moved == pytest.approx(expected, rel=0.6)


def test_a_closed_gate_changes_nothing_and_says_why() -> None:
    engine = fused(("fp32", "int8", "fp32"), "rowwise_adagrad")
    train(engine, steps=range(1))
    before = {n: t.clone() for n, t in (engine.table_weights() | engine.table_state()).items()}
    x = torch.ones(40, DIM, requires_grad=True)
    lookup = engine.prepare(groups(1), [40])
    engine.begin(lookup)
    output = engine.lookup_and_interact(lookup, x)
    (output.sum() * torch.inf).backward()
    assert not all(gradient.isfinite().all() for gradient in engine.gradients())
    engine.apply_gradients(0.1, torch.zeros(()))
    for name, tensor in (engine.table_weights() | engine.table_state()).items():
        assert name == "tables.updates" or torch.equal(tensor, before[name])
    assert sum(gradient.sum() for gradient in engine.gradients()) == 0


def test_nothing_is_allocated_before_its_time() -> None:
    """421 GiB of tables on the meta device; at 8 bits they fit a GPU of 141 GB."""
    from trainmark.workloads.dlrm.runs import THRESHOLD_0

    formats = ["int8" if rows > 100_000 else "fp32" for rows in THRESHOLD_0]
    engine = FusedEngine(THRESHOLD_0, 128, Sgd(), Formats(of_tables=formats, seed=1))
    total = sum(
        tensor.numel() * tensor.element_size() for tensor in engine.table_weights().values()
    )
    assert 105 * 2**30 < total < 110 * 2**30


# --- through the command line


def test_a_run_with_8_bit_tables_resumes_exactly(tmp_path: Path) -> None:
    """Codes, scales and the count that rounding goes on from are in the checkpoint."""
    flags: tuple[str, ...] = ("--table-precision", "int8", "--fp32-up-to-rows", "5", "--lr", "0.5")
    flags += ("--optimizer.name", "rowwise_adagrad", "--checkpoint-every", "3 steps")
    assert small.train(tmp_path / "whole", *flags) == 0
    assert small.train(tmp_path / "parts", *flags, "--max-steps", "4") == 0
    assert small.train(tmp_path / "parts", *flags) == 0
    whole, parts = (small.saved(small.newest(tmp_path / name)) for name in ("whole", "parts"))
    assert len(whole["model.tables.0.codes"]) == 50 * 8
    assert len(whole["model.tables.2.weight"]) == 3 * 8 * 4
    assert whole == parts


def test_what_formats_cannot_do_is_said_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    command = "train dlrm-xlarge --data synthetic --dry-run --cluster h200x1x8 --table-precision"
    assert main(f"{command} int8 --optimizer.name adam --fp32-tables 26".split()) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "Adam needs fp32 tables" in said
    assert "table 26 does not exist" in said
    for flags in (
        "--host-tables 0",
        "--column-slice-threshold 1e9",
        "--placement round_robin --data-parallel-threshold 1e9",
    ):
        assert main(f"{command} bf16 {flags}".split()) == 2
        said = " ".join(capsys.readouterr().err.split())
        assert (
            "is stored in bf16: such tables lie whole on one device, or are split by rows" in said
        )
        assert "--fp32-tables" in said


def test_fp8_needs_hardware_that_knows_it(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["plan", "dlrm-small", "--data", "synthetic", "--cluster"]
    for flag in ("--precision", "--table-precision"):
        assert main([*command, "a100-80gx1x1", flag, "fp8"]) == 2
        assert "such as an H100" in " ".join(capsys.readouterr().err.split())
        assert main([*command, "h100x1x1", flag, "fp8"]) == 0


def test_a_run_that_does_not_fit_names_the_format_that_would(
    capsys: pytest.CaptureFixture[str],
) -> None:
    plan = ["plan", "dlrm-xlarge", "--data", "synthetic", "--cluster", "h200x1x1"]
    assert main(plan) == 2
    assert "--table-precision int8" in " ".join(capsys.readouterr().err.split())
    assert main([*plan, "--table-precision", "int8"]) == 0


def test_one_gpu_takes_the_fused_engine_and_what_must_be_exchanged_does_not() -> None:
    """A model on the meta device needs no GPU to be told that it will be on one."""
    gpu = single(torch.device("cuda"))

    def engine(**changes: Any) -> type:
        cfg = small.config(**changes)
        (model,) = parallelize(build_model(cfg), gpu, cfg)
        assert isinstance(model, Dlrm)
        assert model.top.fused_dtype == torch.float32
        return type(model.tables)

    for rule in RULES:
        assert engine(optimizer=Optimizer(name=rule)) is FusedEngine
    assert engine(optimizer=Optimizer(name="adam")) is LocalEngine
    without_tables = dataclasses.replace(small.config().model, table_rows=())
    assert engine(model=without_tables) is LocalEngine
    assert engine(sharding=Sharding(force_exchange=True)) is ShardedEngine
