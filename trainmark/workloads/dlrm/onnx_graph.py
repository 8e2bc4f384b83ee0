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
    graph = _Network(config, tensors)
    graph.predict()
    return graph


def inputs(config: Config) -> list[ValueInfoProto]:
    widths = config["numerical_features"], standalone.num_ids(config)
    return [
        helper.make_tensor_value_info("numerical", TensorProto.FLOAT, [BATCH, widths[0]]),
        helper.make_tensor_value_info("categorical", TensorProto.INT64, [BATCH, widths[1]]),
    ]


def outputs() -> list[ValueInfoProto]:
    return [helper.make_tensor_value_info("clicks", TensorProto.FLOAT, [BATCH])]


class _Network(Graph):
    """A DLRM as it is put together."""

    def __init__(self, config: Config, tensors: Tensors) -> None:
        super().__init__()
        self._config, self._tensors = config, tensors
        self._num_tables, self._dim = len(config["table_rows"]), config["embedding_dim"]

    def predict(self) -> None:
        config, tables = self._config, range(self._num_tables)
        x_BD = self._perceptron("bottom", "numerical")
        x_B1D = self.add("Unsqueeze", x_BD, self.constant([1]))
        rows_of = self._pooled if "pooling" in config else self._filled_up
        rows_B1D = [rows_of(table) for table in tables]
        vectors_BVD = self.add("Concat", x_B1D, *rows_B1D, axis=1)
        interactions = {
            "dot": self._dot,
            "dot_and_inputs": self._dot,
            "cat": lambda x_BD, vectors_BVD: self._flat_vectors(vectors_BVD),
            "dcn": self._dcn,
            "projection": self._projection,
        }
        joined = interactions[config["interaction"]](x_BD, vectors_BVD)
        logits_B1 = self._perceptron("top", joined)
        logits_B = self.add("Squeeze", logits_B1, self.constant([1]))
        if offset := config["logit_offset"]:
            logits_B = self.add("Add", logits_B, self.constant(torch.tensor(offset)))
        self.add("Sigmoid", logits_B, output="clicks")

    def _perceptron(self, mlp: str, x: str) -> str:
        """Linear layers with ReLUs between them, and behind the last one where the MLP has it."""
        layers = len(self._config[f"{mlp.removeprefix('interaction.')}_mlp"])
        last_relu = self._config["bottom_output"] == "relu" if mlp == "bottom" else mlp != "top"
        for layer in range(layers):
            x = self._linear(f"{mlp}.{2 * layer}", x)
            if last_relu or layer < layers - 1:
                x = self.add("Relu", x)
        return x

    def _linear(self, name: str, x: str) -> str:
        names = [f"{name}.{kind}" for kind in ("weight", "bias")]
        given = [self.weight(n, self._tensors[n]) for n in names if n in self._tensors]
        return self.add("Gemm", x, *given, transB=1)

    # --- interactions: from the bottom MLP's output and all vectors to what the top MLP reads

    def _dot(self, x_BD: str, vectors_BVD: str) -> str:
        V = self._num_tables + 1
        vectors_BDV = self.add("Transpose", vectors_BVD, perm=[0, 2, 1])
        dots_BVV = self.add("MatMul", vectors_BVD, vectors_BDV)
        high, low = torch.tril_indices(V, V, offset=-1)
        of_pairs = self.constant(high * V + low)
        pairs = self.add("Gather", self._flat(dots_BVV, V * V), of_pairs, axis=1)
        parts, width = [x_BD, pairs], self._dim + len(high)
        if self._config["interaction"] == "dot_and_inputs":
            rows_BFD = self.add("Slice", vectors_BVD, *map(self.constant, ([1], [V], [1])))
            width_of_rows = (V - 1) * self._dim
            parts += [self._flat(rows_BFD, width_of_rows), "numerical"]
            width += width_of_rows + self._config["numerical_features"]
        joined = self.add("Concat", *parts, axis=1)
        # The first layer was trained on an interaction that is filled up with zeros.
        zeros = self._tensors["top.0.weight"].shape[1] - width
        return self.add("Pad", joined, self.constant([0, 0, 0, zeros])) if zeros else joined

    def _dcn(self, x_BD: str, vectors_BVD: str) -> str:
        first = x = self._flat_vectors(vectors_BVD)
        for layer in range(self._config["cross_layers"]):
            name = f"interaction.cross.{layer}"
            full_rank = f"{name}.down.weight" not in self._tensors
            y = x if full_rank else self._linear(f"{name}.down", x)
            y = self._linear(f"{name}.up", y)
            x = self.add("Add", self.add("Mul", first, y), x)
        return x

    def _projection(self, x_BD: str, vectors_BVD: str) -> str:
        branches, dim, vectors = ("branch1", "branch2"), self._dim, self._flat_vectors(vectors_BVD)
        left, right = (self._perceptron(f"interaction.{branch}", vectors) for branch in branches)
        P, Q = (self._config[f"{branch}_mlp"][-1] // dim for branch in branches)
        left_BPD = self.add("Reshape", left, self.constant([0, P, dim]))
        right_BDQ = self.add("Reshape", right, self.constant([0, dim, Q]))
        products = self._flat(self.add("MatMul", left_BPD, right_BDQ), P * Q)
        return self.add("Concat", x_BD, products, axis=1)

    def _flat_vectors(self, vectors_BVD: str) -> str:
        return self._flat(vectors_BVD, (self._num_tables + 1) * self._dim)

    def _flat(self, x: str, width: int) -> str:
        """All of a sample side by side. Not -1 wide: of an empty batch that cannot be told."""
        return self.add("Reshape", x, self.constant([0, width]))

    # --- tables

    def _filled_up(self, table: int) -> str:
        """[B, 1, D] fp32 rows of a table, zeros behind those of a narrower one."""
        cross = table - standalone.num_ids(self._config)
        ids_B1 = self._crossed(table, self._config["crosses"][cross]) if cross >= 0 else None
        rows = self._rows(table, ids_B1)
        lacking = self._dim - self._config["table_widths"][table]
        zeros = self.constant([0, 0, 0, 0, 0, lacking])
        return self.add("Pad", rows, zeros) if lacking else rows

    def _crossed(self, table: int, cross: Sequence[int]) -> str:
        """[B, 1] ids of a combination of features."""
        rows = self.constant([self._config["table_rows"][table]])
        multiplier = self.constant([standalone.MULTIPLIER])
        columns = [self.add("Gather", "categorical", self.constant([f]), axis=1) for f in cross]
        mixed = self.add("Mod", columns[0], rows)
        for column in columns[1:]:
            sum_B1 = self.add("Add", self.add("Mul", mixed, multiplier), column)
            mixed = self.add("Mod", sum_B1, rows)
        return mixed

    def _pooled(self, table: int) -> str:
        """[B, 1, D] the sum, or mean, of the rows of several ids, of which -1 is none."""
        hotness = self._config["hotness"]
        first = sum(hotness[:table])
        columns = list(range(first, first + hotness[table]))
        ids_BH = self.add("Gather", "categorical", self.constant(columns), axis=1)
        is_none = self.add("Less", ids_BH, self.constant(torch.tensor(0)))
        there_BH = self._as_fp32(self.add("Not", is_none))
        rows_BHD = self._rows(table, self.add("Max", ids_BH, self.constant([0])))
        one = self.constant([1])
        there_B1H = self.add("Unsqueeze", there_BH, one)
        sums_B1D = self.add("MatMul", there_B1H, rows_BHD)
        if self._config["pooling"] == "sum":
            return sums_B1D
        counts_B11 = self.add("ReduceSum", there_B1H, self.constant([2]), keepdims=1)
        return self.add("Div", sums_B1D, self.add("Max", counts_B11, self.constant(torch.ones(1))))

    def _rows(self, table: int, ids_B1: str | None = None) -> str:
        """[B, 1, width] fp32 rows of a table: those of its column, or of as many ids as are
        given."""
        name = f"tables.{table}"
        if ids_B1 is None:
            ids_B1 = self.add("Gather", "categorical", self.constant([table]), axis=1)
        if f"{name}.weight" in self._tensors:
            weights_RD = self._tensors[f"{name}.weight"]
            rows = self.add("Gather", self.weight(f"{name}.weight", weights_RD), ids_B1)
            return rows if weights_RD.dtype == torch.float32 else self._as_fp32(rows)
        codes_RD, scales_R = self._tensors[f"{name}.codes"], self._tensors[f"{name}.scales"]
        codes = self.add("Gather", self.weight(f"{name}.codes", codes_RD), ids_B1)
        if codes_RD.dtype == torch.float8_e4m3fn:
            bytes_as_ids = self.add("Cast", codes, to=TensorProto.INT32)
            values = self.add("Gather", self.constant(_fp8_values()), bytes_as_ids)
        else:
            values = self._as_fp32(codes)
        # As a column, so that the scales of [B, 1] ids have the rank of the rows.
        scales = self.add("Gather", self.weight(f"{name}.scales", scales_R[:, None]), ids_B1)
        return self.add("Mul", values, scales)

    def _as_fp32(self, x: str) -> str:
        return self.add("Cast", x, to=TensorProto.FLOAT)


def _fp8_values() -> Tensor:
    """The number that each of the 256 bytes stands for."""
    return torch.arange(256).to(torch.uint8).view(torch.float8_e4m3fn).float()
