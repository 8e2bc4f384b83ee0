"""DLRM, written for one device: bottom MLP, interaction with the embedding rows, top MLP.

Shapes: B samples, N numerical features, F categorical features, D embedding width.
"""

import itertools
import warnings
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from trainmark.embeddings.engine import EmbeddingEngine, Interaction, LocalEngine
from trainmark.embeddings.tables.update import UpdateRule, make_rule
from trainmark.kernels.click_loss import click_loss
from trainmark.kernels.fp8_mlp import Fp8Weight, encode_weights, fp8_layers, fp8_relu_layers
from trainmark.kernels.graph import Beside
from trainmark.kernels.interaction import dot_interaction
from trainmark.kernels.relu_mlp import relu_mlp
from trainmark.training.dropout import Dropout
from trainmark.training.seeding import generator
from trainmark.workloads.dlrm.runs import DlrmRun
from trainmark.workloads.dlrm.sizes import interaction_width, width_without_zeros


class Dlrm(nn.Module):
    """Numerical features and prepared ids in, click logits out.

    Without numerical features the bottom MLP still gives its one vector, a learned constant.
    """

    def __init__(self, cfg: DlrmRun) -> None:
        super().__init__()
        model = cfg.model
        self.bottom = Mlp([model.numerical_features, *model.bottom_mlp], last_relu=True)
        self.top = Mlp([interaction_width(model), *model.top_mlp], last_relu=False)
        self.bottom.dropout = Dropout(model.dropout, cfg.seed, "dropout", "bottom")
        self.top.dropout = Dropout(model.dropout, cfg.seed, "dropout", "top")
        self.interaction_dropout = Dropout(
            model.interaction_dropout, cfg.seed, "dropout", "interaction"
        )
        self.tables: EmbeddingEngine = LocalEngine(
            model.table_rows, model.embedding_dim, table_rule(cfg)
        )
        self.interaction = DotInteraction()
        self.positive_weight = cfg.positive_weight
        self.top_gradients_done: Callable[[], None] | None = None
        """Called in the backward pass when only the bottom MLP's gradients are left to compute."""

    def forward(self, numerical_BN: Tensor, prepared: Any) -> Tensor:
        """[B] logits. `prepared` is what the engine made of these samples' ids."""
        logits_B1: Tensor = self.top(self._interacted(numerical_BN, prepared))
        return logits_B1.squeeze(-1)

    def loss(self, numerical_BN: Tensor, prepared: Any, labels_B: Tensor, scale: Tensor) -> Tensor:
        """Weighted cross entropy, added up over the samples; its backward pass is that of `scale` x
        loss."""
        codes = Beside(self.top.fp8_weights, numerical_BN.device)
        x_BM = self._interacted(numerical_BN, prepared)
        hidden_BM = self.top.hidden(x_BM, codes.result())
        last = cast(nn.Linear, self.top[-1])
        return click_loss(hidden_BM, last.weight, last.bias, labels_B, scale, self.positive_weight)

    @property
    def drops_out(self) -> bool:
        return any(dropout.dropped for dropout in self._dropouts())

    def begin_samples(self, samples_B: Tensor) -> None:
        """The coming samples' numbers in the run, by which dropout chooses."""
        for dropout in self._dropouts():
            dropout.samples_B = samples_B

    def _dropouts(self) -> list[Dropout]:
        return [self.bottom.dropout, self.interaction_dropout, self.top.dropout]

    def _interacted(self, numerical_BN: Tensor, prepared: Any) -> Tensor:
        """[B, M] what the top MLP reads."""
        x_BD = self.bottom(numerical_BN)
        x_BM: Tensor = self.interaction(self.tables, prepared, x_BD)
        done = self.top_gradients_done
        if done is not None and x_BD.requires_grad:  # after the tables' own hooks
            x_BD.register_hook(lambda _: done())
        return self.interaction_dropout(x_BM)

    def cast_mlps(self, dtype: torch.dtype) -> None:
        """For prediction: keep weights in the type that every call would cast them to."""
        self.bottom.to(dtype)
        self.top.to(dtype)

    def compile_dense(self) -> None:
        """Compile everything but the lookup, whose gradient is not autograd's business."""
        for mlp in (self.bottom, self.top):
            if mlp.fused_dtype is None:  # else there is nothing left to compile
                mlp.compile()
        self.interaction.plain = torch.compile(self.interaction.plain)


class DotInteraction(nn.Module):
    """Dot products of all pairs of vectors, fused with the lookup where the engine has a kernel.

    Another interaction is another module with this `forward`, which begins with `tables.lookup`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.plain: Interaction = dot_interaction

    def forward(self, tables: EmbeddingEngine, prepared: Any, x_BD: Tensor) -> Tensor:
        return tables.lookup_and_interact(prepared, x_BD, self.plain)


class Mlp(nn.Sequential):
    """Linear layers with ReLUs between them."""

    def __init__(self, widths: Sequence[int], *, last_relu: bool) -> None:
        layers: list[nn.Module] = []
        for fan_in, fan_out in itertools.pairwise(widths):
            layers += [nn.Linear(fan_in, fan_out), nn.ReLU()]
        super().__init__(*(layers if last_relu else layers[:-1]))
        self.fused_dtype: torch.dtype | None = None
        """Compute with the kernel, in this type; None: layer by layer, as autocast says."""
        self.fp8 = False
        """The kernel's large layers in fp8."""
        self.dropout = Dropout(0.0)
        """Of what hidden layers pass on."""

    @property
    def has_fused_loss(self) -> bool:
        """Whether `hidden` and `click_loss` can take the place of `forward` in training."""
        return self.fused_dtype is not None and len(self) > 1

    def forward(self, x_BM: Tensor) -> Tensor:
        if self.fused_dtype is not None:
            return self._fused(x_BM, self._linears(), last_relu=isinstance(self[-1], nn.ReLU))
        if not self.dropout.is_on:
            y_BN: Tensor = super().forward(x_BM)
            return y_BN
        for place, layer in enumerate(self):
            x_BM = layer(x_BM)
            if isinstance(layer, nn.ReLU) and place < len(self) - 1:
                x_BM = self.dropout(x_BM, place // 2)
        return x_BM

    def hidden(self, x_BM: Tensor, codes: list[Fp8Weight] | None = None) -> Tensor:
        """What the last layer is given. What comes back must be masked as its ReLU is.

        `codes` are what `fp8_weights` gave, if it was called already.
        """
        linears = self._linears()[:-1]
        return self._fused(x_BM, linears, last_relu=True, comes_masked=True, codes=codes)

    def fp8_weights(self) -> list[Fp8Weight]:
        """The weights of the layers that are computed in fp8."""
        large = self._linears()[: self._fp8_layers()]
        return encode_weights([linear.weight for linear in large]) if large else []

    def _fused(
        self,
        x_BM: Tensor,
        linears: list[nn.Linear],
        *,
        last_relu: bool,
        comes_masked: bool = False,
        codes: list[Fp8Weight] | None = None,
    ) -> Tensor:
        weights = [linear.weight for linear in linears]
        biases = [linear.bias for linear in linears]
        x_BM = x_BM.to(self.fused_dtype)
        large = self._fp8_layers()
        codes = codes or (self.fp8_weights() if large else [])
        for begin, end in self._pieces(len(linears), large):
            if begin < large:
                x_BM = fp8_relu_layers(
                    x_BM, weights[begin:end], biases[begin:end], codes[begin:end]
                )
            else:
                is_last = end == len(linears)
                x_BM = relu_mlp(
                    x_BM,
                    weights[begin:end],
                    biases[begin:end],
                    last_relu or not is_last,
                    comes_masked=comes_masked and is_last,
                )
            if end < len(self._linears()):
                x_BM = self.dropout(x_BM, end - 1)
        return x_BM

    def _pieces(self, layers: int, large: int) -> list[tuple[int, int]]:
        """Layers that a kernel takes together: the large ones and the others; with dropout behind
        each of them, one by one."""
        ends = range(1, layers + 1) if self.dropout.is_on else sorted({large, layers})
        return [(a, b) for a, b in itertools.pairwise([0, *ends]) if a < b]

    def _fp8_layers(self) -> int:
        """How many of the first layers are computed in fp8, the same for `forward` and `hidden`."""
        return fp8_layers([linear.weight for linear in self._linears()[:-1]]) if self.fp8 else 0

    def _linears(self) -> list[nn.Linear]:
        return [layer for layer in self if isinstance(layer, nn.Linear)]


def table_rule(cfg: DlrmRun) -> UpdateRule:
    """How the rows of tables are updated."""
    optimizer = cfg.optimizer
    return make_rule(
        optimizer.name,
        eps=optimizer.eps,
        beta1=optimizer.beta1,
        beta2=optimizer.beta2,
        weight_decay=optimizer.weight_decay,
    )


def build_model(cfg: DlrmRun) -> Dlrm:
    """The model on the meta device: no memory yet, whatever its size."""
    with torch.device("meta"), warnings.catch_warnings():
        # Without numerical features, about the first layer's empty weight.
        warnings.filterwarnings("ignore", message="Initializing zero-element tensors")
        return Dlrm(cfg)


@torch.no_grad()
def init_weights(parts: list[nn.Module], cfg: DlrmRun, device: torch.device) -> None:
    """Allocate on `device` and fill in place, each parameter from its own random stream."""
    model = whole(parts)
    model.to_empty(device=device)
    model.tables.init_weights(cfg.seed, cfg.model.table_init)
    linears = _linears(model)
    for name, linear in linears.items():
        random = generator(device, cfg.seed, name)
        is_output = linear is model.top[-1]
        _INITS[cfg.model.init](linear, random, is_output)
    # The columns for the zeros that pad the interaction must not matter.
    linears["top.0"].weight[:, width_without_zeros(cfg.model) :] = 0


def whole(parts: list[nn.Module]) -> Dlrm:
    """The model of a rank that owns all of it."""
    (model,) = parts
    if not isinstance(model, Dlrm):
        raise TypeError(f"Expected a Dlrm, received a {type(model).__name__}.")
    return model


def _linears(model: Dlrm) -> dict[str, nn.Linear]:
    return {name: m for name, m in model.named_modules() if isinstance(m, nn.Linear)}


# --- the documented initialisations of the MLPs


def _init_nvidia_tf2(linear: nn.Linear, random: torch.Generator, is_output: bool) -> None:
    """Glorot normal as Keras draws it: truncated at 2 sigma, rescaled to keep the variance."""
    sigma = _glorot_sigma(linear) / 0.87962566103423978
    nn.init.trunc_normal_(linear.weight, 0.0, sigma, -2 * sigma, 2 * sigma, generator=random)
    _init_nvidia_bias(linear, random)


def _init_nvidia_pytorch(linear: nn.Linear, random: torch.Generator, is_output: bool) -> None:
    """Plain Glorot normal; the output layer keeps PyTorch's own initialisation."""
    if is_output:
        return _init_torchrec(linear, random, is_output)
    linear.weight.normal_(0.0, _glorot_sigma(linear), generator=random)
    _init_nvidia_bias(linear, random)


def _init_torchrec(linear: nn.Linear, random: torch.Generator, is_output: bool) -> None:
    """PyTorch's own: weight and bias uniform within +-sqrt(1 / fan_in)."""
    bound = max(linear.in_features, 1) ** -0.5
    linear.weight.uniform_(-bound, bound, generator=random)
    linear.bias.uniform_(-bound, bound, generator=random)


def _glorot_sigma(linear: nn.Linear) -> float:
    sigma: float = (2.0 / (linear.in_features + linear.out_features)) ** 0.5
    return sigma


def _init_nvidia_bias(linear: nn.Linear, random: torch.Generator) -> None:
    linear.bias.normal_(0.0, linear.out_features**-0.5, generator=random)


_INITS = {
    "nvidia_tf2": _init_nvidia_tf2,
    "nvidia_pytorch": _init_nvidia_pytorch,
    "torchrec": _init_torchrec,
}
