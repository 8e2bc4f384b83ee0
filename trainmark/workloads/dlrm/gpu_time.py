"""How long the kernels of a DLRM step take on one GPU, one after another.

    forward   gather and interaction, which are one kernel; bags are added up by one before it
    products  those of the MLPs
    passes    the interaction's backward pass, passes over activations
    starts    many small kernels, the optimiser of the MLPs among them; waiting for the host
    update    the rows of the tables

Constants are those of one H200: each was fitted to its own kernels in 17 configurations, `STRETCH`
and `SORTED` to whole steps; 23 others test them (docs/predictions.md). Bytes are over the rate of a
copy; seconds are the same on every GPU, an assumption.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from trainmark.config import element_bytes, filled
from trainmark.embeddings.placement.access import AccessProfile
from trainmark.embeddings.placement.costs import MIN_ACCESS, STATE_BYTES
from trainmark.hardware.products import Kind, Rates, product_s
from trainmark.workloads.dlrm.network import Layer
from trainmark.workloads.dlrm.runs import DlrmRun, Model
from trainmark.workloads.dlrm.sizes import stored_rows

LARGE_LAYER = 2**17
"""Weights from which on a layer's kernels are fused, or in fp8: as in kernels/."""
FP8_STEP = 16

# The interaction. V vectors of a sample, padded to a power of 2, of width D: for each byte of the
# vectors, of the padded square of their products, and of vectors of two stores instead of one.
VECTOR_BYTES, PAIR_BYTES, TWO_STORES = 1.21, 0.71, 0.73
BACKWARD = 1.79  # times the forward pass: gradients of as many rows are written
# In fp32 it computes without tensor cores: operations for each number of the padded vectors, and
# for each of them and each vector.
FP32_FORWARD, FP32_BACKWARD = (606.0, 0.71), (85.0, 4.32)

# The update. Bytes for each byte of a gradient row, and of a changed row (read and written, some
# of it in the cache); for each looked-up row; for each whose rule or format needs a sum over it;
# for each of Adagrad's; for each changed row that several warps share and must sum over.
GRADIENT_ROW, CHANGED_ROW = 1.53, 0.64
LOOKED_UP, SUMMED, ADAGRAD, SUMMED_WIDE = 60, 175, 219, 1520
ONE_WARP = 128  # columns
STORE_S = 20e-6  # of the first and the last kernels of a store's chain
READ_AGAIN = 0.25  # of a bag's row that was read before and may be in the cache: DLRM-DCNv2's
# The next batch's ids are sorted beside the step, which that slows, by so many bytes for each; of
# bags their places are found as well.
SORTED, SORTED_BAG = 130, 350

# Passes over activations: bytes for each byte or number.
MASKED = 3.23  # a gradient is read, masked and written
LOSS = 7.0  # the last layer, its loss and gradient, a number of what it reads
QUANTIZED, MASKED_CODES, PADDED = 6.3, 5.8, 11.1  # in fp8
BIASES = 0.47  # gradients of biases, a number of the hidden layers
WEIGHT, WEIGHT_WITH_STATE = 23.0, 72.0  # a weight of the MLPs, and what its state adds

KERNEL_S = 3e-6
"""Of the first and the last programs of a kernel, as products have them."""
STEP_S = 145e-6
"""Of small kernels, and between two steps."""
CAST_S = 30e-6
"""Of those that make 16 bits of weights and inputs."""
FP8_S = 102e-6
"""Of those that find scales."""
STATE_LAYER_S = 24e-6
"""Of those that update a layer of the MLPs which has a state."""
STRETCH, RESTS = 0.05, 0.2
"""Products in 16 bits and tf32 bring a GPU to its power limit, where it takes longer; not so where
small kernels take this share of a step."""
HOST_S = 0.25e-3
"""What a host takes to start a step: a shorter one waits for it."""


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """Seconds of a step."""

    forward: float
    products: float
    passes: float
    starts: float
    update: float

    @property
    def dense(self) -> float:
        """Of all but tables."""
        return self.products + self.passes + self.starts

    @property
    def total(self) -> float:
        return self.forward + self.dense + self.update


def gpu_time(
    cfg: DlrmRun, rates: Rates, samples: int, profiles: Sequence[AccessProfile]
) -> StepTime:
    """Of one device that has all tables; `samples` go through the model together."""
    count = filled(cfg.accumulate)
    small = _small_s(cfg, rates)
    forward = count * _interaction_s(cfg, rates, samples)
    if cfg.model.has_bags:
        forward += count * _pool_s(cfg, rates, samples, profiles)
    products = count * _layers_s(cfg, rates, samples)
    passes = count * _passes_s(cfg, rates, samples)
    passes += count * _interaction_s(cfg, rates, samples, backward=True)
    update = _update_s(cfg, rates, samples * count, profiles)
    total = forward + products + passes + update + small
    if cfg.precision in ("bf16", "fp16", "tf32"):
        products *= 1 + STRETCH * max(0.0, 1 - small / total / RESTS)
    waiting = max(0.0, HOST_S * count - (forward + products + passes + update + small))
    return StepTime(
        forward=forward, products=products, passes=passes, starts=small + waiting, update=update
    )


def forward_s(cfg: DlrmRun, rates: Rates, samples: int, profiles: Sequence[AccessProfile]) -> float:
    """Seconds of predictions on one device that has all tables: the forward part of a step."""
    total = _interaction_s(cfg, rates, samples)
    if cfg.model.has_bags:
        total += _pool_s(cfg, rates, samples, profiles)
    for layer, precision, _, _ in _layers(cfg):
        total += product_s(rates, precision, "forward", samples, layer.fan_in, layer.fan_out)
    moved = element_bytes(cfg.precision) * _read_last(cfg.model) + _moved_for_fp8(cfg) / 2
    return total + samples * moved / rates.copy


# --- the dense part


def _layers_s(cfg: DlrmRun, rates: Rates, samples: int) -> float:
    """Products of all layers but the last, which the loss takes along, and masks of their ReLUs."""
    total = 0.0
    for layer, precision, back, is_masked in _layers(cfg):
        kinds: list[Kind] = ["forward", "weight", *([back] if back else [])]
        total += sum(
            product_s(rates, precision, kind, samples, layer.fan_in, layer.fan_out)
            for kind in kinds
        )
        if is_masked and back == "input":
            size = MASKED_CODES if precision == "fp8" else MASKED * element_bytes(cfg.precision)
            total += KERNEL_S + size * samples * layer.fan_in / rates.copy
    return total


def _layers(cfg: DlrmRun) -> Iterator[tuple[Layer, str, Kind | None, bool]]:
    """Each with its precision, how its inputs' gradient is computed, and whether that is masked."""
    layers, model = cfg.model.dense_layers, cfg.model
    top = len(layers) - len(model.top_mlp)
    plain, in_fp8 = ("bf16", True) if cfg.precision == "fp8" else (cfg.precision, False)
    for place, layer in enumerate(layers[:-1]):
        large = layer.fan_in * layer.fan_out >= LARGE_LAYER
        if place >= top:
            in_fp8 = in_fp8 and large and layer.fan_out % FP8_STEP == 0
        precision = "fp8" if in_fp8 and place >= top else plain
        is_masked = 0 < place < len(model.bottom_mlp) or place > top
        is_fused = large and precision in ("bf16", "fp16") and not layer.fan_in % 8
        back: Kind = "masked" if is_masked and is_fused and not layer.fan_out % 8 else "input"
        yield layer, precision, back if place else None, is_masked


def _passes_s(cfg: DlrmRun, rates: Rates, samples: int) -> float:
    """Between the products."""
    model = cfg.model
    hidden = [*model.bottom_mlp, *model.top_mlp[:-1]]
    moved = LOSS * _read_last(model) + BIASES * sum(hidden)
    element = element_bytes(cfg.precision)
    if model.bottom_output == "relu":
        moved += element * MASKED * model.embedding_dim
    moved += element * 4 * model.interaction_activations + _moved_for_fp8(cfg)
    return samples * moved / rates.copy


def _read_last(model: Model) -> int:
    """Numbers of a sample that the last layer reads."""
    return model.top_mlp[-2] if len(model.top_mlp) > 1 else model.interaction_width


def _moved_for_fp8(cfg: DlrmRun) -> float:
    """Bytes of a sample, forward and backward: to 8 bits, and to widths that kernels like."""
    if all(precision != "fp8" for _, precision, _, _ in _layers(cfg)):
        return 0.0
    width = cfg.model.interaction_width
    padded = PADDED * 2 * width * (width % FP8_STEP != 0)
    return QUANTIZED * (width + _read_last(cfg.model)) + padded


def _small_s(cfg: DlrmRun, rates: Rates) -> float:
    """Once a step: small kernels, and the optimiser of the MLPs."""
    has_state = cfg.optimizer.name != "sgd"
    casts = element_bytes(cfg.precision) == 2
    starts = STEP_S + CAST_S * casts + FP8_S * (cfg.precision == "fp8")
    starts += STATE_LAYER_S * len(cfg.model.dense_layers) * has_state
    moved = cfg.model.dense_parameters * (WEIGHT + WEIGHT_WITH_STATE * has_state)
    return starts + moved / rates.copy


# --- tables


def _interaction_s(cfg: DlrmRun, rates: Rates, samples: int, *, backward: bool = False) -> float:
    """Of gathering rows, and of their products where these are what the top MLP reads."""
    model, element = cfg.model, element_bytes(cfg.precision)
    vectors, dim = len(model.table_rows) + 1, model.embedding_dim
    padded = max(16, 1 << (vectors - 1).bit_length())
    has_pairs = model.interaction == "dot"
    if cfg.precision == "fp32" and has_pairs:
        once, each = FP32_BACKWARD if backward else FP32_FORWARD
        operations = samples * padded * dim * (once + each * padded)
        return KERNEL_S + operations / rates.peaks["fp32"]
    two = len({row.weight for row in stored_rows(cfg)}) > 1
    moved = vectors * dim * (VECTOR_BYTES + TWO_STORES * two) + PAIR_BYTES * padded**2 * has_pairs
    return KERNEL_S + samples * element * moved * (BACKWARD if backward else 1) / rates.copy


def _pool_s(cfg: DlrmRun, rates: Rates, samples: int, profiles: Sequence[AccessProfile]) -> float:
    """Of reading the rows of every bag, and writing their sums."""
    dim, moved = cfg.model.embedding_dim, 0.0
    for profile in profiles:
        lookups = samples * profile.hotness
        first = profile.distinct((0, profile.rows), lookups)
        row = max(MIN_ACCESS, dim * profile.stored.weight)
        moved += row * (first + READ_AGAIN * (lookups - first))
        moved += samples * dim * element_bytes(cfg.precision)
    return moved / rates.copy


def _update_s(cfg: DlrmRun, rates: Rates, samples: int, profiles: Sequence[AccessProfile]) -> float:
    """Of all rows that a step looked up, duplicates first added up."""
    name, dim = cfg.optimizer.name, cfg.model.embedding_dim
    per_element, per_row = STATE_BYTES[name]
    moved = 0.0
    for profile in profiles:
        lookups = samples * profile.hotness
        changed = profile.distinct((0, profile.rows), lookups)
        row = dim * (profile.stored.weight + per_element) + per_row * 8  # of a sector of 32 bytes
        is_summed = per_row > 0 or profile.stored.scale > 0
        # A bag's gradient stays in the cache, whence its other ids read it.
        moved += samples * GRADIENT_ROW * (dim * element_bytes(cfg.precision) + 12)
        each = LOOKED_UP + (SORTED_BAG if cfg.model.has_bags else SORTED)
        each += SUMMED * is_summed + ADAGRAD * (per_element > 0)
        wide = SUMMED_WIDE * (is_summed and dim > ONE_WARP)
        moved += lookups * each + changed * (2 * CHANGED_ROW * row + wide)
    stores = len({profile.stored.weight for profile in profiles})
    return stores * STORE_S + moved / rates.copy
