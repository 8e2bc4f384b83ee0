"""Predictions in one pass are those of plain torch, layer by layer."""

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from trainmark.kernels.compiled import INSTALLED
from trainmark.workloads.dlrm import fast_prediction, one_pass, standalone

if not INSTALLED:
    pytest.skip("needs numba (extra `fast`)", allow_module_level=True)

from trainmark.kernels import cpu_scores


def model(
    bottom: tuple[int, ...], top: tuple[int, ...], *, numbers: int = 5, **more: Any
) -> standalone.Dlrm:
    """An exported model with random weights."""
    random = torch.Generator().manual_seed(len(bottom) + top[0])
    rows, dim = [7, 3, 1, 90], bottom[-1]
    width = dim + 10  # 5 vectors have 10 products, and zeros fill up
    width += 4 * dim + numbers if more.get("interaction") == "dot_and_inputs" else 0
    width = -(-width // 8) * 8
    config = {"table_rows": rows, "bottom_mlp": bottom, "top_mlp": top, "logit_offset": -0.5} | more
    tensors = {
        f"tables.{i}.weight": torch.randn(n, dim, generator=random) for i, n in enumerate(rows)
    }
    for name, widths in (("bottom", (numbers, *bottom)), ("top", (width, *top))):
        for layer, (inputs, outputs) in enumerate(itertools.pairwise(widths)):
            scale = max(inputs, 1) ** -0.5
            tensors[f"{name}.{2 * layer}.weight"] = scale * torch.randn(
                outputs, inputs, generator=random
            )
            tensors[f"{name}.{2 * layer}.bias"] = torch.randn(outputs, generator=random)
    return standalone.Dlrm(config, tensors)


def in_one_pass(plain: standalone.Dlrm) -> one_pass.Logits | None:
    """What computes an exported model's logits; None if it takes another way."""
    arrays = {name.replace("_", "."): one.numpy() for name, one in plain.named_buffers()}
    names = {"float32": "F32", "float16": "F16"}
    kinds = {name: (names[str(one.dtype)], one.shape) for name, one in arrays.items()}
    suits = one_pass.suits(plain.config, kinds)
    return one_pass.logits_of(plain.config, arrays) if suits else None


def inputs(samples: int, numbers: int = 5) -> tuple[Any, Any]:
    random = np.random.default_rng(samples)
    ids = np.stack([random.integers(0, rows, samples) for rows in (7, 3, 1, 90)], 1)
    return random.standard_normal((samples, numbers)).astype(np.float32), ids


def expected(plain: standalone.Dlrm, numbers: Any, ids: Any) -> Any:
    """By the exported model's own code."""
    return torch.logit(plain(torch.from_numpy(numbers), torch.from_numpy(ids)).double()).numpy()


@pytest.mark.parametrize("interaction", ["dot", "dot_and_inputs"])
@pytest.mark.parametrize("samples", [1, 2, 64, 300, 1000])
@pytest.mark.parametrize(
    ("bottom", "top", "numbers", "told"),
    [
        ((16,), (1,), 5, {"bottom_output": "linear"}),
        ((33, 8), (17, 5, 1), 5, {"bottom_output": "linear"}),
        ((8,), (9, 1), 0, {"bottom_output": "relu"}),
        ((128, 64), (256, 64, 1), 5, {}),  # as earlier versions exported it: a ReLU
    ],
)
def test_logits(
    bottom: tuple[int, ...],
    top: tuple[int, ...],
    numbers: int,
    told: dict[str, str],
    samples: int,
    interaction: str,
) -> None:
    plain = model(bottom, top, numbers=numbers, interaction=interaction, **told)
    logits = in_one_pass(plain)
    assert logits is not None
    given = inputs(samples, numbers)
    found = logits(*given)
    assert found.shape == (samples,)
    told = {"bottom_output": "relu"} | told
    reference = model(bottom, top, numbers=numbers, interaction=interaction, **told)
    np.testing.assert_allclose(found, expected(reference, *given), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("interaction", ["dot", "dot_and_inputs"])
@pytest.mark.parametrize("threads", [1, 3])
def test_tiles_of_every_size(
    threads: int, interaction: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last tile of a batch has fewer samples, and threads have some of them each."""
    monkeypatch.setattr(cpu_scores, "ALONE", 0)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    plain = model((40, 64), (100, 33, 1), interaction=interaction)
    logits = in_one_pass(plain)
    assert logits is not None
    numbers, ids = inputs(601)
    reference = expected(plain, numbers, ids)
    for samples in (*range(1, 19), 65, 601):
        found = logits(numbers[-samples:], ids[-samples:])
        np.testing.assert_allclose(found, reference[-samples:], rtol=1e-4, atol=1e-4)


def test_a_nan_stays_one_and_its_own() -> None:
    """As of torch's ReLU, and in its own row only."""
    logits = in_one_pass(model((16, 8), (9, 1)))
    assert logits is not None
    numbers, ids = inputs(20)
    numbers[3, 2] = np.nan
    assert np.flatnonzero(np.isnan(logits(numbers, ids))).tolist() == [3]


@pytest.mark.parametrize(("row", "feature", "value"), [(0, 0, 7), (299, 3, 90), (4, 2, -1)])
def test_an_id_without_a_row_is_no_memory_of_others(row: int, feature: int, value: int) -> None:
    logits = in_one_pass(model((16,), (1,)))
    assert logits is not None
    numbers, ids = inputs(300)
    ids[row, feature] = value
    with pytest.raises(IndexError, match=f"row {row}: table {feature} has no row {value}"):
        logits(numbers, ids)


def test_what_takes_another_way() -> None:
    assert in_one_pass(model((16,), (1,), interaction="cat")) is None
    assert in_one_pass(model((16,), (1,), pooling="sum")) is None
    narrow: Any = model((16,), (1,))
    narrow.tables_0_weight = narrow.tables_0_weight[:, :8].contiguous()
    assert in_one_pass(narrow) is None
    half: Any = model((16,), (1,))
    half.tables_0_weight = half.tables_0_weight.half()
    assert in_one_pass(half) is None


def test_a_runs_predictor_takes_it(finished: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`infer`'s scores are those of the trainer's own way, which evaluates."""
    from trainmark.config import filled
    from trainmark.run import trained

    with trained.loaded(finished, device="cpu") as loaded:
        data = loaded.workload.build_data(loaded.cfg, "test", 0, 1)
        batches = list(data)
        predict = filled(loaded.workload.build_predictor)(loaded.trainer)
        assert predict.__module__ == fast_prediction.__name__
        monkeypatch.setattr(fast_prediction, "of_trainer", lambda trainer: None)
        plain = filled(loaded.workload.build_predictor)(loaded.trainer)
        assert batches
        for batch in batches:
            torch.testing.assert_close(predict(batch), plain(batch), rtol=1e-5, atol=1e-5)
