"""The published DLRM in plain PyTorch, on the planted Terabyte's batches, at the published rate.

An independent check of the network and its optimiser: nothing of ours but the rows. Written from
NVIDIA's description: ReLU MLPs, Glorot-normal weights, biases N(0, 1 / outputs), tables uniform in
+-sqrt(1 / rows), dot products of all pairs, plain SGD, a linear warm-up over 8,000 steps.

    python benchmarks/terabyte_plain.py --distinct-rows 2097152 --steps 4000

prints the mean loss of every 100 steps, until one is not finite. With --distinct-rows the batches
repeat after so many rows, as those of `--data synthetic` did (docs/terabyte.md).
"""

import argparse
import itertools
import time

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

from trainmark.clickdata.terabyte import THRESHOLD_15
from trainmark.kernels.terabyte_rows import RowsOnDevice, make_rows
from trainmark.workloads.dlrm.terabyte import on_device

BATCH, WIDTH, LR, WARMUP = 65536, 128, 24.0, 8000


def mlp(*widths: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for inputs, outputs in itertools.pairwise(widths):
        linear = nn.Linear(inputs, outputs)
        nn.init.xavier_normal_(linear.weight)
        nn.init.normal_(linear.bias, std=(1 / outputs) ** 0.5)
        layers += [linear, nn.ReLU()]
    return nn.Sequential(*layers)


class PlainDlrm(nn.Module):
    def __init__(self, features: int) -> None:
        super().__init__()
        pairs = (features + 1) * features // 2
        self.bottom = mlp(13, 512, 256, WIDTH)
        self.top = mlp(WIDTH + pairs, 1024, 1024, 512, 256, 1)[:-1]  # no ReLU at the end
        self.lower = torch.tril_indices(features + 1, features + 1, -1)

    def forward(self, numerical: Tensor, rows: Tensor) -> Tensor:
        dense = self.bottom(numerical)
        vectors = torch.cat([dense[:, None], rows], dim=1)
        products = vectors @ vectors.transpose(1, 2)
        lower = products[:, self.lower[0], self.lower[1]]
        logits: Tensor = self.top(torch.cat([dense, lower], dim=1)).squeeze(1)
        return logits


def train(steps: int, distinct_rows: int | None, device: torch.device) -> None:
    torch.manual_seed(0)
    torch.backends.cuda.matmul.allow_tf32 = True
    sizes = torch.tensor(THRESHOLD_15, device=device)
    first_row = sizes.cumsum(0) - sizes
    table = torch.empty(int(sizes.sum()), WIDTH, device=device)
    for start, size in zip(first_row.tolist(), THRESHOLD_15, strict=True):
        table[start : start + size].uniform_(-((1 / size) ** 0.5), (1 / size) ** 0.5)
    model = PlainDlrm(len(sizes)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    log = on_device(THRESHOLD_15, device)
    batch, losses, began = RowsOnDevice.empty(BATCH, log), [], time.perf_counter()
    for step in range(steps):
        row = step * BATCH % distinct_rows if distinct_rows else step * BATCH
        make_rows(log, row, batch)
        ids = batch.ids.T + first_row
        rows = table[ids].requires_grad_()
        loss = binary_cross_entropy_with_logits(
            model(batch.numerical.float(), rows), batch.labels.float()
        )
        optimizer.zero_grad()
        loss.backward()
        assert rows.grad is not None
        lr = LR * min(step / WARMUP, 1)
        optimizer.param_groups[0]["lr"] = lr
        optimizer.step()
        table.index_add_(0, ids.reshape(-1), rows.grad.reshape(-1, WIDTH), alpha=-lr)
        losses.append(loss.detach())
        if step % 100 == 99:
            mean = torch.stack(losses).mean().item()
            print(
                f"step {step + 1} loss {mean:.5f} lr {lr:.3f} {time.perf_counter() - began:.1f} s"
            )
            losses.clear()
            if not mean < float("inf"):
                return


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=4000)
    parser.add_argument("--distinct-rows", type=int)
    given = parser.parse_args()
    train(given.steps, given.distinct_rows, torch.device("cuda"))


if __name__ == "__main__":
    main()
