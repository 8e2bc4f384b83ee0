"""DLRM trains as TorchRec's models do from the same weights, whatever the interaction is.

TorchRec's `DLRM_DCN` and `DLRM_Projection` as they are. Full rank and concatenation, which it has
no model for, are its `CrossNet`, or nothing at all, in the place of the interaction.
"""

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

from tests import small
from tests.small import config, trainer
from trainmark.workloads.dlrm.data import ClickBatch, build_data
from trainmark.workloads.dlrm.runs import DlrmRun, Optimizer
from trainmark.workloads.dlrm.step import DlrmTrainer

pytest.importorskip("torchrec")

from torchrec.models.dlrm import DLRM, DLRM_DCN, DLRM_Projection, InteractionDCNArch, OverArch
from torchrec.modules.crossnet import CrossNet
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

STEPS = 50
CASES: dict[str, dict[str, Any]] = {
    "dcn": {"interaction": "dcn", "cross_layers": 3, "cross_rank": 5},
    "dcn, full rank": {"interaction": "dcn", "cross_layers": 2, "cross_rank": "full"},
    "projection": {"interaction": "projection", "branch1_mlp": (12, 24), "branch2_mlp": (16,)},
    "cat": {"interaction": "cat"},
}
TABLES, DIM = len(small.TABLE_ROWS), 8


def peer_of(case: str) -> DLRM:
    """TorchRec's model of the same sizes."""
    tables = [
        EmbeddingBagConfig(
            name=f"t{i}", embedding_dim=DIM, num_embeddings=n, feature_names=[f"{i}"]
        )
        for i, n in enumerate(small.TABLE_ROWS)
    ]
    settings: dict[str, Any] = {
        "embedding_bag_collection": EmbeddingBagCollection(tables=tables),
        "dense_in_features": 13,
        "dense_arch_layer_sizes": [16, DIM],
        "over_arch_layer_sizes": [16, 1],
    }
    if case == "dcn":
        return DLRM_DCN(**settings, dcn_num_layers=3, dcn_low_rank_dim=5)
    if case == "projection":
        branches = {
            "interaction_branch1_layer_sizes": [12, 24],
            "interaction_branch2_layer_sizes": [16],
        }
        return DLRM_Projection(**settings, **branches)
    width = (TABLES + 1) * DIM
    model = DLRM(**settings)
    cross = CrossNet(width, 2) if case == "dcn, full rank" else nn.Identity()
    model.inter_arch = InteractionDCNArch(TABLES, cross)
    model.over_arch = OverArch(width, [16, 1])
    return model


@torch.no_grad()
def take_weights(peer: DLRM, built: DlrmTrainer) -> None:
    weights = built.weights()
    for name, parameter in peer.named_parameters():
        parameter.copy_(weights[ours(name)].view(parameter.shape))


def ours(name: str) -> str:
    """What a parameter of TorchRec's is called here."""
    parts = name.split(".")
    if name.startswith("sparse_arch"):
        return f"tables.{parts[-2].removeprefix('t')}.weight"
    if name.startswith("dense_arch"):
        return f"bottom.{2 * int(parts[-3])}.{parts[-1]}"
    if name.startswith("over_arch"):  # its last layer is no perceptron
        is_last = parts[-2] == "1" and "_mlp" not in parts
        return f"top.{2 if is_last else 2 * int(parts[-3])}.{parts[-1]}"
    if "interaction_branch" in name:
        branch = parts[1].removeprefix("interaction_")
        return f"interaction.{branch}.{2 * int(parts[-3])}.{parts[-1]}"
    kind = {"W_kernels": "up.weight", "V_kernels": "down.weight", "bias": "up.bias"}
    kind["kernels"] = "up.weight"
    return f"interaction.cross.{parts[-1]}.{kind[parts[-2]]}"


def peer_loss(peer: DLRM, batch: ClickBatch) -> Tensor:
    rows = {f: ids for g in batch.groups for f, ids in zip(g.features, g.ids, strict=True)}
    values = torch.cat([rows[feature].long() for feature in range(TABLES)])
    sparse = KeyedJaggedTensor.from_lengths_sync(
        keys=[str(i) for i in range(TABLES)], values=values, lengths=torch.ones_like(values)
    )
    logits_B1 = peer(batch.numerical.float(), sparse)
    return binary_cross_entropy_with_logits(logits_B1.squeeze(1), batch.labels.float())


def run_of(case: str) -> DlrmRun:
    return config(
        model=dataclasses.replace(small.config().model, **CASES[case]),
        optimizer=Optimizer(name="sgd"),
        global_batch=64,
        lr=0.05,
    )


@pytest.mark.parametrize("case", CASES)
def test_fifty_steps_from_the_same_weights(case: str) -> None:
    built, peer = trainer(run_of(case)), peer_of(case)
    names = {ours(name) for name, _ in peer.named_parameters()}
    assert names == built.weights().keys()
    take_weights(peer, built)
    optimizer = torch.optim.SGD(peer.parameters(), lr=built.cfg.lr)
    batches = list(build_data(built.cfg, "train", 0, 1))[:STEPS]
    assert len(batches) == STEPS
    losses = []
    for batch in batches:
        optimizer.zero_grad()
        expected = peer_loss(peer, batch)
        expected.backward()
        optimizer.step()
        loss, _ = built.step(built.prepare(batch), built.cfg.lr)
        assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
        losses.append(loss.item())
    assert len(set(losses)) == STEPS
    weights = built.weights()
    for name, parameter in peer.named_parameters():
        found = weights[ours(name)].view(parameter.shape)
        torch.testing.assert_close(found, parameter, rtol=1e-5, atol=1e-5)
