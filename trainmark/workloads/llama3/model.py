"""Llama-3 for one device: RMSNorm, rotary positions, grouped-query attention, SwiGLU.

Modules carry Hugging Face's names, so that its files need no translation. A pipeline stage is the
same class with fewer parts: `embed_tokens` only in the first, `norm` and `lm_head` in the last.

Shapes: B samples, S positions, D hidden, H query heads, K key and value heads, E head width,
F feed-forward width, V vocabulary.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional

from trainmark.distributed.mesh import local
from trainmark.kernels.linear_cross_entropy import linear_cross_entropy
from trainmark.training.precision import compute_dtype
from trainmark.training.seeding import generator
from trainmark.workloads.llama3.runs import LlamaRun, Model, axes_of

Rotation = tuple[Tensor, Tensor]
"""Cosine and sine of every position's angles, [S, E] each."""


class Llama(nn.Module):
    """Tokens in; the mean loss out where targets are given, logits where not."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.config = model
        self.embed_tokens: nn.Module | None = nn.Embedding(model.vocab, model.hidden)
        # By global number: a stage keeps some of them, under the same names.
        self.layers = nn.ModuleDict({str(i): Block(model) for i in range(model.layers)})
        self.norm: nn.Module | None = RMSNorm(model.hidden, model.norm_eps)
        self.lm_head: nn.Module | None = Head(model.hidden, model.vocab)
        self._rotation: Rotation | None = None

    def forward(self, x: Tensor, targets_BS: Tensor | None = None) -> Tensor:
        """From [B, S] tokens, or from the [B, S, D] vectors of the stage before."""
        rotation = self._rotations(x)
        x_BSD = x if self.embed_tokens is None else self.embed_tokens(x)
        for block in self.layers.values():
            x_BSD = block(x_BSD, *rotation)
        if self.norm is None or self.lm_head is None:
            return x_BSD
        result: Tensor = self.lm_head(self.norm(x_BSD), targets_BS)
        return result

    def set_length(self, positions: int) -> None:
        """Compute the rotary angles for sequences of this many positions."""
        self._length = positions
        self._rotation = None

    def _rotations(self, x: Tensor) -> Rotation:
        # Not from x's shape: between tensor-parallel stages a rank has a slice of the sequence.
        if self._rotation is None or self._rotation[0].device != x.device:
            self._rotation = rotations(self.config, self._length, x.device)
        return self._rotation


class Block(nn.Module):
    def __init__(self, model: Model) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(model.hidden, model.norm_eps)
        self.self_attn = Attention(model)
        self.post_attention_layernorm = RMSNorm(model.hidden, model.norm_eps)
        self.mlp = SwiGLU(model)

    def forward(self, x_BSD: Tensor, cos_SE: Tensor, sin_SE: Tensor) -> Tensor:
        x_BSD = x_BSD + self.self_attn(self.input_layernorm(x_BSD), cos_SE, sin_SE)
        x_BSD = x_BSD + self.mlp(self.post_attention_layernorm(x_BSD))
        return x_BSD


class Attention(nn.Module):
    def __init__(self, model: Model) -> None:
        super().__init__()
        self.head_dim = model.head_dim
        queries, keys = model.heads * model.head_dim, model.kv_heads * model.head_dim
        self.q_proj = nn.Linear(model.hidden, queries, bias=False)
        self.k_proj = nn.Linear(model.hidden, keys, bias=False)
        self.v_proj = nn.Linear(model.hidden, keys, bias=False)
        self.o_proj = nn.Linear(queries, model.hidden, bias=False)

    def forward(self, x_BSD: Tensor, cos_SE: Tensor, sin_SE: Tensor) -> Tensor:
        q_BHSE = rotate(self._heads(self.q_proj(x_BSD)), cos_SE, sin_SE)
        k_BKSE = rotate(self._heads(self.k_proj(x_BSD)), cos_SE, sin_SE)
        v_BKSE = self._heads(self.v_proj(x_BSD))
        y_BHSE = functional.scaled_dot_product_attention(
            q_BHSE, k_BKSE, v_BKSE, is_causal=True, enable_gqa=True
        )
        y_BSD: Tensor = self.o_proj(y_BHSE.transpose(1, 2).flatten(2))
        return y_BSD

    def _heads(self, x_BSQ: Tensor) -> Tensor:
        """[B, S, heads x E] to [B, heads, S, E], with as many heads as this rank has."""
        x_BSHE: Tensor = x_BSQ.unflatten(2, (-1, self.head_dim))
        return x_BSHE.transpose(1, 2)


class SwiGLU(nn.Module):
    def __init__(self, model: Model) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(model.hidden, model.ffn, bias=False)
        self.up_proj = nn.Linear(model.hidden, model.ffn, bias=False)
        self.down_proj = nn.Linear(model.ffn, model.hidden, bias=False)

    def forward(self, x_BSD: Tensor) -> Tensor:
        y_BSD: Tensor = self.down_proj(functional.silu(self.gate_proj(x_BSD)) * self.up_proj(x_BSD))
        return y_BSD


class RMSNorm(nn.Module):
    """Divides by the root mean square, in fp32 whatever the precision."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return normed.to(x.dtype) * self.weight


class Head(nn.Module):
    """The output projection, joined with its loss: all logits never exist at once."""

    def __init__(self, hidden: int, vocab: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocab, hidden))
        self.vocab_group: Any = None
        """Ranks that share out the vocabulary; `parallelize` sets it."""

    def forward(self, x_BSD: Tensor, targets_BS: Tensor | None = None) -> Tensor:
        weight_VD = self.weight if self.vocab_group is None else local(self.weight)
        if targets_BS is None:
            return functional.linear(x_BSD, weight_VD)
        x_TD, targets_T = x_BSD.flatten(0, 1), targets_BS.flatten()
        loss = linear_cross_entropy(x_TD, weight_VD, targets_T, self.vocab_group)
        return torch.stack([loss])  # no scalar: pipeline schedules join the micro-batches


def rotations(model: Model, positions: int, device: torch.device) -> Rotation:
    """Angles position x theta^(-2i / E), the same for both halves of a head."""
    exponents = torch.arange(0, model.head_dim, 2, dtype=torch.float32, device=device)
    frequencies = model.rope_theta ** (-exponents / model.head_dim)
    angles = torch.outer(torch.arange(positions, device=device).float(), frequencies)
    angles_SE = torch.cat([angles, angles], dim=-1)
    return angles_SE.cos(), angles_SE.sin()


def rotate(x: Tensor, cos_SE: Tensor, sin_SE: Tensor) -> Tensor:
    """Rotate the pairs (i, i + E/2) of every head by their position's angles."""
    first, second = x.chunk(2, dim=-1)
    turned = torch.cat([-second, first], dim=-1)
    return (x * cos_SE + turned * sin_SE).to(x.dtype)


# --- building


def storage_dtype(cfg: LlamaRun) -> torch.dtype:
    """The type of the parameters. FSDP casts what it gathers, so that its shards can be the fp32
    masters themselves; without it, masters are the optimiser's business."""
    if axes_of(cfg)["dp"] > 1 and cfg.optimizer_states == "fp32":
        return torch.float32
    return compute_dtype(cfg.precision)


def build_model(cfg: LlamaRun) -> Llama:
    """The model on the meta device, in the type that it is stored in."""
    with torch.device("meta"):
        model = Llama(cfg.model).to(storage_dtype(cfg))
    model.set_length(cfg.sequence)
    return model


@torch.no_grad()
def init_weights(parts: list[nn.Module], cfg: LlamaRun, device: torch.device) -> None:
    """Allocate on `device` and fill in place, from the weights folder or by name from the seed."""
    from trainmark.workloads.llama3 import huggingface

    for part in parts:
        part.to_empty(device=device)
    stored = huggingface.Weights(cfg.weights) if cfg.weights else None
    for name, parameter in named_parameters(parts):
        full = stored.read(name, device) if stored else initial(name, parameter, cfg, device)
        fill(parameter, full)


def fill(parameter: Tensor, full: Tensor) -> None:
    """Copy this rank's part of a whole parameter into it."""
    if not isinstance(parameter, DTensor):
        parameter.copy_(full)
        return
    mesh = parameter.device_mesh
    part = full
    # Innermost axis first: tensor parallel was applied before the data-parallel sharding.
    for axis in reversed(range(mesh.ndim)):
        placement: Any = parameter.placements[axis]
        if placement.is_replicate():
            continue
        pieces = part.chunk(mesh.size(axis), dim=placement.dim)
        rank = mesh.get_local_rank(axis)
        part = pieces[rank] if rank < len(pieces) else part[:0]
    parameter.to_local().copy_(part)


def initial(name: str, parameter: Tensor, cfg: LlamaRun, device: torch.device) -> Tensor:
    """A whole parameter's first values: normal, narrower for what is added to the residual."""
    shape = parameter.shape  # of the whole parameter, also where this rank has a part of it
    if parameter.dim() == 1:
        return torch.ones(shape, device=device)
    adds_to_residual = name.endswith(("o_proj.weight", "down_proj.weight"))
    std = cfg.model.init_std / ((2 * cfg.model.layers) ** 0.5 if adds_to_residual else 1.0)
    values = torch.empty(shape, device=device)
    return values.normal_(0.0, std, generator=generator(device, cfg.seed, name))


def named_parameters(parts: Iterable[nn.Module]) -> list[tuple[str, nn.Parameter]]:
    """Every parameter of this rank by its global name."""
    return [
        (name.replace("._orig_mod", "").replace("._checkpoint_wrapped_module", ""), parameter)
        for part in parts
        for name, parameter in part.named_parameters()
    ]
