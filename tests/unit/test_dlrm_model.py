"""DLRM against an independent implementation, sample by sample in float64."""

import dataclasses
import itertools
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tests.small import CPU, config, trainer
from trainmark.embeddings.engine import LocalEngine
from trainmark.embeddings.tables.store import INIT_BLOCK_ROWS, TablePart, TableStore
from trainmark.embeddings.tables.update import Sgd
from trainmark.kernels.interaction import dot_interaction, output_width
from trainmark.workloads.dlrm.model import Dlrm, build_model, init_weights
from trainmark.workloads.dlrm.runs import DlrmRun, Model


def table_of(model: Dlrm) -> torch.Tensor:
    """The weights of all tables, one below the other."""
    assert isinstance(model.tables, LocalEngine)
    return model.tables.store.weight


def build(**changes: Any) -> tuple[Dlrm, DlrmRun]:
    """A model with weights, in float64."""
    cfg = config()
    cfg = dataclasses.replace(cfg, model=dataclasses.replace(cfg.model, **changes))
    model = build_model(cfg)
    init_weights([model], cfg, CPU)
    return model.double(), cfg


def sized(numericals: int, tables: int, dim: int, output: str) -> tuple[Dlrm, DlrmRun]:
    return build(
        numerical_features=numericals,
        table_rows=tuple(3 + 2 * i for i in range(tables)),
        embedding_dim=dim,
        bottom_mlp=(5, dim),
        bottom_output=output,
    )


def inputs(cfg: DlrmRun, batch: int) -> tuple[Tensor, Tensor]:
    random = np.random.default_rng(5)
    numerical = torch.from_numpy(random.standard_normal((batch, cfg.model.numerical_features)))
    starts = itertools.accumulate(cfg.model.table_rows, initial=0)
    columns = [
        start + random.integers(0, rows, batch)
        for start, rows in zip(starts, cfg.model.table_rows, strict=False)
    ]
    return numerical, torch.from_numpy(np.stack(columns, axis=1))


def reference_logit(model: Dlrm, x: np.ndarray, ids: np.ndarray) -> float:
    """One sample through the published definition, in numpy."""

    def linear(name: str, vector: np.ndarray) -> np.ndarray:
        weight, bias = weights[f"{name}.weight"], weights[f"{name}.bias"]
        return weight @ vector + bias

    weights = {name: p.detach().numpy() for name, p in model.named_parameters()}
    x = linear("bottom.2", np.maximum(linear("bottom.0", x), 0))
    x = np.maximum(x, 0) if model.shape.bottom_output == "relu" else x
    vectors = [x, *(table_of(model)[i].numpy() for i in ids)]
    dots = [vectors[i] @ vectors[j] for i in range(len(vectors)) for j in range(i)]
    joined = np.concatenate([x, np.array(dots)])
    joined = np.concatenate([joined, np.zeros(-len(joined) % 8)])
    last = (len(model.top) + 1) // 2 - 1
    for layer in range(last):
        joined = np.maximum(linear(f"top.{2 * layer}", joined), 0)
    return float(linear(f"top.{2 * last}", joined)[0])


SHAPES = [
    (13, 3, 8, "relu"), (0, 1, 1, "relu"), (0, 40, 3, "relu"), (5, 1, 16, "relu"),
    (1, 2, 3, "relu"), (13, 40, 1, "relu"), (13, 3, 8, "linear"), (0, 2, 3, "linear"),
]  # fmt: skip


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(("numericals", "tables", "dim", "output"), SHAPES)
def test_forward_matches_the_definition(
    numericals: int, tables: int, dim: int, output: str
) -> None:
    model, cfg = sized(numericals, tables, dim, output)
    numerical, ids = inputs(cfg, 6)
    found = model(numerical, ids).detach().numpy()
    expected = [
        reference_logit(model, x, i) for x, i in zip(numerical.numpy(), ids.numpy(), strict=True)
    ]
    np.testing.assert_allclose(found, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("numericals", "tables", "dim", "output"), SHAPES)
def test_gradients_match_finite_differences(
    numericals: int, tables: int, dim: int, output: str
) -> None:
    model, cfg = sized(numericals, tables, dim, output)
    numerical, ids = inputs(cfg, 4)
    model(numerical, ids).sum().backward()
    (rows_gradient,) = model.tables.gradients()

    def output_change(tensor: Tensor, place: tuple[int, ...]) -> float:
        step, kept = 1e-6, tensor[place].item()
        values = []
        with torch.no_grad():
            for moved in (kept + step, kept - step):
                tensor[place] = moved
                values.append(model(numerical, ids).sum().item())
            tensor[place] = kept
        return (values[0] - values[1]) / (2 * step)

    random = np.random.default_rng(0)
    for name, parameter in model.named_parameters():
        if parameter.numel() == 0:
            continue
        place = tuple(int(random.integers(size)) for size in parameter.shape)
        assert parameter.grad is not None
        expected = output_change(parameter.data, place)
        assert parameter.grad[place].item() == pytest.approx(expected, rel=1e-5, abs=1e-7), name
    # A table's row collects the gradients of every sample that looked it up.
    for row in {int(ids[0, 0]), int(ids[1, -1])}:
        summed = rows_gradient[ids == row].sum(0)
        for column in range(dim):
            expected = output_change(table_of(model), (row, column))
            assert summed[column].item() == pytest.approx(expected, rel=1e-5, abs=1e-7)


# --- interaction


def test_interaction_layout() -> None:
    x = torch.tensor([[1.0, 2.0]])
    rows = torch.tensor([[[3.0, 5.0], [7.0, 11.0]]])
    # [x, row 0 . x, row 1 . x, row 1 . row 0, zeros to a multiple of 8]
    expected = [[1.0, 2.0, 13.0, 29.0, 76.0, 0.0, 0.0, 0.0]]
    assert dot_interaction(x, rows).tolist() == expected


@pytest.mark.parametrize(("tables", "dim"), [(1, 1), (3, 8), (26, 128), (40, 3)])
def test_interaction_pads_with_zeros(tables: int, dim: int) -> None:
    random = torch.Generator().manual_seed(0)
    x = torch.randn(2, dim, generator=random)
    rows = torch.randn(2, tables, dim, generator=random)
    found = dot_interaction(x, rows)
    used = dim + tables * (tables + 1) // 2
    assert found.shape == (2, output_width(tables, dim))
    assert (found[:, :used] != 0).all()
    assert (found[:, used:] == 0).all()


# --- initial values


@pytest.mark.parametrize("init", ["nvidia_tf2", "nvidia_pytorch", "torchrec"])
def test_initial_distributions(init: str) -> None:
    model, _ = build(
        init=init, embedding_dim=64, bottom_mlp=(400, 64), top_mlp=(300, 1), numerical_features=500
    )
    first = model.bottom[0]
    assert isinstance(first, nn.Linear)
    weight, bias = first.weight.detach(), first.bias.detach()
    fan_in, fan_out = 500, 400
    if init == "torchrec":
        bound = fan_in**-0.5
        assert weight.abs().max() <= bound
        assert weight.std().item() == pytest.approx(bound / 3**0.5, rel=0.01)
        assert bias.abs().max() <= bound
        assert bias.std().item() == pytest.approx(bound / 3**0.5, rel=0.1)
    else:
        sigma = (2 / (fan_in + fan_out)) ** 0.5
        assert weight.mean().item() == pytest.approx(0, abs=sigma / 50)
        assert weight.std().item() == pytest.approx(sigma, rel=0.01)
        assert bias.std().item() == pytest.approx(fan_out**-0.5, rel=0.15)
        # Keras truncates at two (wider) sigma, a plain normal does not.
        limit = 2 * sigma / 0.87962566103423978
        assert (weight.abs().max() <= limit).item() == (init == "nvidia_tf2")
    last = model.top[-1]
    assert isinstance(last, nn.Linear)
    output = last.weight.detach()
    if init == "nvidia_tf2":
        assert output.std().item() == pytest.approx((2 / 301) ** 0.5, rel=0.15)
    else:
        assert output.abs().max() <= 300**-0.5
        assert output.std().item() == pytest.approx((300 * 3) ** -0.5, rel=0.15)


@pytest.mark.parametrize("init", ["nvidia_tf2", "nvidia_pytorch", "torchrec"])
def test_columns_for_the_padding_are_zero_and_stay_so(init: Any) -> None:
    cfg = config()
    cfg = dataclasses.replace(cfg, model=dataclasses.replace(cfg.model, init=init))
    built = trainer(cfg)
    used = 8 + 6
    first = built.model.top[0].weight
    assert isinstance(first, torch.Tensor)
    assert first.shape[1] == 16
    assert (first[:, :used] != 0).all()
    assert (first[:, used:] == 0).all()
    from trainmark.workloads.dlrm.data import build_data

    for batch in itertools.islice(build_data(cfg, "train", 0, 1), 3):
        built.step(built.prepare(batch), 0.1)
    assert (first[:, used:] == 0).all()


def test_tables_are_uniform_within_sqrt_of_rows() -> None:
    model, _ = build(table_rows=(10_000, 4), embedding_dim=16, bottom_mlp=(16,))
    large, small = table_of(model)[:10_000], table_of(model)[10_000:]
    assert large.abs().max() <= 0.01
    assert large.std().item() == pytest.approx(0.01 / 3**0.5, rel=0.01)
    assert 0.1 < small.abs().max() <= 0.5


def test_values_do_not_depend_on_what_else_a_store_holds() -> None:
    """Any rectangle of a table has the values that it has in the whole table."""
    shape = (INIT_BLOCK_ROWS + 9, 6)

    def values(*parts: tuple[str, tuple[int, int], tuple[int, int]]) -> list[Tensor]:
        held = [TablePart(name=n, shape=shape, rows=r, columns=c) for n, r, c in parts]
        store = TableStore(held, held[0].width, Sgd()).to_empty(device=CPU)
        store.init_weights(7)
        return [rows for _, _, rows in store.part_weights()]

    everything = ((0, shape[0]), (0, 6))
    one, two = values(("one", *everything), ("two", *everything))
    assert not torch.equal(one, two)
    assert not torch.equal(two[:9], two[INIT_BLOCK_ROWS:])
    for rows in [(0, 5), (3, 11), (7, INIT_BLOCK_ROWS), (INIT_BLOCK_ROWS - 2, shape[0])]:
        for columns in [(0, 6), (2, 5)]:
            got = values(("two", rows, columns), ("one", rows, columns))
            assert torch.equal(got[0], two[slice(*rows), slice(*columns)])
            assert torch.equal(got[1], one[slice(*rows), slice(*columns)])


def test_seeds_give_other_values_and_the_same_seed_the_same() -> None:
    first, again, other = (trainer(config(seed=seed)).weights() for seed in (0, 0, 1))
    for name, tensor in first.items():
        assert torch.equal(tensor, again[name])
        assert not torch.equal(tensor, other[name])


def test_the_model_is_built_without_memory() -> None:
    cfg = config()
    huge = Model(table_rows=(10**12,), embedding_dim=8, bottom_mlp=(8,), top_mlp=(1,))
    model = build_model(dataclasses.replace(cfg, model=huge))
    assert table_of(model).is_meta
    assert all(p.is_meta for p in model.parameters())
