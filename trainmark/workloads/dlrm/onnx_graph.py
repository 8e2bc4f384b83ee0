"""DLRM as an ONNX graph: the network of `standalone.py`, operator by operator.

Tables stay in the types they were trained in: what is looked up is decoded, never a table.

Shapes: B samples, N numerical features, F tables, V = F + 1 vectors, D width of a row, R rows.
"""

from collections.abc import Mapping
from typing import Any

import torch
from onnx import TensorProto, ValueInfoProto, helper
from torch import Tensor

from trainmark.interop.onnx_files import Graph

BATCH = "batch"


def build(config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Graph:
    """The graph from `numerical` and `categorical` to `clicks`.

    Args:
        config: as `export.description` gives it.
        tensors: every weight by its name, on the meta device.
    """
    graph = Graph()
    tables = len(config["table_rows"])
    x_BD = _perceptron(graph, config, tensors, "bottom", "numerical")
    x_B1D = graph.add("Unsqueeze", x_BD, graph.constant([1]))
    rows_B1D = [_filled_up(graph, config, tensors, table) for table in range(tables)]
    vectors_BVD = graph.add("Concat", x_B1D, *rows_B1D, axis=1)
    vectors_BDV = graph.add("Transpose", vectors_BVD, perm=[0, 2, 1])
    dots_BVV = graph.add("MatMul", vectors_BVD, vectors_BDV)
    # Not -1 for the width: of a batch of no rows it cannot be told.
    dots = graph.add("Reshape", dots_BVV, graph.constant([0, (tables + 1) ** 2]))
    high, low = torch.tril_indices(tables + 1, tables + 1, offset=-1)
    pairs = graph.add("Gather", dots, graph.constant(high * (tables + 1) + low), axis=1)
    joined = graph.add("Concat", x_BD, pairs, axis=1)
    # The first layer was trained on an interaction that is filled up with zeros.
    width = config["embedding_dim"] + len(high)
    zeros = tensors["top.0.weight"].shape[1] - width
    padded = graph.add("Pad", joined, graph.constant([0, 0, 0, zeros])) if zeros else joined
    logits_B1 = _perceptron(graph, config, tensors, "top", padded)
    logits_B = graph.add("Squeeze", logits_B1, graph.constant([1]))
    if offset := config["logit_offset"]:
        logits_B = graph.add("Add", logits_B, graph.constant(torch.tensor(offset)))
    graph.add("Sigmoid", logits_B, output="clicks")
    return graph


def inputs(config: Mapping[str, Any]) -> list[ValueInfoProto]:
    widths = config["numerical_features"], len(config["table_rows"])
    return [
        helper.make_tensor_value_info("numerical", TensorProto.FLOAT, [BATCH, widths[0]]),
        helper.make_tensor_value_info("categorical", TensorProto.INT64, [BATCH, widths[1]]),
    ]


def outputs() -> list[ValueInfoProto]:
    return [helper.make_tensor_value_info("clicks", TensorProto.FLOAT, [BATCH])]


def _perceptron(
    graph: Graph, config: Mapping[str, Any], tensors: Mapping[str, Tensor], mlp: str, x: str
) -> str:
    """Linear layers with ReLUs between them; the bottom one ends with a ReLU as well."""
    layers = len(config[f"{mlp}_mlp"])
    for layer in range(layers):
        names = [f"{mlp}.{2 * layer}.{kind}" for kind in ("weight", "bias")]
        x = graph.add("Gemm", x, *(graph.weight(name, tensors[name]) for name in names), transB=1)
        if mlp == "bottom" or layer < layers - 1:
            x = graph.add("Relu", x)
    return x


def _filled_up(
    graph: Graph, config: Mapping[str, Any], tensors: Mapping[str, Tensor], table: int
) -> str:
    """[B, 1, D] fp32 rows of a table, zeros behind those of a narrower one."""
    rows = _rows(graph, tensors, table)
    lacking = config["embedding_dim"] - config["table_widths"][table]
    zeros = graph.constant([0, 0, 0, 0, 0, lacking])
    return graph.add("Pad", rows, zeros) if lacking else rows


def _rows(graph: Graph, tensors: Mapping[str, Tensor], table: int) -> str:
    """[B, 1, width] fp32 rows of a table."""
    name = f"tables.{table}"
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
