"""DCNv2's cross network, projection and concatenation by their definitions; and what is refused."""

import dataclasses
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from tests import small
from tests.small import CPU, config, trainer
from tests.unit import refusals
from trainmark.embeddings.engine import LocalEngine
from trainmark.workloads.dlrm.data import build_data
from trainmark.workloads.dlrm.flops import dense_activation_bytes, multiply_adds
from trainmark.workloads.dlrm.interactions import CrossLinear
from trainmark.workloads.dlrm.model import Dlrm, build_model, init_weights
from trainmark.workloads.dlrm.runs import DlrmRun, Model, Optimizer
from trainmark.workloads.dlrm.sharding import plan_devices

CASES: dict[str, dict[str, Any]] = {
    "dcn": {"interaction": "dcn", "cross_rank": 5},
    "dcn by default": {"interaction": "dcn"},
    "dcn, full rank": {"interaction": "dcn", "cross_layers": 2, "cross_rank": "full"},
    "projection": {"interaction": "projection", "branch1_mlp": (12, 24), "branch2_mlp": (16,)},
    "projection by default": {"interaction": "projection"},
    "cat": {"interaction": "cat"},
}
Array = NDArray[np.float64]


def run(case: str, **changes: Any) -> DlrmRun:
    sizes = CASES.get(case, {"interaction": case})
    return config(model=dataclasses.replace(small.config().model, **sizes), **changes)


def made(model: Model) -> Dlrm:
    """The network, initialised."""
    cfg = dataclasses.replace(small.config(), model=model)
    built = build_model(cfg)
    init_weights([built], cfg, CPU)
    return built


# --- the definitions


def reference(model: Dlrm, case: str, vectors: list[Array]) -> Array:
    """What the top MLP reads of one sample, in numpy."""
    weights = {n: p.detach().numpy() for n, p in model.interaction.named_parameters()}
    joined, dim = np.concatenate(vectors), len(vectors[0])
    if case == "cat":
        return joined
    if case.startswith("projection"):
        left, right = joined, joined
        for name in (name for name in weights if name.endswith("weight")):
            weight, bias = weights[name], weights[name.replace("weight", "bias")]
            if name.startswith("branch1"):
                left = np.maximum(weight @ left + bias, 0)
            else:
                right = np.maximum(weight @ right + bias, 0)
        # TorchRec's layouts: one branch's vectors are rows, the other's are columns.
        rows, columns = left.reshape(-1, dim), right.reshape(dim, -1)
        products = [
            rows[i] @ columns[:, j] for i in range(len(rows)) for j in range(columns.shape[1])
        ]
        return np.concatenate([vectors[0], np.array(products)])
    x = joined
    for layer in range(2 if "full" in case else 3):
        down = weights.get(f"cross.{layer}.down.weight", np.eye(len(joined)))
        matrix, bias = weights[f"cross.{layer}.up.weight"] @ down, weights[f"cross.{layer}.up.bias"]
        x = np.array([joined[i] * (matrix[i] @ x + bias[i]) + x[i] for i in range(len(x))])
    return x


@pytest.mark.parametrize("tables", [3, 0])
@pytest.mark.parametrize("case", CASES)
def test_the_definition(case: str, tables: int) -> None:
    model = dataclasses.replace(small.config().model, table_rows=(50, 7, 3)[:tables], **CASES[case])
    built = made(model)
    built.double()
    for parameter in built.interaction.parameters():  # a bias that begins with zeros proves nothing
        parameter.data += 0.1 * torch.randn(parameter.shape, dtype=torch.float64)
    x_BD = torch.randn(4, 8, dtype=torch.float64)
    ids_BF = torch.tensor([[0, 50, 57], [49, 56, 59], [3, 51, 58], [3, 52, 57]])[:, :tables]
    found = built.interaction(built.tables, ids_BF, x_BD).detach().numpy()
    assert found.shape == (4, model.interaction_width)
    assert isinstance(built.tables, LocalEngine)
    rows = built.tables.store.weight.numpy()
    for b in range(4):
        vectors = [x_BD[b].numpy(), *(rows[i] for i in ids_BF[b])]
        np.testing.assert_allclose(
            found[b], reference(built, case, vectors), rtol=1e-10, atol=1e-12
        )


@pytest.mark.parametrize("numbers", [5, 0])
@pytest.mark.parametrize("tables", [3, 0])
def test_the_top_mlp_reads_products_rows_and_numbers(tables: int, numbers: int) -> None:
    model = dataclasses.replace(
        small.config().model,
        table_rows=(50, 7, 3)[:tables],
        numerical_features=numbers,
        interaction="dot_and_inputs",
    )
    built = made(model)
    numbers_BN = torch.randn(4, numbers)
    ids_BF = torch.tensor([[0, 50, 57], [49, 56, 59], [3, 51, 58], [3, 52, 57]])[:, :tables]
    read: list[Array] = []
    built.top.register_forward_pre_hook(lambda _, given: read.append(given[0].detach().numpy()))
    built(numbers_BN, ids_BF)
    assert isinstance(built.tables, LocalEngine)
    rows, x_BD = built.tables.store.weight.numpy(), built.bottom(numbers_BN).detach().numpy()
    for b in range(4):
        vectors = [x_BD[b], *(rows[i] for i in ids_BF[b])]
        products = [vectors[i] @ vectors[j] for i in range(len(vectors)) for j in range(i)]
        parts = [x_BD[b], np.array(products), *vectors[1:], numbers_BN[b].numpy()]
        expected = np.concatenate(parts)
        width = -(-len(expected) // 8) * 8
        assert read[0].shape == (4, width) == (4, model.interaction_width)
        np.testing.assert_allclose(
            read[0][b], np.pad(expected, (0, width - len(expected))), rtol=1e-5, atol=1e-6
        )
    # Zeros behind the numbers, as a GPU has them for prediction, change nothing.
    built.bottom.fill_up_inputs(8)
    built(torch.nn.functional.pad(numbers_BN, (0, built.bottom.inputs - numbers)), ids_BF)
    np.testing.assert_allclose(read[1], read[0], rtol=1e-5, atol=1e-6)
    first = built.top[0]
    assert isinstance(first, torch.nn.Linear)
    assert (first.weight[:, len(expected) :] == 0).all()


def test_cross_layers_begin_as_torchrecs_do() -> None:
    """Glorot normal and zeros, whoever initialises the MLPs."""
    model = Model(
        table_rows=(3,) * 26, embedding_dim=32, bottom_mlp=(32,), interaction="dcn", cross_rank=300
    )
    built = made(model)
    matrices = [m for m in built.interaction.modules() if isinstance(m, CrossLinear)]
    assert len(matrices) == 6
    for matrix in matrices:
        sigma = math.sqrt(2 / (27 * 32 + 300))
        assert matrix.weight.std().item() == pytest.approx(sigma, rel=0.01)
        assert matrix.weight.abs().max() > 3.5 * sigma  # a normal one that nothing truncates
        assert matrix.bias is None or not matrix.bias.any()


# --- sizes


def test_mlperfs_network() -> None:
    """DLRM-DCNv2 as MLPerf Training has it: 96 MFLOP a sample (issue 17)."""
    model = Model(interaction="dcn", cross_layers=3, cross_rank=512)
    assert model.interaction_width == 3456
    assert dataclasses.replace(model, cross_rank=None).cross_shape == (3, 512)
    bottom = 13 * 512 + 512 * 256 + 256 * 128
    top = 3456 * 1024 + 1024 * 1024 + 1024 * 512 + 512 * 256 + 256
    cross = 3 * 2 * 3456 * 512
    assert (
        multiply_adds(DlrmRun(name="dlrm-mlperf", model=model))
        == bottom + cross + top
        == 16_030_464
    )
    biases = 512 + 256 + 128 + 3 * 3456 + 1024 + 1024 + 512 + 256 + 1
    assert model.dense_parameters == 16_030_464 + biases


def test_sizes_that_nobody_gave_are_told() -> None:
    """As a resolved run, and so a result, has them."""
    crossed, projected = run("dcn by default").model, run("projection by default").model
    assert (crossed.cross_layers, crossed.cross_rank) == (3, 4 * 8 // 4)
    assert projected.branch1_mlp == projected.branch2_mlp == (2048, 16 * 8)
    assert config().model.cross_rank is None


def test_torchrecs_projection() -> None:
    model = Model(interaction="projection")
    assert model.branches == ((2048, 2048), (2048, 2048))
    assert model.interaction_width == 128 + 16 * 16
    both = 2 * (3456 * 2048 + 2048 * 2048)
    dots = 16 * 16 * 128
    top = 384 * 1024 + 1024 * 1024 + 1024 * 512 + 512 * 256 + 256
    assert multiply_adds(DlrmRun(name="dlrm-mlperf", model=model)) == 170_496 + both + dots + top


@pytest.mark.parametrize("optimizer", ["sgd", "adagrad", "adam"])
@pytest.mark.parametrize("case", CASES)
def test_what_is_planned_is_what_is_held(case: str, optimizer: Any) -> None:
    cfg = run(case, optimizer=Optimizer(name=optimizer))
    built = trainer(cfg)
    batch = next(iter(build_data(cfg, "train", 0, 1)))
    built.step(built.prepare(batch), 0.1)
    (planned,) = plan_devices(cfg)
    held = built.device_bytes()
    assert (planned.weights, planned.optimizer) == (held.weights, held.optimizer)
    parameters = sum(p.numel() for p in built.model.parameters())
    assert parameters == cfg.model.dense_parameters
    assert planned.gradients >= 4 * parameters


@pytest.mark.parametrize("case", CASES)
def test_activations_are_estimated(case: str) -> None:
    """What autograd keeps for the backward pass, and room for gradients."""
    cfg = run(case)
    built = trainer(cfg)
    built.model.bottom.fused_dtype = built.model.top.fused_dtype = None
    dense = {p.untyped_storage().data_ptr() for p in built.model.parameters()}
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in dense:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    batch = built.prepare(next(iter(build_data(cfg, "train", 0, 1))))
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        built.step(batch, 0.1)
    assert sum(kept.values()) < dense_activation_bytes(cfg) < 4 * sum(kept.values())


# --- training


@pytest.mark.parametrize("precision", ["bf16", "fp16", "fp8"])
@pytest.mark.parametrize("case", ["dcn", "projection", "cat", "dot_and_inputs"])
def test_narrower_types_train_nearly_as_fp32(case: str, precision: str) -> None:
    def losses(**changes: Any) -> list[float]:
        cfg = run(case, optimizer=Optimizer(name="sgd"), **changes)
        built = trainer(cfg)
        batches = list(build_data(cfg, "train", 0, 1))
        return [built.step(built.prepare(batch), 0.05)[0].item() for batch in batches]

    scaled = {"loss_scale": 64.0} if precision == "fp16" else {}
    narrow = losses(precision=precision, **scaled)
    assert narrow == pytest.approx(losses(), rel=5e-3)


def test_the_dot_interaction_is_the_default() -> None:
    assert Model().interaction == "dot"
    assert not list(trainer(config()).model.interaction.parameters())


# --- bad input


@pytest.mark.parametrize(
    ("flags", "parts"),
    [
        (["--model.cross-rank", "4"], ["model.cross_rank is for --model.interaction dcn", "dot"]),
        (["--model.cross-layers", "2", "--model.interaction", "cat"], ["cross_layers", "cat"]),
        (["--model.branch1-mlp", "8", "--model.interaction", "dcn"], ["branch1_mlp", "projection"]),
        (["--model.interaction", "dcn", "--model.cross-rank", "33"],
         ["must not exceed the width of the cross network, 32 (3 tables", "Received: 33"]),
        (["--model.interaction", "dcn", "--model.cross-rank", "0"], ["cross_rank", "at least 1"]),
        (["--model.interaction", "dcn", "--model.cross-rank", "half"], ["--model.cross-rank"]),
        (["--model.interaction", "dcn", "--model.cross-layers", "0"], ["cross_layers", "at least"]),
        (["--model.interaction", "projection", "--model.branch2-mlp", "16", "12"],
         ["The last width of model.branch2_mlp must be a multiple of model.embedding_dim (8)"]),
        (["--model.interaction", "projection", "--model.branch1-mlp", "0"], ["branch1_mlp"]),
        (["--model.interaction", "crossnet"], ["--model.interaction", "crossnet"]),
        (["--model.interaction", "dcn", "--model.cross-rank", "full", "--model.cross-layers",
          "10000", "--model.embedding-dim", "16777216", "--model.bottom-mlp", "16777216"],
         ["parameters"]),
    ],
)  # fmt: skip
def test_refused_before_anything_is_allocated(
    flags: list[str], parts: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    refusals.refused(capsys, refusals.small(*flags, output=tmp_path / "run"), *parts)
    assert not (tmp_path / "run").exists()
