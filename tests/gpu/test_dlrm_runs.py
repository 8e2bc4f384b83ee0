"""Whole DLRM runs on a GPU beside the same run on the CPU, from the same weights."""

from pathlib import Path
from statistics import mean

import pytest

from tests import small
from trainmark.cli import main

pytestmark = pytest.mark.gpu

SGD = ("--optimizer.name", "sgd", "--lr", "0.5", "--log-every", "1", "--schedule.warmup-steps", "0")
RULES = {
    "row-wise Adagrad": ("--optimizer.name", "rowwise_adagrad", "--lr", "0.05"),
    "Adagrad": ("--optimizer.name", "adagrad", "--lr", "0.05"),
    "Adam": ("--optimizer.name", "adam", "--lr", "0.01"),
}
WAYS = {
    "plain": (),
    "compiled": ("--compile",),
    "eager": ("--eager",),
    "micro-batches": ("--micro-batch", "128"),
    "exchange with oneself": ("--force-exchange",),
    "host memory": ("--host-tables", "0", "2"),
    "tf32": ("--precision", "tf32"),
    "bf16": ("--precision", "bf16"),
    "fp16": ("--precision", "fp16", "--loss-scale", "dynamic"),
}
MODELS: dict[str, tuple[str, ...]] = {
    "dropout": ("--model.dropout", "0.3", "--model.interaction-dropout", "0.1"),
    "decay": ("--optimizer.weight-decay", "0.02"),
    "clicks that count more": ("--positive-weight", "3"),
    "three widths": ("--model.table-widths", "8", "2", "4"),
    "a cross network": ("--model.interaction", "dcn"),
    "projections": ("--model.interaction", "projection", "--model.branch1-mlp", "16"),
    "side by side": ("--model.interaction", "cat"),
}
"""Models and losses beside the plain one."""


def losses(output: Path) -> list[float]:
    lines = (output / "loss.csv").read_text().splitlines()[1:]
    return [float(line.split(",")[2]) for line in lines]


def weights(folder: Path, *flags: str) -> str:
    """A checkpoint to begin with: a GPU would draw other weights than a CPU."""
    one_step = ("--max-steps", "1", "--checkpoint-every", "1 steps")
    assert small.train(folder, *SGD, *flags, *one_step) == 0
    return str(small.newest(folder))


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> str:
    return weights(tmp_path_factory.mktemp("start"))


def assert_as_on_a_cpu(
    folder: Path, both: tuple[str, ...], on_gpu: tuple[str, ...] = (), rough: bool = False
) -> None:
    """Losses and quality of a run on each, of `small.STEPS` steps."""
    assert small.train(folder / "cpu", *both) == 0
    assert small.train(folder / "gpu", *both, *on_gpu, "--device", "cuda") == 0
    expected, got = losses(folder / "cpu"), losses(folder / "gpu")
    assert len(got) == len(expected) == small.STEPS
    assert got == pytest.approx(expected, rel=3e-2 if rough else 2e-4)
    quality = [small.result(folder / where)["quality"]["value"] for where in ("cpu", "gpu")]
    assert quality[1] == pytest.approx(quality[0], abs=2e-2 if rough else 1e-3)


@pytest.mark.parametrize("way", [*WAYS, *RULES])
def test_the_losses_are_those_of_a_cpu(way: str, start: str, tmp_path: Path) -> None:
    both = (*SGD, *RULES.get(way, ()), "--from", start)
    assert_as_on_a_cpu(tmp_path, both, WAYS.get(way, ()), rough=way in ("bf16", "fp16", "tf32"))


@pytest.mark.parametrize("engine", ["plain", "eager", "exchange with oneself", "host memory"])
@pytest.mark.parametrize("model", MODELS)
def test_every_model_and_loss_is_that_of_a_cpu(model: str, engine: str, tmp_path: Path) -> None:
    flags = MODELS[model]
    both = (*SGD, *flags, "--from", weights(tmp_path / "start", *flags))
    assert_as_on_a_cpu(tmp_path, both, WAYS[engine])


@pytest.mark.parametrize("rule", ["SGD", *RULES])
def test_models_without_tables(rule: str, tmp_path: Path) -> None:
    data = small.write_dataset(tmp_path / "data", cardinalities=())
    flags = (*SGD, *RULES.get(rule, ()), "--global-batch", "128", "--model.table-rows")
    flags = (*flags, "--data", str(data))
    both = (*flags, "--from", weights(tmp_path / "start", *flags))
    assert small.train(tmp_path / "cpu", *both) == 0
    assert small.train(tmp_path / "gpu", *both, "--device", "cuda") == 0
    assert len(losses(tmp_path / "gpu")) == 8
    assert losses(tmp_path / "gpu") == pytest.approx(losses(tmp_path / "cpu"), rel=2e-4)


def test_numbers_of_32_bits_train_as_those_of_16(tmp_path: Path) -> None:
    """A dataset has either; the values are the same here."""
    found = []
    for dtype in ("float16", "float32"):
        data = small.write_dataset(tmp_path / f"data {dtype}", numerical_dtype=dtype)
        flags = (*SGD, "--data", str(data), "--device", "cuda")
        assert small.train(tmp_path / dtype, *flags) == 0
        found.append(losses(tmp_path / dtype))
    assert len(found[0]) > 1
    assert found[1] == pytest.approx(found[0], rel=1e-5)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("way", ["exchange with oneself", "host memory"])
def test_every_rule_in_the_exchange_and_in_host_memory(
    rule: str, way: str, start: str, tmp_path: Path
) -> None:
    both = (*SGD, *RULES[rule], "--from", start)
    ways = {"cpu": (), "gpu": (*WAYS[way], "--device", "cuda")}
    ways["micro"] = (*ways["gpu"], "--micro-batch", "128")
    for name, flags in ways.items():
        assert small.train(tmp_path / name, *both, *flags) == 0
    for name in ("gpu", "micro"):
        assert losses(tmp_path / name) == pytest.approx(losses(tmp_path / "cpu"), rel=2e-4)


@pytest.mark.parametrize("kind", ["bf16", "fp16", "int8", "fp8"])
def test_tables_of_other_formats_learn_the_same(kind: str, tmp_path: Path) -> None:
    flags = (*SGD, "--fp32-up-to-rows", "5", "--device", "cuda", "--table-precision")
    for name in ("fp32", kind):
        assert small.train(tmp_path / name, *flags, name) == 0
    assert losses(tmp_path / kind) == pytest.approx(losses(tmp_path / "fp32"), rel=2e-2)
    assert losses(tmp_path / kind) != losses(tmp_path / "fp32")


def test_a_checkpoint_of_a_gpu_continues_on_it(tmp_path: Path) -> None:
    flags = (*SGD, "--table-precision", "int8", "--fp32-up-to-rows", "5", "--device", "cuda")
    assert small.train(tmp_path / "whole", *flags) == 0
    assert small.train(tmp_path / "parts", *flags, "--max-steps", "4") == 0
    assert small.train(tmp_path / "parts", *flags) == 0
    assert losses(tmp_path / "parts")[-3:] == pytest.approx(
        losses(tmp_path / "whole")[-3:], rel=1e-5
    )


def test_the_demo_agrees_with_a_cpu_to_its_end(tmp_path: Path) -> None:
    start, words = tmp_path / "start", ["train", "dlrm-demo", "--evals-per-epoch", "0"]
    one_step = ["--max-steps", "1", "--checkpoint-every", "1 steps", "--device", "cpu"]
    assert main([*words, *one_step, "--output", str(start)]) == 0
    words += ["--from", str(start), "--checkpoint-every", "never"]
    means, aucs = [], []
    for device in ("cpu", "cuda"):
        assert main([*words, "--device", device, "--output", str(tmp_path / device)]) == 0
        found = losses(tmp_path / device)
        means.append([mean(found[i : i + 50]) for i in range(0, len(found), 50)])
        aucs.append(small.result(tmp_path / device)["quality"]["value"])
    assert len(means[0]) == 16
    assert means[1] == pytest.approx(means[0], rel=1e-4)
    assert aucs[1] == pytest.approx(aucs[0], rel=1e-4)
