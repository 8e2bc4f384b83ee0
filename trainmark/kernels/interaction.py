"""Dot interaction in NVIDIA's layout: [bottom MLP output, lower triangle of dot products, zeros].

The kernels take the embedding rows from a tensor, or straight from the tables, for
`gather_interaction`: a sample's rows are loaded, multiplied and forgotten by one program.

Shapes: B samples, F embedding rows per sample, D their width, V = F + 1 vectors per sample, W width
of the output.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import pad

from trainmark.kernels.compiled import has_compiled
from trainmark.kernels.interaction_layout import output_width
from trainmark.kernels.table_formats import Rows, Tables, kernel_arguments, next_power_of_2
from trainmark.kernels.triton_here import tl, triton

INFINITE = {torch.float32: 0x7F800000, torch.float16: 0x477FF000, torch.bfloat16: 0x7F7F8000}
"""The smallest fp32 number, by its bits, that is infinite when rounded to that type."""


# --- plain torch


def dot_interaction_reference(x_BD: Tensor, rows_BFD: Tensor) -> Tensor:
    """[B, D] and [B, F, D] -> [B, output_width(F, D)], differentiated by autograd."""
    vectors_BVD = torch.cat([x_BD.unsqueeze(1), rows_BFD], dim=1)
    dots_BVV = torch.bmm(vectors_BVD, vectors_BVD.transpose(1, 2))
    num_vectors = vectors_BVD.shape[1]
    lower = _lower_triangle(num_vectors, x_BD.device)
    dots_BP = dots_BVV.flatten(1).index_select(1, lower)
    joined = torch.cat([x_BD, dots_BP.to(x_BD.dtype)], dim=1)
    width = output_width(num_vectors - 1, x_BD.shape[1])
    return pad(joined, (0, width - joined.shape[1]))


class _DotInteraction(torch.autograd.Function):
    """The same with half the work in the backward pass; once differentiable."""

    @staticmethod
    def forward(ctx: Any, x_BD: Tensor, rows_BFD: Tensor) -> Tensor:
        vectors_BVD = torch.cat([x_BD.unsqueeze(1), rows_BFD], dim=1)
        ctx.save_for_backward(vectors_BVD)
        B, V, D = vectors_BVD.shape
        dots_BVV = torch.bmm(vectors_BVD, vectors_BVD.transpose(1, 2))
        dots_BP = dots_BVV.flatten(1).index_select(1, _lower_triangle(V, x_BD.device))
        width = output_width(V - 1, D)
        zeros = x_BD.new_zeros(B, width - D - dots_BP.shape[1])
        return torch.cat([x_BD, dots_BP.to(x_BD.dtype), zeros], dim=1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_BW: Tensor) -> tuple[Tensor, Tensor]:
        return gradients_reference(grad_BW, *ctx.saved_tensors)


def gradients_reference(grad_BW: Tensor, vectors_BVD: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of x [B, D] and of the rows [B, F, D]; `vectors_BVD` holds both."""
    B, V, D = vectors_BVD.shape
    # The product of vectors i and j has its gradient at (i, j) and at (j, i): the matrix is
    # symmetric, so one GEMM serves both of bmm's arguments, which are the same vectors.
    grad_BVV = grad_BW.index_select(1, D + _pair_of(V, grad_BW.device)).view(B, V, V)
    grad_BVV.diagonal(dim1=1, dim2=2).zero_()
    grad_x_BD = torch.bmm(grad_BVV[:, :1], vectors_BVD).squeeze(1).add_(grad_BW[:, :D])
    return grad_x_BD, torch.bmm(grad_BVV[:, 1:], vectors_BVD)


def _lower_triangle(size: int, device: torch.device) -> Tensor:
    """Positions, in a flattened [size, size] matrix, of its strictly lower triangle by rows."""
    row, column = torch.tril_indices(size, size, offset=-1, device=device).unbind()
    return row * size + column


def _pair_of(size: int, device: torch.device) -> Tensor:
    """For each (i, j) of a flattened [size, size] matrix: the place of its pair among the dots.

    The pair {i, j} with i > j has place i (i - 1) / 2 + j. The diagonal, which has none, gets -1.
    """
    i = torch.arange(size, device=device)
    high, low = torch.maximum(i[:, None], i), torch.minimum(i[:, None], i)
    return torch.where(high == low, -1, high * (high - 1) // 2 + low).flatten()


# --- Triton


@dataclass(frozen=True)
class Launch:
    """How the work is cut; the result does not depend on it."""

    columns: int
    """Of the vectors that are in registers at a time; a power of 2, at least 16."""
    warps: int
    """Of the program that computes a sample."""


def default_launch(num_rows: int, dim: int, tables: Tables, dtype: torch.dtype) -> Launch:
    """As few warps as can hold a tile: warps of one program wait for each other."""
    vectors = _padded_vectors(num_rows)

    def columns(tile: int) -> int:
        return max(16, min(next_power_of_2(dim), tile // vectors))

    if dtype == torch.float32:  # whose GEMMs need more registers
        return Launch(columns(1024), warps=4 if vectors <= 64 else 8)
    if vectors > 32:
        return Launch(columns(4096), warps=4 if vectors <= 64 else 8)
    # Half rows of 8 bits would be short to read.
    at_a_time = columns(4096 if tables.second is None else 8192)
    return Launch(at_a_time, warps=max(1, vectors * at_a_time // 4096))


def _padded_vectors(num_rows: int) -> int:
    """A power of 2 that tensor cores can multiply."""
    return max(16, next_power_of_2(num_rows + 1))


def launch_forward(
    x_BD: Tensor, ids_BF: Tensor | None, tables: Tables, num_rows: int, launch: Launch | None = None
) -> Tensor:
    """[B, W]. Without ids, sample b has the rows b F ... b F + F - 1 of the first store."""
    B, D = x_BD.shape
    out_BW = x_BD.new_empty(B, output_width(num_rows, D))
    launch = launch or default_launch(num_rows, D, tables, x_BD.dtype)
    if B:
        _forward_kernel[(B,)](
            x_BD.contiguous(),
            x_BD if ids_BF is None else ids_BF.contiguous(),
            **kernel_arguments(tables),
            out=out_BW,
            W=out_BW.shape[1],
            **_shared_constants(num_rows, D, ids_BF, launch),
        )
    return out_BW


def launch_backward(
    grad_BW: Tensor,
    x_BD: Tensor,
    ids_BF: Tensor | None,
    tables: Tables,
    grad_rows_BFD: Tensor,
    finite: Tensor | None = None,
    launch: Launch | None = None,
    *,
    at_rows: bool = False,
) -> Tensor:
    """Fills `grad_rows_BFD`, of any type, and returns the gradient of x.

    Args:
        at_rows: `grad_rows_BFD` is [R, D], and a row's gradient goes to the row's own place: for
            rows that are looked up once each.
        finite: a float scalar that is set to 0 if a gradient is not finite; the caller sets it to
            1 beforehand.
    """
    B, D = x_BD.shape
    num_rows = grad_rows_BFD.shape[1] if ids_BF is None else ids_BF.shape[1]
    grad_x_BD = torch.empty_like(x_BD, memory_format=torch.contiguous_format)
    launch = launch or default_launch(num_rows, D, tables, x_BD.dtype)
    if B:
        _backward_kernel[(B,)](
            x_BD.contiguous(),
            x_BD if ids_BF is None else ids_BF.contiguous(),
            **kernel_arguments(tables),
            grad=grad_BW.contiguous(),
            grad_x=grad_x_BD,
            grad_rows=grad_rows_BFD,
            finite=grad_x_BD if finite is None else finite,
            W=grad_BW.shape[1],
            CHECK=finite is not None,
            AT_ROWS=at_rows,
            INFINITE=INFINITE[grad_rows_BFD.dtype],
            **_shared_constants(num_rows, D, ids_BF, launch),
        )
    return grad_x_BD


def _shared_constants(
    num_rows: int, dim: int, ids_BF: Tensor | None, launch: Launch
) -> dict[str, Any]:
    exact = torch.get_float32_matmul_precision() == "highest"
    return {
        "F": num_rows,
        "D": dim,
        "VECTORS": _padded_vectors(num_rows),
        "COLUMNS": launch.columns,
        "HAS_IDS": ids_BF is not None,
        "PRECISION": "ieee" if exact else "tf32",
        "num_warps": launch.warps,
        "num_stages": 1,
    }


class _TritonInteraction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_BD: Tensor, rows_BFD: Tensor) -> Tensor:
        rows_BFD = rows_BFD.contiguous()
        ctx.save_for_backward(x_BD, rows_BFD)
        return launch_forward(x_BD, None, _as_table(rows_BFD), rows_BFD.shape[1])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_BW: Tensor) -> tuple[Tensor, Tensor]:
        x_BD, rows_BFD = ctx.saved_tensors
        grad_rows_BFD = torch.empty_like(rows_BFD)
        tables = _as_table(rows_BFD)
        return launch_backward(grad_BW, x_BD, None, tables, grad_rows_BFD), grad_rows_BFD


def _as_table(rows_BFD: Tensor) -> Tables:
    return Tables(Rows(rows_BFD.view(-1, rows_BFD.shape[2])))


if triton is not None:
    from trainmark.kernels.table_formats import load_table_rows

    @triton.jit
    def _rows_of_sample(
        ids, in_second, sample, vector, F: tl.constexpr, HAS_IDS: tl.constexpr, TWO: tl.constexpr
    ):
        """For each vector: its row as int64, whether it has one, whether in the second store."""
        feature = vector - 1
        wanted = (vector > 0) & (vector <= F)
        row = sample * F + feature
        if HAS_IDS:
            row = tl.load(ids + row, wanted, 0).to(tl.int64)
        is_second = vector * 0
        if TWO:
            is_second = tl.load(in_second + feature, wanted, 0).to(tl.int32)
        return row, wanted, is_second

    @triton.jit
    def _vectors_of_sample(
        x, first_codes, first_scales, second_codes, second_scales,
        sample, vector, row, wanted, is_second, column,
        D: tl.constexpr, FIRST_SCALED: tl.constexpr, TWO: tl.constexpr, SECOND_SCALED: tl.constexpr,
    ):  # fmt: skip
        """[vectors, columns] in x's type: x, the rows, then zeros."""
        rows = load_table_rows(
            first_codes, first_scales, second_codes, second_scales, row, wanted, is_second, column,
            x.dtype.element_ty, D, FIRST_SCALED, TWO, SECOND_SCALED,
        )  # fmt: skip
        dense = tl.load(x + sample * D + column, column < D, 0.0)
        return tl.where((vector == 0)[:, None], dense[None, :], rows)

    @triton.jit
    def _store_triangle(out, dots, vector, F: tl.constexpr, W: tl.constexpr):
        """The triangle and the zeros behind it: `W` numbers."""
        i, j = vector[:, None], vector[None, :]
        place = i * (i - 1) // 2 + j
        tl.store(out + place, dots.to(out.dtype.element_ty), (i > j) & (i <= F))
        zeros = F * (F + 1) // 2 + tl.arange(0, 8)  # fewer than PAD_TO
        tl.store(out + zeros, tl.zeros([8], out.dtype.element_ty), zeros < W)

    @triton.jit
    def _forward_kernel(
        x, ids, first_codes, first_scales, second_codes, second_scales, in_second, out,
        FIRST_SCALED: tl.constexpr, TWO: tl.constexpr, SECOND_SCALED: tl.constexpr,
        F: tl.constexpr, D: tl.constexpr, W: tl.constexpr,
        VECTORS: tl.constexpr, COLUMNS: tl.constexpr,
        HAS_IDS: tl.constexpr, PRECISION: tl.constexpr,
    ):  # fmt: skip
        vector = tl.arange(0, VECTORS)
        sample = tl.program_id(0).to(tl.int64)
        row, wanted, is_second = _rows_of_sample(ids, in_second, sample, vector, F, HAS_IDS, TWO)
        dots = tl.zeros([VECTORS, VECTORS], tl.float32)
        for start in range(0, D, COLUMNS):
            column = start + tl.arange(0, COLUMNS)
            vectors = _vectors_of_sample(
                x, first_codes, first_scales, second_codes, second_scales,
                sample, vector, row, wanted, is_second, column,
                D, FIRST_SCALED, TWO, SECOND_SCALED,
            )  # fmt: skip
            dots = tl.dot(vectors, tl.trans(vectors), dots, input_precision=PRECISION)
            inside = column < D
            tl.store(out + sample * W + column, tl.load(x + sample * D + column, inside), inside)
        _store_triangle(out + sample * W + D, dots, vector, F, W - D)

    @triton.jit
    def _backward_kernel(
        x, ids, first_codes, first_scales, second_codes, second_scales, in_second,
        grad, grad_x, grad_rows, finite,
        FIRST_SCALED: tl.constexpr, TWO: tl.constexpr, SECOND_SCALED: tl.constexpr,
        F: tl.constexpr, D: tl.constexpr, W: tl.constexpr,
        VECTORS: tl.constexpr, COLUMNS: tl.constexpr,
        HAS_IDS: tl.constexpr, CHECK: tl.constexpr, AT_ROWS: tl.constexpr,
        INFINITE: tl.constexpr, PRECISION: tl.constexpr,
    ):  # fmt: skip
        vector = tl.arange(0, VECTORS)
        i, j = vector[:, None], vector[None, :]
        high, low = tl.maximum(i, j), tl.minimum(i, j)
        place = D + high * (high - 1) // 2 + low
        is_pair = (high != low) & (high <= F)
        sample = tl.program_id(0).to(tl.int64)
        row, wanted, is_second = _rows_of_sample(ids, in_second, sample, vector, F, HAS_IDS, TWO)
        pairs = tl.load(grad + sample * W + place, is_pair, 0.0).to(x.dtype.element_ty)
        for start in range(0, D, COLUMNS):
            column = start + tl.arange(0, COLUMNS)
            vectors = _vectors_of_sample(
                x, first_codes, first_scales, second_codes, second_scales,
                sample, vector, row, wanted, is_second, column,
                D, FIRST_SCALED, TWO, SECOND_SCALED,
            )  # fmt: skip
            in_row = (column < D)[None, :]
            # The dense vector is also passed on as it is.
            direct = tl.load(grad + sample * W + column, column < D, 0.0)
            direct = tl.where((vector == 0)[:, None], direct[None, :].to(tl.float32), 0.0)
            grads = tl.dot(pairs, vectors, input_precision=PRECISION) + direct
            target = row if AT_ROWS else sample * F + vector - 1
            place_rows = target[:, None] * D + column[None, :]
            rounded = grads.to(grad_rows.dtype.element_ty)
            tl.store(grad_rows + place_rows, rounded, wanted[:, None] & in_row)
            place_x = sample * D + (vector * 0)[:, None] + column[None, :]
            is_x = (vector == 0)[:, None] & in_row
            tl.store(grad_x + place_x, grads.to(grad_x.dtype.element_ty), is_x)
            if CHECK:
                # Without its sign, what is not finite is the largest as an integer.
                pattern = grads.to(tl.int32, bitcast=True) & 0x7FFFFFFF
                if tl.max(pattern) >= INFINITE:
                    tl.store(finite, 0.0)


# --- compiled, for CPUs


class _CompiledInteraction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_BD: Tensor, rows_BFD: Tensor) -> Tensor:
        from trainmark.kernels import cpu_interaction

        rows_BFD = rows_BFD.contiguous()
        ctx.save_for_backward(x_BD, rows_BFD)
        return cpu_interaction.forward(x_BD, None, rows_BFD)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_BW: Tensor) -> tuple[Tensor, Tensor]:
        from trainmark.kernels import cpu_interaction

        x_BD, rows_BFD = ctx.saved_tensors
        grads_BFD = torch.empty_like(rows_BFD)
        grad_x_BD, _ = cpu_interaction.backward(grad_BW, x_BD, None, rows_BFD, grads_BFD)
        return grad_x_BD, grads_BFD


# --- dispatch

Function = TypeVar("Function", bound=Callable[..., Tensor])


def uncompiled(function: Function) -> Function:
    """`torch.compile` calls it as it is."""
    kept: Function = torch.compiler.disable(function)
    return kept


def dot_interaction(x_BD: Tensor, rows_BFD: Tensor) -> Tensor:
    """[B, D] and [B, F, D] -> [B, output_width(F, D)]; once differentiable."""
    if has_kernel(x_BD):
        return _on_the_gpu(x_BD, rows_BFD)
    if has_compiled(x_BD, rows_BFD):
        return _compiled(x_BD, rows_BFD)
    result_BW: Tensor = _DotInteraction.apply(x_BD, rows_BFD)
    return result_BW


def has_kernel(x_BD: Tensor) -> bool:
    return x_BD.is_cuda and triton is not None and x_BD.dtype != torch.float64


@uncompiled
def _on_the_gpu(x_BD: Tensor, rows_BFD: Tensor) -> Tensor:
    result_BW: Tensor = _TritonInteraction.apply(x_BD, rows_BFD)
    return result_BW


@uncompiled
def _compiled(x_BD: Tensor, rows_BFD: Tensor) -> Tensor:
    result_BW: Tensor = _CompiledInteraction.apply(x_BD, rows_BFD)
    return result_BW
