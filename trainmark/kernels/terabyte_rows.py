"""Rows of the planted Terabyte, made on a GPU: the same bits as `clickdata/terabyte.py` makes.

That module explains the arithmetic and is its reference; here a program makes a few hundred rows.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from trainmark.kernels.triton_here import tl, triton

ROWS_PER_PROGRAM = 256


@dataclass(frozen=True, kw_only=True)
class RowTables:
    """`clickdata.terabyte.Tables` on the device, unsigned numbers as signed ones of their bits."""

    starts: Tensor
    widths: Tensor
    inputs: Tensor
    streams: Tensor
    salts: Tensor
    amplitudes: Tensor
    thresholds: Tensor
    interacting: Tensor
    """[columns] int32, 1 where a column's values interact in pairs."""
    table_rows: Tensor
    """[columns] int32: ids from there on become 0."""
    pair_weight: int
    lowest_level: int
    """What the hidden model's terms are added to."""


@dataclass(frozen=True, kw_only=True)
class RowsOnDevice:
    """Consecutive rows."""

    numerical: Tensor
    """[B, N] float16"""
    labels: Tensor
    """[B] bool"""
    ids: Tensor
    """[columns, B] int32"""
    levels: Tensor | None = None
    """[B] int32, where the hidden model's are wanted."""

    @staticmethod
    def empty(num_rows: int, tables: RowTables) -> "RowsOnDevice":
        """Room for rows and their levels."""
        device, columns = tables.starts.device, len(tables.starts)
        shape = (num_rows, len(tables.inputs))
        return RowsOnDevice(
            numerical=torch.empty(shape, dtype=torch.float16, device=device),
            labels=torch.empty(num_rows, dtype=torch.bool, device=device),
            ids=torch.empty(columns, num_rows, dtype=torch.int32, device=device),
            levels=torch.empty(num_rows, dtype=torch.int32, device=device),
        )


def make_rows(tables: RowTables, first: int, into: RowsOnDevice) -> None:
    """Fill `into` with rows from `first` on."""
    count, labels = len(into.labels), into.labels.view(torch.int8)
    if count == 0:
        return
    _rows_kernel[(triton.cdiv(count, ROWS_PER_PROGRAM),)](
        # In two parts, so that a large number is not another type, and compiled again.
        first >> 24,
        first & 0xFFFFFF,
        count,
        tables.starts,
        tables.widths,
        tables.inputs,
        tables.streams,
        tables.salts,
        tables.amplitudes,
        tables.thresholds,
        tables.interacting,
        tables.table_rows,
        into.numerical.view(torch.int16),
        labels,
        into.ids,
        labels if into.levels is None else into.levels,
        COLUMNS=len(tables.starts),
        NUMERICAL=len(tables.inputs),
        BUCKET_BITS=(tables.starts.shape[1] // 2).bit_length() - 1,
        LEVELS=len(tables.thresholds),
        PAIR_WEIGHT=tables.pair_weight,
        LOWEST=tables.lowest_level,
        WITH_LEVELS=into.levels is not None,
        ROWS=ROWS_PER_PROGRAM,
    )


if triton is not None:

    @triton.jit
    def _random(numbers, stream):
        x = numbers * 0x9E3779B97F4A7C15 + stream
        x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
        x = (x ^ (x >> 27)) * 0x94D049BB133111EB
        return x ^ (x >> 31)

    @triton.jit
    def _mixed(x):
        x = (x ^ (x >> 16)) * 0x85EBCA6B
        x = (x ^ (x >> 13)) * 0xC2B2AE35
        return x ^ (x >> 16)

    @triton.jit
    def _sign(bits, k: tl.constexpr):
        return 1 - 2 * ((bits >> k) & 1).to(tl.int32)

    @triton.jit(do_not_specialize=["first_high", "first_low", "count"])
    def _rows_kernel(
        first_high, first_low, count,
        starts, widths, inputs, streams, salts, amplitudes, thresholds, interacting, table_rows,
        numerical, labels, ids, levels,
        COLUMNS: tl.constexpr, NUMERICAL: tl.constexpr, BUCKET_BITS: tl.constexpr,
        LEVELS: tl.constexpr, PAIR_WEIGHT: tl.constexpr, LOWEST: tl.constexpr,
        WITH_LEVELS: tl.constexpr, ROWS: tl.constexpr,
    ):  # fmt: skip
        BUCKETS: tl.constexpr = 1 << BUCKET_BITS
        place = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
        wanted = place < count
        first = (first_high.to(tl.int64) << 24) + first_low
        numbers = (first + place).to(tl.uint64)
        level = tl.full([ROWS], LOWEST, tl.int32)
        sum_0 = tl.zeros([ROWS], tl.int32)
        sum_1 = tl.zeros([ROWS], tl.int32)
        sum_2 = tl.zeros([ROWS], tl.int32)
        sum_3 = tl.zeros([ROWS], tl.int32)
        for column in range(COLUMNS):
            stream = tl.load(streams + column).to(tl.uint64, bitcast=True)
            random = _random(numbers, stream)
            coarse = (random >> (64 - BUCKET_BITS)).to(tl.int32)
            fine = (random >> (64 - 2 * BUCKET_BITS)).to(tl.int32) & (BUCKETS - 1)
            bucket = tl.where(coarse == BUCKETS - 1, BUCKETS + fine, coarse)
            bucket += column * (2 * BUCKETS)
            width = tl.load(widths + bucket).to(tl.uint64)
            inside = ((random & 0xFFFFFFFF) * width) >> 32
            value = tl.load(starts + bucket) + inside.to(tl.int32)
            salt = tl.load(salts + column).to(tl.uint32, bitcast=True)
            hidden = _mixed(value.to(tl.uint32, bitcast=True) * 0x9E3779B1 + salt)
            four = (hidden & 255) + ((hidden >> 8) & 255) + ((hidden >> 16) & 255) + (hidden >> 24)
            level += (tl.load(amplitudes + column) * (four.to(tl.int32) - 510)) >> 8
            pairs = tl.load(interacting + column)
            bits = _mixed(hidden)
            sum_0 += pairs * _sign(bits, 0)
            sum_1 += pairs * _sign(bits, 1)
            sum_2 += pairs * _sign(bits, 2)
            sum_3 += pairs * _sign(bits, 3)
            seen = tl.where(value < tl.load(table_rows + column), value, 0)
            tl.store(ids + column * count + place, seen, wanted)
        for pair in range((NUMERICAL + 1) // 2):
            stream = tl.load(streams + COLUMNS + pair).to(tl.uint64, bitcast=True)
            random = _random(numbers, stream)
            for half in tl.static_range(2):
                column = 2 * pair + half
                if column < NUMERICAL:
                    part = random & 0xFFFFFFFF if half else random >> 32
                    chosen = (part >> (32 - BUCKET_BITS)).to(tl.int32)
                    both = tl.load(inputs + column * BUCKETS + chosen)
                    level += both >> 16
                    tl.store(numerical + place * NUMERICAL + column, both.to(tl.int16), wanted)
        squares = sum_0 * sum_0 + sum_1 * sum_1 + sum_2 * sum_2 + sum_3 * sum_3
        level += (squares * PAIR_WEIGHT) >> 6
        level = tl.minimum(tl.maximum(level, 0), LEVELS - 1)
        threshold = tl.load(thresholds + level).to(tl.uint32, bitcast=True)
        stream = tl.load(streams + COLUMNS + (NUMERICAL + 1) // 2).to(tl.uint64, bitcast=True)
        draw = (_random(numbers, stream) >> 32).to(tl.uint32)
        tl.store(labels + place, (draw < threshold).to(tl.int8), wanted)
        if WITH_LEVELS:
            tl.store(levels + place, level, wanted)
