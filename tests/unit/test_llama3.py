"""Llama-3: the network beside transformers', sizes, splits, and what resolve refuses."""

import dataclasses
import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import safetensors
import torch

from tests.distributed.llama3_ranks import CPU, config, train
from tests.small import newest
from trainmark import workloads
from trainmark.checkpoint import checkpoints
from trainmark.cli import main
from trainmark.distributed.mesh import single
from trainmark.errors import InputError
from trainmark.files import write_tensors
from trainmark.hardware.devices import Cluster
from trainmark.interop import model_folder
from trainmark.run import memory
from trainmark.run.loop import build_trainer
from trainmark.verbs.export import export
from trainmark.workloads import resolve
from trainmark.workloads.llama3 import export as llama3_export
from trainmark.workloads.llama3 import huggingface, runs
from trainmark.workloads.llama3.chain import ENTROPY, Chain
from trainmark.workloads.llama3.stages import layers_of_stages

transformers = pytest.importorskip("transformers")
LLAMA3 = workloads.load("llama3")


def hugging_face(folder: Path) -> Any:
    return transformers.LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)


def saved(folder: Path, cfg: runs.LlamaRun) -> Any:
    """A trainer of ours, its weights written for transformers."""
    trainer = build_trainer(cfg, LLAMA3, single(CPU))
    huggingface.save(folder, cfg.model, cfg.sequence, trainer.weights())
    return trainer


# --- beside transformers


def test_logits_are_those_of_transformers(tmp_path: Path) -> None:
    cfg = config()
    trainer = saved(tmp_path, cfg)
    tokens = torch.randint(0, cfg.model.vocab, (3, cfg.sequence))
    with torch.no_grad():
        ours, theirs = trainer.parts[0](tokens), hugging_face(tmp_path)(tokens).logits
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-4)
    assert ours.std() > 0.05


def test_weights_come_in_from_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved(tmp_path / "ours", config())
    theirs = hugging_face(tmp_path / "ours")
    theirs.save_pretrained(tmp_path / "theirs", max_shard_size="20KB")  # an index and shards
    assert (tmp_path / "theirs" / "model.safetensors.index.json").exists()
    cfg = config(weights=str(tmp_path / "theirs"), seed=99)
    assert cfg.model.rope_theta == 10_000.0
    trainer = build_trainer(cfg, LLAMA3, single(CPU))
    expected = theirs.state_dict()
    for name, weight in trainer.weights().items():
        assert torch.equal(weight, expected[huggingface.their_name(name)])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "mistral"}, "holds a 'mistral' model; expected 'llama'"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "scaled rotary positions"),
        ({"attention_bias": True}, "attention_bias True is not supported; expected False"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported; expected 'silu'"),
        ({"head_dim": 64}, "head_dim 64 is not supported; expected 16"),
        ({"vocab_size": None}, "has no vocab_size"),
    ],
)
def test_networks_that_are_not_this_one(
    change: dict[str, Any], message: str, tmp_path: Path
) -> None:
    theirs = huggingface.config_json(config().model, 16, "float32") | change
    kept = {key: value for key, value in theirs.items() if value is not None}
    (tmp_path / "config.json").write_text(json.dumps(kept))
    with pytest.raises(InputError, match=message):
        huggingface.read_model(tmp_path)


def test_large_models_are_written_in_shards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_folder, "SHARD_BYTES", 20_000)
    trainer = saved(tmp_path, config())
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 3
    weights = trainer.weights()
    for name, weight in hugging_face(tmp_path).state_dict().items():
        assert torch.equal(weights[name.removeprefix("model.")], weight)


def transformers_curve(model: Any, cfg: runs.LlamaRun, steps: int) -> list[tuple[float, float]]:
    """The same batches through transformers' model and PyTorch's AdamW: losses, and norms of the
    gradients."""
    matrices = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() == 1]
    rule = cfg.optimizer
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": rule.weight_decay},
         {"params": others, "weight_decay": 0.0}],
        betas=(rule.beta1, rule.beta2),
        eps=rule.eps,
    )  # fmt: skip
    found = []
    for step, batch in enumerate(LLAMA3.build_data(cfg, "train", 0, 1)):
        if step == steps:
            break
        tokens = batch.ids.long()
        logits = model(tokens[:, :-1]).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), rule.clip)
        for group in optimizer.param_groups:
            group["lr"] = cfg.lr * cfg.schedule.factor(step)
        optimizer.step()
        optimizer.zero_grad()
        found.append((loss.item(), norm.item()))
    return found


def test_training_follows_transformers(tmp_path: Path) -> None:
    schedule = dataclasses.replace(runs.llama3_demo().schedule, warmup_steps=3, decay_start=3)
    cfg = config(max_steps=15, schedule=schedule)
    trainer = saved(tmp_path, cfg)
    theirs = transformers_curve(hugging_face(tmp_path), cfg, 15)
    losses, norms = zip(*theirs, strict=True)
    for step, batch in enumerate(LLAMA3.build_data(cfg, "train", 0, 1)):
        loss, _ = trainer.step(trainer.prepare(batch), cfg.lr * cfg.schedule.factor(step))
        assert loss.item() == pytest.approx(losses[step], abs=1e-4)
        norm = LLAMA3.observed(trainer)["gradient_norm"]
        assert norm.item() == pytest.approx(norms[step], rel=1e-3)


def test_export_of_a_run_loads_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--max-steps", "3", "--checkpoint-every", "1000 steps", "--device", "cpu"]
    flags += ["--evals-per-epoch", "0", "--synthetic-samples", "48", "--warmup-clock", "1"]
    run = tmp_path / "run"
    assert main(["train", "llama3-demo", *flags, "--output", str(run)]) == 0
    result = json.loads((run / "result.json").read_text())
    assert result["tokens"] == 3 * 16 * 64
    assert result["parallel"] == {"pp": 1, "dp": 1, "tp": 1}
    assert main(["export", str(run)]) == 0
    model = hugging_face(run / "export")
    names = {theirs: f"model.{theirs.removeprefix('model.')}" for theirs in model.state_dict()}
    stored = checkpoints.read(newest(run), names.values())
    for theirs, weight in model.state_dict().items():
        assert torch.equal(stored[names[theirs]], weight)
    assert main(["export", str(run)]) == 0
    assert "nothing was done" in capsys.readouterr().err
    assert main(["export", str(run), "--output", str(run / "checkpoints")]) == 2
    assert "not empty" in capsys.readouterr().err
    assert main(["export", str(run), "--output", str(run / "loss.csv")]) == 2
    assert "loss.csv is a file" in capsys.readouterr().err


def test_an_export_to_a_full_disk_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: object, **kwargs: object) -> None:
        raise safetensors.SafetensorError("I/O error: No space left on device")

    def save(cfg: object, path: Path, folder: Path) -> None:
        (folder / "config.json").write_text("{}")
        write_tensors(folder / "model.safetensors", {"weight": torch.zeros(2)})

    monkeypatch.setattr("safetensors.torch.save_file", fail)
    monkeypatch.setitem(llama3_export.LAYOUTS, "safetensors", save)
    monkeypatch.setattr(
        "trainmark.run.run_folder.read_config", lambda folder: workloads.named_run("llama3-demo")
    )
    monkeypatch.setattr("trainmark.run.run_folder.find_checkpoint", lambda folder, which: folder)
    monkeypatch.setattr("trainmark.checkpoint.checkpoints.shapes", lambda path: {})
    (tmp_path / "manifest.json").touch()
    with pytest.raises(InputError, match=r"out cannot be written: .*No space left on device"):
        export(tmp_path, "safetensors", tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["manifest.json"]


# --- sizes


def test_the_8b_model_is_the_real_one() -> None:
    model = runs.llama3_8b().model
    assert model.parameters == 8_030_261_248
    built = LLAMA3.build_model(resolve_for("h200", 1, runs.llama3_8b()))
    assert sum(p.numel() for p in built.parameters()) == 8_030_261_248
    assert model.head_in_layers(8192) == pytest.approx(2.087, abs=1e-3)


def resolve_for(hardware: str, devices: int, run: runs.LlamaRun, nodes: int = 1) -> runs.LlamaRun:
    return resolve(dataclasses.replace(run, data="synthetic"), Cluster(hardware, nodes, devices))


def test_the_made_up_language_has_its_entropy() -> None:
    chain = Chain(3, 50)
    tokens = chain.sample(0, 50_000)
    pairs: dict[tuple[int, int], int] = {}
    for pair in zip(tokens[:-1].tolist(), tokens[1:].tolist(), strict=True):
        pairs[pair] = pairs.get(pair, 0) + 1
    counts = torch.zeros(50, 50)
    for (a, b), count in pairs.items():
        counts[a, b] = count
    chances = counts / counts.sum(1, keepdim=True)
    entropy = -(counts / counts.sum() * chances.clamp(min=1e-9).log()).sum()
    assert entropy.item() == pytest.approx(ENTROPY, abs=0.06)
    assert (chain.sample(4, 20) == Chain(3, 50).sample(4, 20)).all()


# --- parallel strings and stages


def test_parallel_strings() -> None:
    assert runs.parse_parallel("PP2DP4TP1") == {"pp": 2, "dp": 4, "tp": 1}
    for bad in ("PP2DP4", "pp2dp4tp1", "PP0DP1TP1", "PP2DP4TP1 ", "TP1DP2PP1", ""):
        with pytest.raises(InputError, match="PP2DP4TP1"):
            runs.parse_parallel(bad)
    with pytest.raises(InputError, match="2 x 3 x 1 = 6 devices; there are 8"):
        runs.mesh_axes(dataclasses.replace(runs.llama3_8b(), parallel="PP2DP3TP1"), 8)


@pytest.mark.parametrize(
    ("stages", "expected"),
    [(1, [32]), (2, [17, 15]), (4, [9, 9, 8, 6]), (8, [5, 5, 4, 4, 4, 4, 4, 2])],
)
def test_the_head_counts_as_two_layers(stages: int, expected: list[int]) -> None:
    found = layers_of_stages(32, stages, 2.087)
    assert [layer for stage in found for layer in stage] == list(range(32))
    counts = [len(stage) for stage in found]
    assert counts == expected
    uneven = max([*counts[:-1], counts[-1] + 2.087]) if stages > 1 else 0
    assert uneven <= -(-32 // stages) + 2.087


def test_every_stage_has_a_layer() -> None:
    for layers in range(1, 12):
        for stages in range(1, layers + 1):
            counts = [len(stage) for stage in layers_of_stages(layers, stages, 9.0)]
            assert sum(counts) == layers
            assert min(counts) >= 1


# --- resolve


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"parallel": "PP1DP1TP8", "model": runs.Model(kv_heads=4)}, "TP8 cannot split"),
        ({"parallel": "PP8DP1TP1", "model": runs.Model(layers=4)}, "at least as many layers"),
        ({"optimizer_states": "bf16", "precision": "fp32"}, "needs precision bf16 or fp8"),
        (
            {
                "parallel": "PP1DP1TP8",
                "precision": "fp8",
                "model": runs.Model(hidden=1024, heads=128),
            },
            r"fp8 needs each rank's part of keys .* Received: 64 over TP8",
        ),
        ({"precision": "fp8", "sequence": 100, "micro_batch": 1}, "a multiple of 16 tokens"),
        ({"model": runs.Model(heads=5)}, "must divide model.hidden"),
        (
            {"precision": "fp8", "sequence": 100, "global_batch": 513, "micro_batch": None},
            "^global_batch 513 must equal micro_batch x accumulate",  # and nothing of tokens
        ),
        ({"data": None}, "prepare tokens"),
        ({"split": "1,2"}, "three weights"),
    ],
)
def test_what_resolve_refuses(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    run = dataclasses.replace(runs.llama3_8b(), **({"data": "synthetic"} | changes))
    if "split" in changes:
        run = dataclasses.replace(run, data=str(tmp_path))
        from tests.token_files import write_tokens
        from tests.unit.test_tokens import DOCUMENTS, TYPES

        write_tokens(tmp_path / "x", DOCUMENTS, TYPES[0])
    with pytest.raises(InputError, match=message):
        resolve(run, Cluster("h100", 1, 8))


@pytest.mark.parametrize(
    ("pipeline", "micro_batches", "message"),
    [
        ("1f1b", 3, r"PP4 needs at least as many .* Received: accumulate 3 \(global_batch 6, "),
        ("1f1b", 5, None),
        ("interleaved", 6, r"a multiple of PP \(4\) micro-batches. Received: accumulate 6 "),
        ("interleaved", 8, None),
    ],
)
def test_a_pipeline_needs_enough_micro_batches(
    pipeline: Any, micro_batches: int, message: str | None
) -> None:
    """Whether their number is given, or follows from the batches."""
    given: dict[str, Any]
    for given in ({"micro_batch": 1}, {"micro_batch": None, "accumulate": micro_batches}):
        run = dataclasses.replace(
            runs.llama3_8b(), data="synthetic", parallel="PP4DP2TP1", pipeline=pipeline,
            global_batch=2 * micro_batches, **given,
        )  # fmt: skip
        with pytest.raises(InputError, match=message) if message else nullcontext():
            resolve(run, Cluster("h100", 1, 8))


def test_a_closed_run_may_change_the_split_and_not_the_batch(tmp_path: Path) -> None:
    from trainmark.config import changed_fields

    named = runs.llama3_8b()
    tuned = dataclasses.replace(
        resolve_for("h100", 8, named), parallel="PP2DP4TP1", micro_batch=2, accumulate=64,
        recompute="full", attention="flash", precision="fp8", data_parallel="fsdp",
    )  # fmt: skip
    assert changed_fields(named, tuned, runs.closed(tuned)) == ["data"]  # synthetic says little
    changes: dict[str, Any] = {"sequence": 4096, "global_batch": 1760, "parallel": "PP1DP8TP1",
               "optimizer_states": "bf16"}  # fmt: skip
    other = resolve_for("h100", 8, dataclasses.replace(named, **changes))
    changed = changed_fields(named, other, runs.closed(other))
    assert changed == ["global_batch", "optimizer_states", "sequence", "data"]


def test_the_published_cluster_resolves_and_dry_runs(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--parallel", "PP1DP220TP2", "--global-batch", "1760", "--cluster", "h100x55x8"]
    assert main(["train", "llama3-8b", "--dry-run", *flags]) == 0
    assert "total" in capsys.readouterr().out
    run = dataclasses.replace(runs.llama3_8b(), parallel="PP1DP220TP2", global_batch=1760)
    assert resolve_for("h100", 8, run, nodes=55).accumulate == 8


@pytest.mark.parametrize(("states", "expected"), [("fp32", 12), ("bf16", 5)])
def test_bytes_that_the_optimiser_keeps_of_a_parameter(states: Any, expected: int) -> None:
    run = dataclasses.replace(runs.llama3_8b(), data="synthetic", optimizer_states=states)
    _, plan = memory.dry_run(run, Cluster.parse("h200x1x1"))
    assert plan.optimizer == expected * run.model.parameters + 4  # and the count of steps


def test_other_workloads_have_no_fp8(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", "distilbert-sst2", "--precision", "fp8"]) == 2
    assert "distilbert has no precision fp8" in capsys.readouterr().err


# --- real text

TEXT = Path(__file__).resolve().parents[3] / "shared" / "data" / "text" / "tinyshakespeare.txt"


@pytest.mark.slow
@pytest.mark.skipif(not TEXT.exists(), reason="no text on this machine")
def test_real_text_is_learned_like_transformers_learns_it(tmp_path: Path) -> None:
    """The demo's network on Shakespeare: the same weights, batches and rule, 300 steps."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    from trainmark.run.alignment import compare, read_curve

    encoder = Tokenizer(models.BPE())
    encoder.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    encoder.train(
        [str(TEXT)],
        trainers.BpeTrainer(
            vocab_size=1024, special_tokens=["<|endoftext|>"], initial_alphabet=alphabet,
            show_progress=False,
        ),
    )  # fmt: skip
    encoder.save(str(tmp_path / "tokenizer.json"))
    where = ["--tokenizer", str(tmp_path), "--output", str(tmp_path / "data")]
    assert main(["prepare", "tokens", "--input", str(TEXT), *where]) == 0

    data, split = str(tmp_path / "data"), "100,0,0"  # one file is one document
    run = dataclasses.replace(runs.llama3_demo(), data=data, split=split, device="cpu")
    cfg = resolve(run, Cluster("cpu", 1, 1))
    saved(tmp_path / "start", cfg)
    curve = transformers_curve(hugging_face(tmp_path / "start"), cfg, 300)
    theirs = [loss for loss, _ in curve]
    flags = ["--data", data, "--split", split, "--device", "cpu", "--output", str(tmp_path / "r")]
    assert main(["train", "llama3-demo", *flags]) == 0
    found = compare(read_curve(tmp_path / "r"), dict(enumerate(theirs, start=1)), "transformers")
    print(f"first {theirs[0]:.3f}, last {theirs[-1]:.3f}, error {found.error:.2e}")
    assert found.error < 0.005
    assert theirs[-1] < 4.3  # from 6.9, the logarithm of the vocabulary


# --- what must not change the losses, and what a result has


def test_every_recompute_gives_the_same_losses() -> None:
    plain = train(config(), single(CPU), stop=3)
    for mode in ("selective", "full"):
        assert train(config(recompute=mode), single(CPU), stop=3) == pytest.approx(plain, abs=1e-6)


def test_the_result_has_the_spread_of_tokens(tmp_path: Path) -> None:
    flags = ["--max-steps", "6", "--log-every", "1", "--warmup-clock", "2", "--device", "cpu"]
    flags += ["--evals-per-epoch", "0", "--checkpoint-every", "never", "--output", str(tmp_path)]
    assert main(["train", "llama3-demo", *flags]) == 0
    result = json.loads((tmp_path / "result.json").read_text())
    slowest, fastest = result["tokens_per_device_s_spread"]
    assert 0 < slowest <= result["tokens_per_device_s"] * 1.1
    assert slowest <= fastest
