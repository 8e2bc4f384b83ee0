"""The network of a DLRM as its configuration has it, and the sizes that follow from it."""

import itertools
import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

import tyro

from trainmark.bounds import Count, CountOrZero, Layers, NotNegative, Share, Width


@dataclass(frozen=True)
class Layer:
    """A linear layer."""

    fan_in: int
    fan_out: int
    has_bias: bool = True


@dataclass(frozen=True, kw_only=True)
class Model:
    """The network. With `data`, features and table rows come from its feature specification."""

    numerical_features: CountOrZero = 13
    """Numerical features (0 is allowed). A dataset in --data brings its own number."""
    table_rows: tuple[Count, ...] = (100_000,) * 26
    """Rows of each embedding table, one table per categorical feature; those of crosses come
    last. A dataset in --data brings its own."""
    crosses: tuple[str, ...] = ()
    """Combinations of features with their own table, by the features' numbers from 0: `0x4x6`
    for three of them. dlrm-auto finds some."""
    hotness: tuple[Count, ...] | None = None
    """Most ids per sample of each categorical feature; by default one. A dataset in --data
    brings its own numbers."""
    varies: Annotated[bool, tyro.conf.Suppress] = False
    """Whether it may have fewer (set from a dataset)."""
    pooling: Literal["sum", "mean"] = "sum"
    """How to combine the rows of several ids; without ids the result is zeros."""
    embedding_dim: Width = 128
    """Width of an embedding row, and of the bottom MLP's output, which follows it unless
    --model.bottom-mlp is given."""
    table_widths: tuple[CountOrZero, ...] | Literal["auto"] | None = None
    """Width of each table, at most embedding_dim, if they differ; `auto`: a power of 2 near 6
    (rows of the table)^(1/4). Zeros pad narrower rows."""
    bottom_mlp: tuple[Width, ...] = (512, 256, 128)
    """Widths of the bottom MLP; the last one must equal embedding_dim."""
    bottom_output: Literal["relu", "linear"] = "relu"
    """What the bottom MLP ends with: a ReLU, as in the published networks, or its last layer."""
    top_mlp: tuple[Width, ...] = (1024, 1024, 512, 256, 1)
    """Widths of the top MLP; the last one must be 1."""
    interaction: Literal["dot", "dcn", "projection", "cat", "dot_and_inputs", "auto"] = "dot"
    """What the top MLP reads: dot products of all pairs of vectors; all vectors, through cross
    layers (DCNv2); dot products of two projections of them; the vectors side by side; or dot
    products, and beside them the rows and the numbers themselves. dlrm-auto chooses (`auto`)."""
    cross_layers: Layers | None = None
    """Number of cross layers (dcn); by default 3, as in MLPerf."""
    cross_rank: Width | Literal["full"] | None = None
    """Rank of a cross layer's matrix (dcn), or `full`; by default 512, as in MLPerf, or a quarter
    of the width of all vectors, if that is less."""
    branch1_mlp: tuple[Width, ...] | None = None
    """Widths of one MLP of projection; the last one must be a multiple of embedding_dim. By
    default, 2048 and 16 x embedding_dim (TorchRec's at 128)."""
    branch2_mlp: tuple[Width, ...] | None = None
    """Widths of the other MLP of projection."""
    init: Literal["nvidia_tf2", "nvidia_pytorch", "torchrec"] = "nvidia_tf2"
    """Whose documented initialisation to use for the MLPs."""
    table_init: NotNegative | None = None
    """Tables begin with uniform numbers up to this size; by default, as published, up to
    sqrt(1 / rows of the table)."""
    dropout: Share | None = 0.0
    """Dropout of the MLPs' hidden layers; None in dlrm-auto, which chooses it."""
    interaction_dropout: Share = 0.0
    """Dropout of the interaction's output, which the top MLP reads."""

    # --- tables

    @property
    def feature_rows(self) -> tuple[int, ...]:
        """Rows of the tables that are a feature's own; those of crosses lie behind them."""
        return self.table_rows[: len(self.table_rows) - len(self.crosses)]

    @property
    def bag_sizes(self) -> tuple[int, ...]:
        """Ids that a sample has of each feature, at most."""
        return self.hotness or (1,) * len(self.table_rows)

    @property
    def has_bags(self) -> bool:
        """Whether a sample may have another number of ids than one of each feature."""
        return self.varies or any(count != 1 for count in self.bag_sizes)

    @property
    def widths(self) -> tuple[int, ...]:
        """The width of each table."""
        if self.table_widths is None:
            return (self.embedding_dim,) * len(self.table_rows)
        if self.table_widths != "auto":
            return self.table_widths
        # As many numbers as tell so many values apart, and some room; powers of 2 lie well in
        # memory.
        wanted = [1 << round(math.log2(6 * rows**0.25)) for rows in self.table_rows]
        return tuple(min(self.embedding_dim, width) for width in wanted)

    @property
    def has_narrow_tables(self) -> bool:
        return any(width < self.embedding_dim for width in self.widths)

    @property
    def table_parameters(self) -> int:
        return sum(map(operator.mul, self.table_rows, self.widths))

    # --- the dense part

    @property
    def dense_layers(self) -> list[Layer]:
        """The layers of both MLPs and of the interaction."""
        bottom = [self.numerical_features, *self.bottom_mlp]
        top = [self.interaction_width, *self.top_mlp]
        return [*_mlp_layers(bottom), *self._interaction_layers, *_mlp_layers(top)]

    @property
    def dense_parameters(self) -> int:
        """Weights and biases of everything but tables."""
        return sum((layer.fan_in + layer.has_bias) * layer.fan_out for layer in self.dense_layers)

    # --- the interaction

    @property
    def interaction_width(self) -> int:
        """How many numbers the top MLP reads. Dot products are padded with zeros to a multiple of
        8, as NVIDIA's are."""
        width = self.width_without_zeros
        return -(-width // 8) * 8 if self.interaction in ("dot", "dot_and_inputs") else width

    @property
    def width_without_zeros(self) -> int:
        """How many numbers the top MLP reads, without that padding."""
        if self.interaction in ("dot", "projection"):  # behind the bottom MLP's output
            return self.embedding_dim + self.dot_products
        if self.interaction == "dot_and_inputs":
            return self.joined_width + self.dot_products + self.numerical_features
        return self.joined_width

    @property
    def dot_products(self) -> int:
        """How many of a sample's products of two vectors the interaction computes."""
        if self.interaction in ("dot", "dot_and_inputs"):
            return math.comb(len(self.table_rows) + 1, 2)
        if self.interaction == "projection":
            return math.prod(own[-1] // self.embedding_dim for own in self.branches)
        return 0

    @property
    def joined_width(self) -> int:
        """The width of all vectors of a sample side by side."""
        return (len(self.table_rows) + 1) * self.embedding_dim

    @property
    def cross_shape(self) -> tuple[int, int | Literal["full"]]:
        """How many cross layers there are, and of which rank. TorchRec's advice is a quarter of the
        width, to keep the quality of full rank."""
        usual_rank = min(512, max(self.joined_width // 4, 1))
        return self.cross_layers or 3, self.cross_rank or usual_rank

    @property
    def branches(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The widths of both MLPs of a projection."""
        usual = (2048, 16 * self.embedding_dim)
        return self.branch1_mlp or usual, self.branch2_mlp or usual

    @property
    def interaction_activations(self) -> int:
        """Elements of a sample between what the interaction reads and what it gives."""
        outputs = sum(layer.fan_out for layer in self._interaction_layers)
        if self.interaction != "dcn":
            return outputs
        # Every cross layer also adds the product of its output and the first input to its own.
        layers, _ = self.cross_shape
        return outputs + (layers - 1) * self.joined_width

    @property
    def _interaction_layers(self) -> list[Layer]:
        width = self.joined_width
        if self.interaction == "projection":
            return [layer for own in self.branches for layer in _mlp_layers([width, *own])]
        if self.interaction != "dcn":
            return []
        layers, rank = self.cross_shape
        if rank == "full":
            return [Layer(width, width)] * layers
        return [Layer(width, rank, has_bias=False), Layer(rank, width)] * layers


def _mlp_layers(widths: Sequence[int]) -> list[Layer]:
    return [Layer(fan_in, fan_out) for fan_in, fan_out in itertools.pairwise(widths)]
