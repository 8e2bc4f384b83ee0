"""DistilBERT (and BERT) for one device: a sentence's tokens in, its class out.

All tokens of a batch lie one after another, padded or not: see `kernels/sentence_attention.py`.
Weights are fp32 and are cast to the computing type where they are used.

Shapes: N tokens, S sentences, E hidden width, H heads, D width of a head, C classes.
"""

import torch
from torch import Tensor, nn
from torch.nn.functional import dropout, embedding, gelu, layer_norm, linear

from trainmark.kernels.sentence_attention import attend
from trainmark.training.precision import compute_dtype
from trainmark.training.seeding import generator
from trainmark.workloads.distilbert import weights
from trainmark.workloads.distilbert.runs import SCRATCH, DistilbertRun, Model

INIT_SIGMA = 0.02


class Linear(nn.Linear):
    """A linear layer that computes in its input's type."""

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight.to(x.dtype), self.bias.to(x.dtype))


class LayerNorm(nn.LayerNorm):
    """A LayerNorm whose output has its input's type; the statistics are fp32 in any case."""

    def forward(self, x: Tensor) -> Tensor:
        shape, weight, bias = self.normalized_shape, self.weight.to(x.dtype), self.bias.to(x.dtype)
        return layer_norm(x, shape, weight, bias, self.eps)


class Embeddings(nn.Module):
    """Word and position of each token."""

    def __init__(self, model: Model, dtype: torch.dtype) -> None:
        super().__init__()
        self.words = nn.Embedding(model.vocabulary, model.hidden)
        self.positions = nn.Embedding(model.positions, model.hidden)
        self.norm = LayerNorm(model.hidden, model.layer_norm_eps)
        self._dropout, self._dtype = model.dropout, dtype

    def forward(self, ids_N: Tensor, positions_N: Tensor) -> Tensor:
        x_NE = embedding(ids_N, self.words.weight) + embedding(positions_N, self.positions.weight)
        return dropout(self.norm(x_NE), self._dropout, self.training).to(self._dtype)


class Block(nn.Module):
    """Attention within each sentence, then a feed-forward network on each token."""

    def __init__(self, model: Model, longest: int, row_length: int | None) -> None:
        super().__init__()
        hidden = model.hidden
        self.qkv = Linear(hidden, 3 * hidden)
        self.attention_output = Linear(hidden, hidden)
        self.attention_norm = LayerNorm(hidden, model.layer_norm_eps)
        self.expand = Linear(hidden, model.feed_forward)
        self.contract = Linear(model.feed_forward, hidden)
        self.output_norm = LayerNorm(hidden, model.layer_norm_eps)
        self._heads, self._dropout = model.heads, model.dropout
        self._attention_dropout = model.attention_dropout
        # BERT drops here too; DistilBERT does not.
        self._after_attention = model.dropout if model.layout == "bert" else 0.0
        self._longest, self._row_length = longest, row_length

    def forward(self, x_NE: Tensor, bounds: Tensor, keep: Tensor | None = None) -> Tensor:
        """`keep`: the only tokens whose output is wanted."""
        attended_NE = self._attend(x_NE, bounds)
        if keep is not None:
            x_NE, attended_NE = x_NE[keep], attended_NE[keep]
        attended_NE = self.attention_output(attended_NE)
        x_NE = self.attention_norm(x_NE + self._drop(attended_NE, self._after_attention))
        changed_NE = self.contract(gelu(self.expand(x_NE)))
        return self.output_norm(x_NE + self._drop(changed_NE, self._dropout))

    def _attend(self, x_NE: Tensor, bounds: Tensor) -> Tensor:
        qkv_N3HD = self.qkv(x_NE).unflatten(1, (3, self._heads, -1))
        attended_NHD = attend(
            qkv_N3HD,
            bounds,
            longest=self._longest,
            row_length=self._row_length,
            dropout=self._attention_dropout if self.training else 0.0,
        )
        return attended_NHD.flatten(1)

    def _drop(self, x: Tensor, probability: float) -> Tensor:
        return dropout(x, probability, self.training) if probability else x


class Head(nn.Module):
    """The class of a sentence, from its first token."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.hidden = Linear(model.hidden, model.hidden)
        self.output = Linear(model.hidden, model.labels)
        self._activation = torch.tanh if model.layout == "bert" else torch.relu
        self._dropout = model.head_dropout

    def forward(self, x_SE: Tensor) -> Tensor:
        x_SE = dropout(self._activation(self.hidden(x_SE)), self._dropout, self.training)
        return self.output(x_SE).float()


class SentenceClassifier(nn.Module):
    """Tokens in, class logits out; padded or packed is a matter of how the tokens lie."""

    def __init__(self, cfg: DistilbertRun) -> None:
        super().__init__()
        model, packed = cfg.model, cfg.mode == "packed"
        row_length = None if packed else cfg.sequence_length
        longest = cfg.longest if packed and cfg.longest else cfg.sequence_length
        self.embeddings = Embeddings(model, compute_dtype(cfg.precision))
        self.blocks = nn.ModuleList(Block(model, longest, row_length) for _ in range(model.layers))
        self.head = Head(model)
        # Only a sentence's first token reaches the head. A padded run computes the others all the
        # same, as the published one does.
        self._prunes_last_block = packed

    def forward(
        self, ids_N: Tensor, positions_N: Tensor, bounds: Tensor, first_S: Tensor
    ) -> Tensor:
        """[S, C] logits of the sentences whose first tokens are `first_S`."""
        x_NE = self.embeddings(ids_N, positions_N)
        *blocks, last = self.blocks
        for block in blocks:
            x_NE = block(x_NE, bounds)
        if self._prunes_last_block:
            return self.head(last(x_NE, bounds, first_S))
        return self.head(last(x_NE, bounds)[first_S])

    def cast_blocks(self, dtype: torch.dtype) -> None:
        """For prediction: keep weights in the type that every call would cast them to."""
        self.blocks.to(dtype)
        self.head.to(dtype)

    def compile_parts(self) -> None:
        """Compile each block rather than the whole: equal blocks are compiled once.

        PyTorch's own dropout kernel draws four numbers at a time, the compiler's only one.
        """
        for part in (self.embeddings, *self.blocks):
            part.compile(dynamic=False, options={"fallback_random": True})


def build_model(cfg: DistilbertRun) -> SentenceClassifier:
    """The model on the meta device."""
    with torch.device("meta"):
        return SentenceClassifier(cfg)


@torch.no_grad()
def init_weights(parts: list[SentenceClassifier], cfg: DistilbertRun, device: torch.device) -> None:
    """Allocate on `device`; fill from random streams, then from the pretrained weights if any."""
    (model,) = parts
    model.to_empty(device=device)
    for name, parameter in model.named_parameters():
        if "norm" in name:
            parameter.fill_(1.0 if name.endswith("weight") else 0.0)
        elif name.endswith("bias"):
            parameter.zero_()
        else:
            parameter.normal_(0.0, INIT_SIGMA, generator=generator(device, cfg.seed, name))
    if cfg.weights not in (None, SCRATCH):
        weights.load(str(cfg.weights), cfg.model, dict(model.named_parameters()))
