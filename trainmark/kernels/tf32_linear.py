"""A linear layer in fp32 whose weight gradient runs at the full rate of TF32 tensor cores.

Hopper's tensor cores read TF32 operands only along the summed dimension. In a weight gradient that
dimension, the tokens, is the outer one of both operands, and cuBLAS falls to a third of its rate.
Transposing both first costs less than that.
"""

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear


class _Tf32Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        by_output, by_input = gradient.t().contiguous(), transposed(x)
        return gradient @ weight, by_output @ by_input.t(), gradient.sum(0)


@torch.library.custom_op("trainmark::transposed", mutates_args=())
def transposed(x: Tensor) -> Tensor:
    """A transposed copy, out of the compiler's sight.

    It would write it from inside the LayerNorm that computes `x` again, a column at a time, which
    takes ten times as long as a kernel of its own.
    """
    return _transposer()(x)


@transposed.register_fake
def _(x: Tensor) -> Tensor:
    return x.new_empty(x.shape[1], x.shape[0])


@lru_cache(maxsize=1)
def _transposer() -> Any:
    return torch.compile(lambda x: x.t().contiguous(), dynamic=True)


def tf32_linear(x_NI: Tensor, weight_OI: Tensor, bias_O: Tensor) -> Tensor:
    """[N, I] -> [N, O]; the same as `torch.nn.functional.linear` but for rounding."""
    return _Tf32Linear.apply(x_NI, weight_OI, bias_O)
