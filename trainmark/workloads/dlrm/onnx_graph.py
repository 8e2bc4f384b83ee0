"""DLRM as an ONNX graph: the network of `standalone.py`, operator by operator.

Tables stay in the types they were trained in: what is looked up is decoded, never a table.

Shapes: B samples, N numerical features, F tables, V = F + 1 vectors, D width of a row, R rows.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from onnx import TensorProto, ValueInfoProto, helper
from torch import Tensor

from trainmark.interop.onnx_files import Graph
from trainmark.workloads.dlrm import standalone

BATCH = "batch"
Config = Mapping[str, Any]
Tensors = Mapping[str, Tensor]


def build(config: Config, tensors: Tensors) -> Graph:
    """The graph from `numerical` and `categorical` to `clicks`.

    Args:
        config: as `description.description` gives it.
        tensors: every weight by its name, on the meta device.
    """
    graph = Graph()
    tables = range(len(config["table_rows"]))
    x_BD = _perceptron(graph, config, tensors, "bottom", "numerical")
    x_B1D = graph.add("Unsqueeze", x_BD, graph.constant([1]))
    if "pooling" in config:
        rows_B1D = [_pooled(graph, config, tensors, table) for table in tables]
    else:
        rows_B1D = [_filled_up(graph, config, tensors, table) for table in tables]
    vectors_BVD = graph.add("Concat", x_B1D, *rows_B1D, axis=1)
    joined = _INTERACTIONS[config["interaction"]](graph, config, tensors, x_BD, vectors_BVD)
    logits_B1 = _perceptron(graph, config, tensors, "top", joined)
    logits_B = graph.add("Squeeze", logits_B1, graph.constant([1]))
    if offset := config["logit_offset"]:
        logits_B = graph.add("Add", logits_B, graph.constant(torch.tensor(offset)))
    graph.add("Sigmoid", logits_B, output="clicks")
    return graph


def inputs(config: Config) -> list[ValueInfoProto]:
    widths = config["numerical_features"], standalone.num_ids(config)
    return [
        helper.make_tensor_value_info("numerical", TensorProto.FLOAT, [BATCH, widths[0]]),
        helper.make_tensor_value_info("categorical", TensorProto.INT64, [BATCH, widths[1]]),
    ]


def outputs() -> list[ValueInfoProto]:
    return [helper.make_tensor_value_info("clicks", TensorProto.FLOAT, [BATCH])]


def _perceptron(graph: Graph, config: Config, tensors: Tensors, mlp: str, x: str) -> str:
    """Linear layers with ReLUs between them, and behind the last one where the MLP has it."""
    layers = len(config[f"{mlp.removeprefix('interaction.')}_mlp"])
    last_relu = config["bottom_output"] == "relu" if mlp == "bottom" else mlp != "top"
    for layer in range(layers):
        x = _linear(graph, tensors, f"{mlp}.{2 * layer}", x)
        if last_relu or layer < layers - 1:
            x = graph.add("Relu", x)
    return x


def _linear(graph: Graph, tensors: Tensors, name: str, x: str) -> str:
    names = [f"{name}.{kind}" for kind in ("weight", "bias") if f"{name}.{kind}" in tensors]
    return graph.add("Gemm", x, *(graph.weight(n, tensors[n]) for n in names), transB=1)


# --- interactions: from the bottom MLP's output and all vectors to what the top MLP reads


def _dot(graph: Graph, config: Config, tensors: Tensors, x_BD: str, vectors_BVD: str) -> str:
    V = len(config["table_rows"]) + 1
    vectors_BDV = graph.add("Transpose", vectors_BVD, perm=[0, 2, 1])
    dots_BVV = graph.add("MatMul", vectors_BVD, vectors_BDV)
    high, low = torch.tril_indices(V, V, offset=-1)
    of_pairs = graph.constant(high * V + low)
    pairs = graph.add("Gather", _flat(graph, dots_BVV, V * V), of_pairs, axis=1)
    parts, width = [x_BD, pairs], config["embedding_dim"] + len(high)
    if config["interaction"] == "dot_and_inputs":
        rows_BFD = graph.add("Slice", vectors_BVD, *map(graph.constant, ([1], [V], [1])))
        width_of_rows = (V - 1) * config["embedding_dim"]
        parts += [_flat(graph, rows_BFD, width_of_rows), "numerical"]
        width += width_of_rows + config["numerical_features"]
    joined = graph.add("Concat", *parts, axis=1)
    # The first layer was trained on an interaction that is filled up with zeros.
    zeros = tensors["top.0.weight"].shape[1] - width
    return graph.add("Pad", joined, graph.constant([0, 0, 0, zeros])) if zeros else joined


def _cat(graph: Graph, config: Config, tensors: Tensors, x_BD: str, vectors_BVD: str) -> str:
    return _flat_vectors(graph, config, vectors_BVD)


def _dcn(graph: Graph, config: Config, tensors: Tensors, x_BD: str, vectors_BVD: str) -> str:
    first = x = _flat_vectors(graph, config, vectors_BVD)
    for layer in range(config["cross_layers"]):
        name = f"interaction.cross.{layer}"
        full_rank = f"{name}.down.weight" not in tensors
        y = x if full_rank else _linear(graph, tensors, f"{name}.down", x)
        y = _linear(graph, tensors, f"{name}.up", y)
        x = graph.add("Add", graph.add("Mul", first, y), x)
    return x


def _projection(graph: Graph, config: Config, tensors: Tensors, x_BD: str, vectors_BVD: str) -> str:
    dim, vectors = config["embedding_dim"], _flat_vectors(graph, config, vectors_BVD)
    left, right = (
        _perceptron(graph, config, tensors, f"interaction.{branch}", vectors)
        for branch in ("branch1", "branch2")
    )
    P, Q = (config[f"{branch}_mlp"][-1] // dim for branch in ("branch1", "branch2"))
    left_BPD = graph.add("Reshape", left, graph.constant([0, P, dim]))
    right_BDQ = graph.add("Reshape", right, graph.constant([0, dim, Q]))
    products = _flat(graph, graph.add("MatMul", left_BPD, right_BDQ), P * Q)
    return graph.add("Concat", x_BD, products, axis=1)


def _flat_vectors(graph: Graph, config: Config, vectors_BVD: str) -> str:
    return _flat(graph, vectors_BVD, (len(config["table_rows"]) + 1) * config["embedding_dim"])


def _flat(graph: Graph, x: str, width: int) -> str:
    """All of a sample side by side. Not -1 for the width: of an empty batch it cannot be told."""
    return graph.add("Reshape", x, graph.constant([0, width]))


_INTERACTIONS = {
    "dot": _dot, "dot_and_inputs": _dot, "cat": _cat, "dcn": _dcn, "projection": _projection,
}  # fmt: skip


# --- tables


def _filled_up(graph: Graph, config: Config, tensors: Tensors, table: int) -> str:
    """[B, 1, D] fp32 rows of a table, zeros behind those of a narrower one."""
    feature = table - standalone.num_ids(config)
    ids_B1 = _crossed(graph, config, table, config["crosses"][feature]) if feature >= 0 else None
    rows = _rows(graph, tensors, table, ids_B1)
    lacking = config["embedding_dim"] - config["table_widths"][table]
    zeros = graph.constant([0, 0, 0, 0, 0, lacking])
    return graph.add("Pad", rows, zeros) if lacking else rows


def _crossed(graph: Graph, config: Config, table: int, cross: Sequence[int]) -> str:
    """[B, 1] ids of a combination of features."""
    rows = graph.constant([config["table_rows"][table]])
    multiplier = graph.constant([standalone.MULTIPLIER])
    columns = [graph.add("Gather", "categorical", graph.constant([f]), axis=1) for f in cross]
    mixed = graph.add("Mod", columns[0], rows)
    for column in columns[1:]:
        sum_B1 = graph.add("Add", graph.add("Mul", mixed, multiplier), column)
        mixed = graph.add("Mod", sum_B1, rows)
    return mixed


def _pooled(graph: Graph, config: Config, tensors: Tensors, table: int) -> str:
    """[B, 1, D] the sum, or mean, of the rows of several ids, of which -1 is none."""
    first = sum(config["hotness"][:table])
    columns = list(range(first, first + config["hotness"][table]))
    ids_BH = graph.add("Gather", "categorical", graph.constant(columns), axis=1)
    is_none = graph.add("Less", ids_BH, graph.constant(torch.tensor(0)))
    there_BH = _as_fp32(graph, graph.add("Not", is_none))
    rows_BHD = _rows(graph, tensors, table, graph.add("Max", ids_BH, graph.constant([0])))
    one = graph.constant([1])
    there_B1H = graph.add("Unsqueeze", there_BH, one)
    sums_B1D = graph.add("MatMul", there_B1H, rows_BHD)
    if config["pooling"] == "sum":
        return sums_B1D
    counts_B11 = graph.add("ReduceSum", there_B1H, graph.constant([2]), keepdims=1)
    return graph.add("Div", sums_B1D, graph.add("Max", counts_B11, graph.constant(torch.ones(1))))


def _rows(graph: Graph, tensors: Tensors, table: int, ids_B1: str | None = None) -> str:
    """[B, 1, width] fp32 rows of a table: those of its column, or of as many ids as are given."""
    name = f"tables.{table}"
    if ids_B1 is None:
        ids_B1 = graph.add("Gather", "categorical", graph.constant([table]), axis=1)
    if f"{name}.weight" in tensors:
        weights_RD = tensors[f"{name}.weight"]
        rows = graph.add("Gather", graph.weight(f"{name}.weight", weights_RD), ids_B1)
        return rows if weights_RD.dtype == torch.float32 else _as_fp32(graph, rows)
    codes_RD, scales_R = tensors[f"{name}.codes"], tensors[f"{name}.scales"]
    codes = graph.add("Gather", graph.weight(f"{name}.codes", codes_RD), ids_B1)
    if codes_RD.dtype == torch.float8_e4m3fn:
        bytes_as_ids = graph.add("Cast", codes, to=TensorProto.INT32)
        values = graph.add("Gather", graph.constant(_fp8_values()), bytes_as_ids)
    else:
        values = _as_fp32(graph, codes)
    # As a column, so that the scales of [B, 1] ids have the rank of the rows.
    scales = graph.add("Gather", graph.weight(f"{name}.scales", scales_R[:, None]), ids_B1)
    return graph.add("Mul", values, scales)


def _as_fp32(graph: Graph, x: str) -> str:
    return graph.add("Cast", x, to=TensorProto.FLOAT)


def _fp8_values() -> Tensor:
    """The number that each of the 256 bytes stands for."""
    return torch.arange(256).to(torch.uint8).view(torch.float8_e4m3fn).float()
