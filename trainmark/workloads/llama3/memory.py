"""Bytes that a Llama-3 run needs of each pipeline rank's devices, counted without building it.

A dry run builds the model and counts the same (`LlamaTrainer.device_bytes`).
"""

from collections.abc import Iterator

from trainmark.config import element_bytes, filled
from trainmark.hardware.memory import MemoryPlan
from trainmark.workloads.llama3.flops import activation_bytes, gradients_beside_activations
from trainmark.workloads.llama3.runs import LlamaRun, axes_of
from trainmark.workloads.llama3.stages import layers_of, num_stages, stages_of

Shape = tuple[int, int]


def plan_devices(cfg: LlamaRun) -> list[MemoryPlan]:
    """The memory of a resolved run: one plan per pipeline rank, whose devices are all alike."""
    return [_of_rank(cfg, pp_rank) for pp_rank in range(axes_of(cfg)["pp"])]


def local_parameters(cfg: LlamaRun, pp_rank: int) -> int:
    """Weights that a device computes with."""
    return sum(map(_elements, _modules(cfg, pp_rank)))


def _of_rank(cfg: LlamaRun, pp_rank: int) -> MemoryPlan:
    axes = axes_of(cfg)
    modules = sorted(map(_elements, _modules(cfg, pp_rank)), reverse=True)
    gathered, stored = sum(modules), _stored_elements(cfg, pp_rank)
    computing = element_bytes(cfg.precision)
    shared = axes["dp"] > 1
    kept_as = 4 if shared and cfg.optimizer_states == "fp32" else computing
    shards = stored * kept_as
    weights = gathered * computing
    if shared and cfg.data_parallel == "fsdp" and axes["pp"] == 1:
        weights = sum(modules[:2]) * computing  # the next is fetched while one computes
        gradients = shards + modules[0] * 4  # and one is being reduced, in fp32
    elif filled(cfg.accumulate) > 1:
        gradients = gathered * 4
    else:
        gradients = gradients_beside_activations(cfg, gathered * computing)
    return MemoryPlan(
        weights=weights,
        gradients=gradients,
        optimizer=stored * _state_bytes(cfg, kept_as) + 4 + shared * shards,  # 4: the steps' count
        activations=activation_bytes(cfg, pp_rank),
    )


def _state_bytes(cfg: LlamaRun, kept_as: int) -> int:
    """Bytes per weight: its moments, and the bits that a 16-bit weight lacks."""
    if cfg.optimizer_states == "fp32":
        return 2 * 4 + (4 if kept_as < 4 else 0)
    return 2 * 2 + (1 if kept_as < 4 else 0)


def _stored_elements(cfg: LlamaRun, pp_rank: int) -> int:
    """Data-parallel ranks share out every matrix by its rows; the first has the most."""
    dp = axes_of(cfg)["dp"]
    return sum(
        -(-rows // dp) * columns for module in _modules(cfg, pp_rank) for rows, columns in module
    )


def _modules(cfg: LlamaRun, pp_rank: int) -> Iterator[list[Shape]]:
    """The shapes in each module that is gathered at a time, as a tensor-parallel rank has them."""
    model, tp = cfg.model, axes_of(cfg)["tp"]
    hidden, ends = model.hidden, (model.vocab // tp, model.hidden)
    queries, keys, ffn = (
        width // tp for width in (hidden, model.kv_heads * model.head_dim, model.ffn)
    )
    block = [
        (queries, hidden), (keys, hidden), (keys, hidden), (hidden, queries),
        (ffn, hidden), (ffn, hidden), (hidden, ffn), (hidden, 1), (hidden, 1),
    ]  # fmt: skip
    for stage in stages_of(cfg, pp_rank):
        if stage == 0:
            yield [ends]
        yield from [block] * len(layers_of(cfg)[stage])
        if stage == num_stages(cfg) - 1:
            yield [ends]
            yield [(hidden, 1)]


def _elements(module: list[Shape]) -> int:
    return sum(rows * columns for rows, columns in module)
