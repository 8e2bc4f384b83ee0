"""DLRM, written for one device: bottom MLP, interaction with the embedding rows, top MLP.

Shapes: B samples, N numerical features, F categorical features, D embedding width.
"""

import copy
import warnings
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from trainmark.config import filled
from trainmark.embeddings.engine import EmbeddingEngine, LocalEngine
from trainmark.embeddings.tables.update import UpdateRule, make_rule
from trainmark.kernels.click_loss import click_loss
from trainmark.kernels.graph import Beside
from trainmark.training.dropout import Dropout
from trainmark.training.seeding import drawing_device, generator
from trainmark.workloads.dlrm.interactions import CrossLinear, make_interaction
from trainmark.workloads.dlrm.mlp import Mlp
from trainmark.workloads.dlrm.runs import DlrmRun


class Dlrm(nn.Module):
    """Numerical features and prepared ids in, click logits out.

    Without numerical features the bottom MLP still gives its one vector, a learned constant.
    """

    def __init__(self, cfg: DlrmRun) -> None:
        super().__init__()
        model = cfg.model
        self.bottom = Mlp(
            [model.numerical_features, *model.bottom_mlp], last_relu=model.bottom_output == "relu"
        )
        self.top = Mlp([model.interaction_width, *model.top_mlp], last_relu=False)
        self.bottom.dropout = Dropout(filled(model.dropout), cfg.seed, "dropout", "bottom")
        self.top.dropout = Dropout(filled(model.dropout), cfg.seed, "dropout", "top")
        self.interaction_dropout = Dropout(
            model.interaction_dropout, cfg.seed, "dropout", "interaction"
        )
        self.tables: EmbeddingEngine = LocalEngine(
            model.table_rows, model.embedding_dim, table_rule(cfg)
        )
        self.interaction = make_interaction(cfg)
        self.shape = model
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
        mlps = (self.bottom, *self.interaction.mlps, self.top)
        return [self.interaction_dropout, *(mlp.dropout for mlp in mlps)]

    def _interacted(self, numerical_BN: Tensor, prepared: Any) -> Tensor:
        """[B, M] what the top MLP reads."""
        x_BD = self.bottom(numerical_BN)
        x_BM: Tensor = self.interaction(self.tables, prepared, x_BD)
        done = self.top_gradients_done
        if done is not None and x_BD.requires_grad:  # after the tables' own hooks
            x_BD.register_hook(lambda _: done())
        if self.shape.interaction == "dot_and_inputs":
            numbers = numerical_BN[:, : self.shape.numerical_features]  # without zeros behind them
            x_BM = torch.cat([x_BM, numbers.to(x_BM.dtype)], dim=1)
            x_BM = pad(x_BM, (0, self.shape.interaction_width - x_BM.shape[1]))
        return self.interaction_dropout(x_BM)

    def cast_dense(self, dtype: torch.dtype) -> None:
        """For prediction: keep weights in the type that every call would cast them to."""
        self.top.settle(dtype)
        for part in (self.bottom, self.interaction):
            part.to(dtype)

    def compile_dense(self) -> None:
        """Compile everything but the lookup, whose gradient is not autograd's business."""
        for mlp in (self.bottom, self.top):
            if mlp.fused_dtype is None:  # else there is nothing left to compile
                mlp.compile()
        self.interaction.plain = torch.compile(self.interaction.plain)


def table_rule(cfg: DlrmRun) -> UpdateRule:
    """How the rows of tables are updated."""
    optimizer = cfg.optimizer
    return make_rule(
        optimizer.name,
        eps=filled(optimizer.eps),
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
        drawing = drawing_device(linear.weight.numel(), device)
        drawn, random = copy.deepcopy(linear).to(drawing), generator(drawing, cfg.seed, name)
        if isinstance(drawn, CrossLinear):
            drawn.init_weights(random)
        else:
            _INITS[cfg.model.init](drawn, random, linear is model.top[-1])
        linear.load_state_dict(drawn.state_dict())
    # The columns for the zeros that pad the interaction must not matter.
    linears["top.0"].weight[:, cfg.model.width_without_zeros :] = 0


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
