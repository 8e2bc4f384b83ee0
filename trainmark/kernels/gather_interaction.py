"""Lookup and dot interaction in one pass: the looked-up rows are never written to memory.

The backward pass reads the rows again rather than keep them. To keep them in 16 bits would write 2
bytes a weight and read 2; from fp32 tables 4 are read again, from 8-bit ones 1, and no memory is
held. (On a CPU keeping is cheaper, and the gradients' place keeps the rows.) It leaves the gradient
rows in a buffer for the sparse update, since tables are no parameters of autograd's.

Shapes: B samples, F features, D width of a row, W width of the output.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from trainmark.kernels.compiled import has_compiled
from trainmark.kernels.gather_rows import gather_rows_reference
from trainmark.kernels.interaction import (
    Launch,
    dot_interaction_reference,
    gradients_reference,
    has_kernel,
    launch_forward,
    uncompiled,
)
from trainmark.kernels.interaction import launch_backward as backward_triton
from trainmark.kernels.table_formats import Tables

# --- plain torch


def forward_reference(x_BD: Tensor, ids_BF: Tensor, tables: Tables) -> Tensor:
    """[B, W]."""
    return dot_interaction_reference(x_BD, gather_rows_reference(ids_BF, tables, x_BD.dtype))


def backward_reference(
    grad_BW: Tensor,
    x_BD: Tensor,
    ids_BF: Tensor,
    tables: Tables,
    grad_rows_BFD: Tensor,
    finite: Tensor | None = None,
    *,
    at_rows: bool = False,
) -> Tensor:
    """Fills `grad_rows_BFD` and returns the gradient of x. `finite`: see `gather_interaction`."""
    rows_BFD = gather_rows_reference(ids_BF, tables, x_BD.dtype)
    vectors_BVD = torch.cat([x_BD.unsqueeze(1), rows_BFD], dim=1)
    grad_x_BD, grads_BFD = gradients_reference(grad_BW, vectors_BVD)
    if at_rows:
        grad_rows_BFD[ids_BF] = grads_BFD.to(grad_rows_BFD.dtype)
    else:
        grad_rows_BFD.copy_(grads_BFD)
    if finite is not None:
        stored = grads_BFD.to(grad_rows_BFD.dtype)
        finite.mul_(stored.isfinite().all() & grad_x_BD.isfinite().all())
    return grad_x_BD


# --- Triton: the kernels are those of `interaction`, with ids


def forward_triton(
    x_BD: Tensor, ids_BF: Tensor, tables: Tables, launch: Launch | None = None
) -> Tensor:
    return launch_forward(x_BD, ids_BF, tables, ids_BF.shape[1], launch)


# --- compiled, for CPUs: one fp32 store, whose rows may be pieces of the model's


def forward_compiled(
    x_BD: Tensor, ids_BF: Tensor, tables: Tables, kept_BFD: Tensor | None = None
) -> Tensor:
    """`kept_BFD` gets the rows themselves, if given."""
    from trainmark.kernels import cpu_interaction

    return cpu_interaction.forward(x_BD, ids_BF, tables.first.codes, kept_BFD)


def backward_compiled(
    grad_BW: Tensor,
    x_BD: Tensor,
    ids_BF: Tensor,
    tables: Tables,
    grad_rows_BFD: Tensor,
    finite: Tensor | None = None,
    *,
    at_rows: bool = False,
) -> Tensor:
    """The same, but unless `at_rows`, `grad_rows_BFD` holds the rows, kept by the forward pass."""
    from trainmark.kernels import cpu_interaction

    places_BF, rows = (ids_BF, tables.first.codes) if at_rows else (None, grad_rows_BFD)
    grad_x_BD, all_finite = cpu_interaction.backward(grad_BW, x_BD, places_BF, rows, grad_rows_BFD)
    if finite is not None and not all_finite:
        finite.zero_()
    return grad_x_BD


def _has_compiled(x_BD: Tensor, tables: Tables, grad_rows_BFD: Tensor | None) -> bool:
    used = [x_BD, tables.first.codes, *([] if grad_rows_BFD is None else [grad_rows_BFD])]
    return tables.second is None and has_compiled(*used)


# --- autograd and dispatch


class _GatherInteraction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_BD: Tensor,
        ids_BF: Tensor,
        tables: Tables,
        grad_rows_BFD: Tensor | None,
        finite: Tensor | None,
        at_rows: bool,
    ) -> Tensor:
        ctx.save_for_backward(x_BD, ids_BF)
        ctx.tables, ctx.grad_rows_BFD, ctx.finite = tables, grad_rows_BFD, finite
        ctx.at_rows = at_rows
        kept_BFD = None if at_rows else grad_rows_BFD
        output_BW, ctx.gradients = _forward(x_BD, ids_BF, tables, grad_rows_BFD, kept_BFD)
        return output_BW

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_BW: Tensor) -> tuple[Tensor | None, ...]:
        x_BD, ids_BF = ctx.saved_tensors
        grad_x_BD = ctx.gradients(
            grad_BW, x_BD, ids_BF, ctx.tables, ctx.grad_rows_BFD, ctx.finite, at_rows=ctx.at_rows
        )
        return grad_x_BD, None, None, None, None, None


def _forward(
    x_BD: Tensor,
    ids_BF: Tensor,
    tables: Tables,
    grad_rows_BFD: Tensor | None = None,
    kept_BFD: Tensor | None = None,
) -> tuple[Tensor, Callable[..., Tensor]]:
    """The output, and the backward pass that goes with it."""
    if has_kernel(x_BD):
        return forward_triton(x_BD, ids_BF, tables), backward_triton
    if _has_compiled(x_BD, tables, grad_rows_BFD):
        return forward_compiled(x_BD, ids_BF, tables, kept_BFD), backward_compiled
    return forward_reference(x_BD, ids_BF, tables), backward_reference


@uncompiled
def gather_interaction(
    x_BD: Tensor,
    ids_BF: Tensor,
    tables: Tables,
    grad_rows_BFD: Tensor | None = None,
    finite: Tensor | None = None,
    *,
    at_rows: bool = False,
) -> Tensor:
    """[B, D] and [B, F] -> [B, W], in the type of `x_BD`; once differentiable.

    Args:
        x_BD: in training it must need a gradient, or the backward pass does not come here.
        ids_BF: int32 or int64, rows of the store that the feature is in. They, and the tables, must
            not change before the backward pass.
        grad_rows_BFD: contiguous buffer of any float type that the backward pass fills; needed in
            training only. Until then it is the kernel's. With micro-batches, a slice of the batch's
            buffer. On a CPU it may also lie in memory as [F, B, D], which is faster.
        finite: float scalar, 1 before the step; the backward pass sets it to 0 if a gradient, as
            stored, is not finite.
        at_rows: every row is looked up once, and its gradient goes to the same row of
            `grad_rows_BFD`, which is [R, D]; on a CPU it may be the table itself.
    """
    if not torch.is_grad_enabled():  # to predict, without the work of autograd around it
        return _forward(x_BD, ids_BF, tables)[0]
    result_BW: Tensor = _GatherInteraction.apply(
        x_BD, ids_BF, tables, grad_rows_BFD, finite, at_rows
    )
    return result_BW
