"""Llama-3's stages under PyTorch's pipeline schedules."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B

from trainmark.config import filled
from trainmark.distributed.mesh import Mesh
from trainmark.training.precision import compute_dtype
from trainmark.workloads.llama3.parallelize import stage_indices
from trainmark.workloads.llama3.runs import LlamaRun
from trainmark.workloads.llama3.stages import num_stages


class Pipeline:
    """This rank's stages and the schedule that runs them."""

    def __init__(self, parts: list[nn.Module], mesh: Mesh, cfg: LlamaRun) -> None:
        self._parts, self._mesh, self._cfg = parts, mesh, cfg
        self._indices, self._stages = stage_indices(mesh, cfg), num_stages(cfg)
        self._micro_batches = filled(cfg.accumulate)
        self._factor: Tensor | float = 1.0
        stages: list[Any] = [
            self._stage(part, index) for part, index in zip(parts, self._indices, strict=True)
        ]
        options: dict[str, Any] = {"loss_fn": self._loss, "scale_grads": False}
        self._schedule: Any = (
            Schedule1F1B(stages[0], self._micro_batches, **options)
            if len(stages) == 1
            else ScheduleInterleaved1F1B(stages, self._micro_batches, **options)
        )

    @property
    def _has_last(self) -> bool:
        return self._indices[-1] == self._stages - 1

    def _stage(self, part: nn.Module, index: int) -> PipelineStage:
        # Shapes are given: finding them out would cost an exchange before the first step.
        tokens_BS, hidden_BSD = self._examples(filled(self._cfg.micro_batch), "meta")
        hidden_BSD.requires_grad_()  # so that its gradient travels back
        is_last = index == self._stages - 1
        return PipelineStage(
            part,
            index,
            self._stages,
            self._mesh.device,
            input_args=(tokens_BS if index == 0 else hidden_BSD,),
            output_args=(
                torch.empty(1, device="meta", requires_grad=True) if is_last else hidden_BSD,
            ),
            group=self._mesh.group("pp"),
        )

    def _examples(self, batch: int, device: Any) -> tuple[Tensor, Tensor]:
        cfg = self._cfg
        tokens_BS = torch.empty(batch, cfg.sequence, dtype=torch.long, device=device)
        local_sequence = cfg.sequence // self._mesh.axes.get("tp", 1)
        hidden_BSD = torch.empty(
            batch,
            local_sequence,
            cfg.model.hidden,
            dtype=compute_dtype(cfg.precision),
            device=device,
        )
        return tokens_BS, hidden_BSD

    def _loss(self, output: Tensor, target: Tensor) -> Tensor:
        # The last stage gives the loss itself: its targets come with its input.
        return output.sum() * self._factor

    def step(self, tokens_BS: Tensor, targets_BS: Tensor, scale: Tensor | float) -> Tensor:
        """Forward and backward of all micro-batches. Returns their mean loss; 0 elsewhere."""
        self._factor = scale / self._micro_batches
        losses: list[Tensor] = []
        inputs = (tokens_BS,) if self._indices[0] == 0 else ()
        target = targets_BS if self._has_last else None
        self._schedule.step(
            *inputs, target=target, losses=losses, return_outputs=False, targets_BS=targets_BS
        )
        if not self._has_last:
            return torch.zeros((), device=self._mesh.device)
        return torch.stack([loss.detach() for loss in losses]).sum() / scale

    def loss(self, tokens_BS: Tensor, targets_BS: Tensor) -> Tensor:
        """The mean loss without gradients: one batch, handed from stage to stage."""
        group, pp = self._mesh.group("pp"), self._mesh.axes["pp"]
        _, x_BSD = self._examples(len(tokens_BS), self._mesh.device)
        loss = torch.zeros(1, device=self._mesh.device)
        for part, index in zip(self._parts, self._indices, strict=True):
            if index > 0:
                dist.recv(x_BSD, group=group, group_src=(index - 1) % pp)
            output = part(tokens_BS if index == 0 else x_BSD, targets_BS)
            if index == self._stages - 1:
                loss = output.float()
            else:
                dist.send(output.contiguous(), group=group, group_dst=(index + 1) % pp)
        dist.broadcast(loss, group=group, group_src=(self._stages - 1) % pp)
        return loss.sum()
