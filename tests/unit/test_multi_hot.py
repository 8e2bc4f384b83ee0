"""Several ids per feature: trained as plain PyTorch does, in the engines of one device."""

import dataclasses
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits, embedding_bag

from tests import bags, engines, small
from tests.bags import ids_of, jagged, offsets
from tests.small import trainer
from trainmark.config import filled
from trainmark.embeddings.bag_engines import FusedBagEngine, LocalBagEngine
from trainmark.embeddings.mean import MeanEngine
from trainmark.embeddings.tables.batch import IdGroup
from trainmark.embeddings.tables.formats import Formats
from trainmark.embeddings.tables.update import make_rule
from trainmark.errors import InputError
from trainmark.hardware.devices import Cluster
from trainmark.kernels import compiled
from trainmark.kernels.sparse_update import RuleName
from trainmark.kernels.table_formats import FORMATS
from trainmark.workloads import resolve
from trainmark.workloads.dlrm.data import ClickBatch, build_data
from trainmark.workloads.dlrm.multi_hot import MoreIds
from trainmark.workloads.dlrm.runs import MLPERF_HOTNESS, TableFormat, dlrm_dcnv2
from trainmark.workloads.dlrm.sharding import place, plan_devices, profiles, table_costs
from trainmark.workloads.dlrm.step import DlrmTrainer

STEPS = 50


class Plain(nn.Module):
    """The same network of torch's own parts."""

    def __init__(self, built: DlrmTrainer) -> None:
        super().__init__()
        weights = {n: w.detach().clone() for n, w in built.weights().items()}
        self.names = list(weights)
        self.mode = built.cfg.model.pooling
        self.interaction = built.cfg.model.interaction
        self.values = nn.ParameterList(nn.Parameter(weights[name]) for name in self.names)

    def forward(self, batch: ClickBatch) -> Tensor:
        w = dict(zip(self.names, self.values, strict=True))
        x = batch.numerical.float()
        for layer in (0, 2):
            x = torch.relu(x @ w[f"bottom.{layer}.weight"].t() + w[f"bottom.{layer}.bias"])
        vectors = [x]
        for feature, ids_BH in enumerate(ids_of(batch)):
            ids, lengths = jagged(ids_BH)
            table = w[f"tables.{feature}.weight"]
            vectors.append(embedding_bag(ids, table, offsets(lengths), mode=self.mode))
        first = y = torch.cat(vectors, dim=1)
        if self.interaction == "dot":
            stacked = torch.stack(vectors, dim=1)
            dots = stacked @ stacked.transpose(1, 2)
            row, column = torch.tril_indices(4, 4, offset=-1)
            y = torch.cat([x, dots[:, row, column], x.new_zeros(len(x), 2)], dim=1)
        for layer in range(3) if self.interaction == "dcn" else ():
            low = y @ w[f"interaction.cross.{layer}.down.weight"].t()
            up = low @ w[f"interaction.cross.{layer}.up.weight"].t()
            y = first * (up + w[f"interaction.cross.{layer}.up.bias"]) + y
        y = torch.relu(y @ w["top.0.weight"].t() + w["top.0.bias"])
        return (y @ w["top.2.weight"].t() + w["top.2.bias"]).squeeze(1)


OPTIMIZERS: dict[str, Any] = {
    "sgd": torch.optim.SGD,
    "adagrad": lambda p, lr: torch.optim.Adagrad(p, lr, eps=1e-8),
}
CASES = [
    ("dcn", "sum", "adagrad", True),
    ("dcn", "mean", "sgd", True),
    ("dot", "sum", "sgd", False),
    ("dot", "mean", "adagrad", True),
    ("cat", "sum", "adagrad", False),
]


@pytest.mark.parametrize("has_numba", [True, False])
@pytest.mark.parametrize(("interaction", "pooling", "optimizer", "varies"), CASES)
def test_fifty_steps_are_plain_pytorchs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, interaction: str, pooling: str,
    optimizer: str, varies: bool, has_numba: bool,
) -> None:  # fmt: skip
    monkeypatch.setattr(compiled, "INSTALLED", compiled.INSTALLED and has_numba)
    data = bags.write_dataset(tmp_path / "data", varies=varies)
    cfg = bags.run(data, optimizer=optimizer, interaction=interaction, pooling=pooling)
    assert cfg.model.hotness == bags.HOTNESS
    assert cfg.model.varies == varies
    built = trainer(cfg)
    engine = built.model.tables
    assert isinstance(engine, MeanEngine if pooling == "mean" else LocalBagEngine)
    assert_as_plain(built)


def assert_as_plain(built: DlrmTrainer, steps: int = STEPS) -> None:
    plain, cfg = Plain(built), built.cfg
    other = OPTIMIZERS[cfg.optimizer.name](plain.parameters(), cfg.lr)
    batches = list(build_data(cfg, "train", 0, 1))[:steps]
    assert len(batches) == steps
    assert not cfg.model.varies or any((ids < 0).all(1).any() for ids in ids_of(batches[0]))
    for batch in batches:
        other.zero_grad()
        expected = binary_cross_entropy_with_logits(plain(batch), batch.labels.float())
        expected.backward()
        other.step()
        loss, _ = built.step(built.prepare(batch), cfg.lr)
        assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    for name, value in zip(plain.names, plain.values, strict=True):
        found = built.weights()[name]
        torch.testing.assert_close(found, value.detach(), rtol=1e-5, atol=1e-5)


def test_micro_batches_change_nothing_but_rounding(tmp_path: Path) -> None:
    data = bags.write_dataset(tmp_path / "data", rows=640)
    for micro_batch in (64, 16):
        cfg = bags.run(data, interaction="dcn", micro_batch=micro_batch)
        assert_as_plain(trainer(cfg), steps=10)


# --- the fused engine, here by its kernels' references

ROWS, HOT, DIM = (5, 700, 3), (3, 8, 1), 8


def groups(seed: int) -> list[IdGroup]:
    random = torch.Generator().manual_seed(seed)
    ids = [
        torch.randint(-1, rows, (1, engines.SAMPLES, hot), generator=random)
        for rows, hot in zip(ROWS, HOT, strict=True)
    ]
    ids[1][0, 3] = -1
    one = ids[2][:, :, 0].to(torch.int8)
    return [IdGroup([2], one), IdGroup([0], ids[0].short()), IdGroup([1], ids[1].int())]


def fused(formats: tuple[str, ...], rule: RuleName, state: str = "fp32") -> FusedBagEngine:
    chosen = Formats(of_tables=formats, state_dtype=FORMATS[state], seed=1)
    of_rows = make_rule(rule, eps=1e-6, beta1=0.9, beta2=0.999)
    return engines.ready(FusedBagEngine(ROWS, DIM, of_rows, chosen, hotness=HOT))


def local(rule: str) -> LocalBagEngine:
    chosen = make_rule(rule, eps=1e-6, beta1=0.9, beta2=0.999)
    return engines.ready(LocalBagEngine(ROWS, DIM, chosen, HOT))


train = partial(engines.train, groups=groups, steps=range(6), dim=DIM)


@pytest.mark.parametrize("way", ["lookup_beside", "lookup_and_interact"])
@pytest.mark.parametrize("micro_batches", [1, 3])
@pytest.mark.parametrize("rule", ["sgd", "adagrad", "rowwise_adagrad"])
def test_fused_and_plain_engine_agree(rule: RuleName, micro_batches: int, way: str) -> None:
    one, other = fused(("fp32",) * 3, rule), local(rule)
    found, expected = (
        train(engine, micro_batches=micro_batches, way=way) for engine in (one, other)
    )
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=2e-5, atol=2e-5)
    for name, rows in other.table_weights().items():
        torch.testing.assert_close(one.table_weights()[name], rows, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("state", ["fp32", "bf16"])
def test_two_stores_and_16_bits(state: str) -> None:
    """One of the tables in bf16, with its state, stays near fp32, and nothing else changes."""
    one, other = fused(("fp32", "bf16", "fp32"), "adagrad", state), local("adagrad")
    assert one.table_state()["tables.1.sum"].dtype == FORMATS[state]
    assert one.table_state()["tables.0.sum"].dtype == torch.float32
    found, expected = (train(engine, way="lookup_beside") for engine in (one, other))
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0.03)
    assert torch.equal(found[0][:, : 2 * DIM], expected[0][:, : 2 * DIM])


def test_gradients_that_are_not_finite_close_the_gate() -> None:
    engine = fused(("fp32",) * 3, "sgd")
    lookup = engine.prepare(groups(1), [40])
    engine.begin(lookup)
    output = engine.lookup_beside(lookup, torch.zeros(40, DIM, requires_grad=True))
    output.backward(torch.full_like(output, float("inf")))
    assert not engine.gradients()[0].isfinite()


# --- several ids of one, as MLPerf


def test_an_id_always_comes_with_the_same_others() -> None:
    rows = (1000, 40_000_000, 3)
    more = MoreIds((5, 100, 1), rows)
    ids = torch.tensor([[7, 999, 7, 0], [39_999_999, 12, 39_999_999, 0], [2, 1, 2, 0]])
    one, two, three = more.add([IdGroup([0, 1], ids[:2].int()), IdGroup([2], ids[2:].char())])
    assert [g.features for g in (one, two, three)] == [[0], [1], [2]]
    assert three.ids.dtype == torch.int8
    assert three.ids.shape == (1, 4)
    for group, hot in ((one, 5), (two, 100)):
        found, size = group.ids[0], rows[group.features[0]]
        assert found.shape == (4, hot)
        assert torch.equal(found[:, 0].long(), ids[group.features[0]])
        assert torch.equal(found[0], found[2])
        assert not torch.equal(found[0], found[1])
        assert found.min() >= 0
        assert found.max() < size
    # Alone, an id gets what it gets in company.
    (alone,) = more.add([IdGroup([1], ids[1:2, :1].int())])
    assert torch.equal(alone.ids[0, 0], two.ids[0, 0])


def test_the_others_are_uniform() -> None:
    (group,) = MoreIds((9,), (50,)).add([IdGroup([0], torch.arange(50)[None].repeat(1, 1).int())])
    (large,) = MoreIds((3,), (10**6,)).add([IdGroup([0], torch.arange(10**5)[None].int())])
    assert len(group.ids[0, :, 1:].unique()) == 50
    others = large.ids[0, :, 1:].double() / 10**6
    assert others.mean().item() == pytest.approx(0.5, abs=0.005)
    assert others.std().item() == pytest.approx(12**-0.5, abs=0.005)
    assert abs(torch.corrcoef(others.t())[0, 1]) < 0.02


def test_mlperfs_run() -> None:
    """Issue 17, item 3."""
    run = dlrm_dcnv2()
    assert sum(MLPERF_HOTNESS) == 214
    assert len(MLPERF_HOTNESS) == 26
    assert run.model.table_rows == (
        40000000, 39060, 17295, 7424, 20265, 3, 7122, 1543, 63, 40000000, 3067956, 405282, 10,
        2209, 11938, 155, 4, 976, 14, 40000000, 40000000, 40000000, 590152, 12973, 108, 36,
    )  # fmt: skip
    assert (run.lr, run.global_batch, run.target) == (0.005, 65536, 0.80275)
    assert run.optimizer.name == "adagrad"
    assert run.model.embedding_dim == 128
    assert run.model.bottom_mlp == (512, 256, 128)
    assert run.model.top_mlp == (1024, 1024, 512, 256, 1)
    assert (run.model.cross_layers, run.model.cross_rank) == (3, 512)


# --- plans


def test_a_plan_counts_sums_of_16_bits(tmp_path: Path) -> None:
    data = bags.write_dataset(tmp_path / "data", rows=100)
    formats = TableFormat(table_precision="bf16", state_precision="bf16", fp32_up_to_rows=5)
    cfg = bags.run(data, table_format=formats)
    (plan,), held = plan_devices(cfg), trainer(cfg).device_bytes()
    assert plan.weights == held.weights
    assert plan.optimizer == held.optimizer - 4  # the counter of updates, by which they round


def test_parts_of_tables_of_many_ids_send_one_sum_of_a_bag_each() -> None:
    """So to cut such a table by rows costs less than to read narrow slices of them."""
    run = dataclasses.replace(dlrm_dcnv2(), data="synthetic", precision="bf16")
    cfg = resolve(run, Cluster("h200", 1, 8))
    table = place(cfg).tables[20]  # of 100 ids
    assert (table.sharding, len(table.shards)) == ("row_wise", 8)
    costs, profile = table_costs(cfg), profiles(cfg)[20]
    sent = costs.shard(profile, table.shards[3]).sent
    assert sent == pytest.approx(filled(cfg.global_batch) * 128 * 2 * 7 / 8)


# --- what is refused


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"hotness": (2, 1)}, "model.hotness must have a number for each of the 3 tables"),
        ({"hotness": (2, 1, 1)}, "has one id of each feature. .*--multi-hot uniform"),
    ],
)
def test_hotness_that_disagrees_with_the_model(changes: dict[str, Any], words: str) -> None:
    model = dataclasses.replace(small.config().model, **changes)
    with pytest.raises(InputError, match=words):
        small.config(model=model)


def test_hotness_that_disagrees_with_the_data(tmp_path: Path) -> None:
    data = bags.write_dataset(tmp_path / "data")
    with pytest.raises(InputError, match=r"^model\.hotness is 2 1, but .* has 4 1 9\. [^\n]*$"):
        bags.run(data, hotness=(2, 1))
    with pytest.raises(InputError, match=r"has several already\. Use --multi-hot data"):
        bags.run(data, multi_hot="uniform", hotness=(2, 1, 1))
    one_hot = small.write_dataset(tmp_path / "one_hot")
    with pytest.raises(InputError, match=r"model\.hotness is 2 1 1, but .* has 1 of each feature"):
        bags.run(one_hot, hotness=(2, 1, 1))


def test_crosses_are_of_single_ids(tmp_path: Path) -> None:
    """Which is all that is said: the dataset's own hotness is right."""
    data = bags.write_dataset(tmp_path / "data")
    with pytest.raises(InputError, match=r"^model\.crosses are for one id of each feature; "):
        bags.run(data, crosses=("0x1",))


def test_an_id_below_none(tmp_path: Path) -> None:
    data = bags.write_dataset(tmp_path / "data", rows=100)
    path = data / "train/cat_2.bin"
    ids = np.fromfile(path, np.int8).reshape(100, 9)
    ids[41, 5] = -2
    ids.tofile(path)
    with pytest.raises(InputError, match=r"row 41 has id -2; .* ids 0 to 2, or -1 for none,"):
        list(build_data(bags.run(data), "train", 0, 1))
    ids[41, 5] = 3
    ids.tofile(path)
    with pytest.raises(InputError, match="row 41 has id 3"):
        list(build_data(bags.run(data), "train", 0, 1))


def test_state_of_16_bits_needs_tables_that_have_one(tmp_path: Path) -> None:
    formats = TableFormat(state_precision="bf16")
    with pytest.raises(InputError, match="--state-precision is that of Adagrad's sums"):
        small.config(table_format=formats)
