"""How Llama-3 is cut: pipeline stages, then tensor parallel, recompute, compile, data parallel.

Each step is PyTorch's own: `torch.distributed.pipelining` runs the stages, DTensor plans split
the matrices (and the sequence between them), FSDP2 shares out weights and optimiser states.
"""

import copy
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed._composable.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from trainmark.distributed.mesh import Mesh
from trainmark.kernels.fp8_linear import use_fp8
from trainmark.training.precision import compute_dtype
from trainmark.workloads.llama3.model import Head, Llama
from trainmark.workloads.llama3.runs import LlamaRun
from trainmark.workloads.llama3.stages import layers_of, num_stages, stages_of


def parallelize(model: nn.Module, mesh: Mesh, cfg: LlamaRun) -> list[nn.Module]:
    """This rank's stages of the model, still on the meta device."""
    if not isinstance(model, Llama):
        raise TypeError(f"Expected a Llama, received a {type(model).__name__}.")
    parts = [_stage(model, index, cfg) for index in stage_indices(mesh, cfg)]
    for part in parts:
        if cfg.precision == "fp8":
            use_fp8(part.layers)
        if mesh.axes.get("tp", 1) > 1:
            _split_tensors(part, mesh.device_mesh["tp"])
        _recompute(part, cfg.recompute)
        if cfg.compile:
            for block in part.layers.values():
                block.compile()
        if mesh.dp_size > 1:
            _share_out(part, mesh.device_mesh["dp"], cfg)
    return list(parts)


# --- pipeline


def stage_indices(mesh: Mesh, cfg: LlamaRun) -> list[int]:
    """Which stages this rank has: with two of them, one from each half of the model."""
    return list(stages_of(cfg, mesh.coordinate("pp")))


def _stage(model: Llama, index: int, cfg: LlamaRun) -> Llama:
    """A copy of the model with the parts of one stage."""
    stages = num_stages(cfg)
    kept = layers_of(cfg)[index]
    stage = copy.deepcopy(model)
    stage.layers = nn.ModuleDict({str(i): stage.layers[str(i)] for i in kept})
    if index > 0:
        stage.embed_tokens = None
    if index < stages - 1:
        stage.norm = stage.lm_head = None
    return stage


# --- tensor parallel, with the sequence split wherever a whole row of D is needed


def _split_tensors(part: Llama, mesh: Any) -> None:
    sequence = Shard(1)
    block: dict[str, ParallelStyle] = {
        "input_layernorm": SequenceParallel(),
        "self_attn": PrepareModuleInput(
            input_layouts=(sequence, None, None), desired_input_layouts=(Replicate(), None, None)
        ),
        "self_attn.q_proj": ColwiseParallel(),
        "self_attn.k_proj": ColwiseParallel(),
        "self_attn.v_proj": ColwiseParallel(),
        "self_attn.o_proj": RowwiseParallel(output_layouts=sequence),
        "post_attention_layernorm": SequenceParallel(),
        "mlp": PrepareModuleInput(input_layouts=(sequence,), desired_input_layouts=(Replicate(),)),
        "mlp.gate_proj": ColwiseParallel(),
        "mlp.up_proj": ColwiseParallel(),
        "mlp.down_proj": RowwiseParallel(output_layouts=sequence),
    }
    for one in part.layers.values():
        parallelize_module(one, mesh, block)
    ends: dict[str, ParallelStyle] = {}
    if part.embed_tokens is not None:
        ends["embed_tokens"] = RowwiseParallel(input_layouts=Replicate(), output_layouts=sequence)
    if part.lm_head is not None:
        ends |= {"norm": SequenceParallel(), "lm_head": VocabParallel()}
    parallelize_module(part, mesh, ends)


class VocabParallel(ParallelStyle):
    """The head: rows of its weight on each rank, the sequence gathered before it."""

    def _apply(self, module: nn.Module, device_mesh: Any) -> nn.Module:
        if not isinstance(module, Head):
            raise TypeError(f"VocabParallel is for Head, not for {type(module).__name__}.")
        weight = distribute_tensor(module.weight, device_mesh, [Shard(0)])
        module.register_parameter("weight", nn.Parameter(weight))
        module.vocab_group = device_mesh.get_group()
        module.register_forward_pre_hook(partial(self._gather, device_mesh))
        return module

    @staticmethod
    def _gather(mesh: Any, module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        x = inputs[0]
        if not isinstance(x, DTensor):
            x = DTensor.from_local(x, mesh, [Shard(1)], run_check=False)
        # Every rank's gradient covers its part of the vocabulary: their sum is scattered back.
        whole = x.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])
        return (whole, *inputs[1:])


# --- recompute


def _recompute(part: Llama, mode: str) -> None:
    if mode == "none":
        return
    selective = partial(create_selective_checkpoint_contexts, _policy)
    contexts: dict[str, Any] = {"context_fn": selective} if mode == "selective" else {}
    for name, block in part.layers.items():
        part.layers[name] = checkpoint_wrapper(block, preserve_rng_state=False, **contexts)


def _policy(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Keep what is expensive to compute again: GEMMs and attention."""
    is_expensive = any(word in str(operation) for word in ("mm", "attention"))
    return CheckpointPolicy.MUST_SAVE if is_expensive else CheckpointPolicy.PREFER_RECOMPUTE


# --- data parallel


def _share_out(part: Llama, mesh: Any, cfg: LlamaRun) -> None:
    """FSDP2. `zero1` keeps the gathered weights until the optimiser steps."""
    policy = MixedPrecisionPolicy(
        param_dtype=compute_dtype(cfg.precision),
        reduce_dtype=torch.float32,
        cast_forward_inputs=False,  # the rotary angles stay fp32
    )
    options: dict[str, Any] = {
        "mesh": mesh,
        "mp_policy": policy,
        "reshard_after_forward": cfg.data_parallel == "fsdp",
    }
    for module in (part.embed_tokens, *part.layers.values(), part.lm_head):
        if module is not None:
            fully_shard(module, **options)
    fully_shard(part, **options)
