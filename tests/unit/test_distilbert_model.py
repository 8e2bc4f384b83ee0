"""The model agrees with `transformers`, padded with packed, and its files go both ways."""

import dataclasses
import itertools
import json
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn.functional import cross_entropy

from tests.small_distilbert import MODEL, NO_DROPOUT, batches, config, gradients, trainer
from trainmark.corpus.sentences import shuffled
from trainmark.errors import InputError
from trainmark.hardware.devices import Cluster
from trainmark.kernels import sentence_attention
from trainmark.workloads import resolve
from trainmark.workloads.distilbert import layouts
from trainmark.workloads.distilbert.runs import distilbert_sst2, load_sentences
from trainmark.workloads.distilbert.step import save_model

transformers = pytest.importorskip("transformers")
Layout = Literal["distilbert", "bert"]
LAYOUTS: tuple[Layout, ...] = ("distilbert", "bert")
MODES = ("padded", "packed")


def reference_model(layout: Layout) -> Any:
    """A random Hugging Face model, with weights large enough for differences to show."""
    fields = dataclasses.asdict(dataclasses.replace(MODEL, layout=layout))
    given = {theirs: fields[ours] for ours, theirs in layouts._CONFIG_KEYS[layout].items()}
    kind = {"distilbert": "DistilBert", "bert": "Bert"}[layout]
    torch.manual_seed(1)
    net = getattr(transformers, f"{kind}ForSequenceClassification")(
        getattr(transformers, f"{kind}Config")(**given)
    )
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.normal_(0.0, 0.2)
    return net.eval()


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[Layout, Path]:
    made = {layout: tmp_path_factory.mktemp(layout) for layout in LAYOUTS}
    for layout, folder in made.items():
        reference_model(layout).save_pretrained(folder)
    return made


def reference_inputs(cfg: Any, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The first sentences of the first epoch, padded by hand."""
    sentences = load_sentences(cfg, "train")
    ids = torch.zeros(count, cfg.sequence_length, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, i in enumerate(shuffled(len(sentences), cfg.seed, 0)[:count]):
        tokens = sentences.tokens[sentences.offsets[i] : sentences.offsets[i + 1]]
        ids[row, : len(tokens)], mask[row, : len(tokens)] = torch.tensor(tokens), 1
    return ids, mask


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_logits_and_gradients_of_transformers(folders: Any, layout: Layout, mode: str) -> None:
    cfg = config(weights=str(folders[layout]), mode=mode, micro_batch=16)
    net, ours = reference_model(layout), trainer(cfg)
    batch = batches(cfg)[0]
    ids, mask = reference_inputs(cfg, 16)
    expected = net(input_ids=ids, attention_mask=mask).logits
    ((logits, labels, _),) = ours.predict(ours.prepare(batch))
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)

    cross_entropy(expected, labels).backward()
    ours.model.eval()  # no dropout
    ours._micro_step(*(tensor[0] for tensor in batch.tensors))
    theirs = {name.removeprefix(f"{layout}."): p.grad for name, p in net.named_parameters()}
    found = gradients(ours)
    names = [*layouts.encoder_names(cfg.model), *layouts.head_names(cfg.model)]
    assert {name for name, _ in names} == found.keys()
    for name, sources in names:
        joined = torch.cat([theirs[source.removeprefix(f"{layout}.")] for source in sources])
        torch.testing.assert_close(found[name], joined, atol=2e-5, rtol=1e-3)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_saved_folder_loads_in_transformers(folders: Any, layout: str, tmp_path: Path) -> None:
    cfg = config(weights=str(folders[layout]))
    ours = trainer(cfg)
    ours.step(ours.prepare(batches(cfg)[0]), 1e-3)
    save_model(ours, tmp_path / "model")
    loaded, report = transformers.AutoModelForSequenceClassification.from_pretrained(
        tmp_path / "model", output_loading_info=True
    )
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    ((logits, _, _), *_) = ours.predict(ours.prepare(batches(cfg)[0]))
    ids, mask = reference_inputs(cfg, 8)
    expected = loaded.eval()(input_ids=ids, attention_mask=mask).logits
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)
    again = trainer(config(weights=str(tmp_path / "model")))
    for name, tensor in ours.weights().items():
        torch.testing.assert_close(again.weights()[name], tensor)


def test_dropout_is_in_the_published_places() -> None:
    for layout, after_attention in zip(LAYOUTS, (0.0, 0.1), strict=True):
        cfg = config(model=dataclasses.replace(MODEL, layout=layout))
        block = trainer(cfg).model.blocks[0]
        assert block._after_attention == after_attention


def test_packed_gives_the_padded_loss_and_gradients() -> None:
    found = {}
    for mode in MODES:
        cfg = config(mode=mode, model=NO_DROPOUT)
        ours = trainer(cfg)
        losses = []
        for batch in batches(cfg):
            loss, skipped = ours.step(ours.prepare(batch), 1e-3)
            assert not skipped
            losses.append(float(loss))
        found[mode] = (losses, gradients(ours))
    np.testing.assert_allclose(found["packed"][0], found["padded"][0], rtol=1e-5)
    for name, gradient in found["padded"][1].items():
        torch.testing.assert_close(found["packed"][1][name], gradient, atol=1e-6, rtol=1e-3)


ROW = 160
# Three rows of a padded batch, one of them full; five sentences of a packed one, one of no tokens.
SEGMENTS = {ROW: [0, 5, 160, 287, 320, 480, 480], None: [0, 3, 3, 40, 41, 64]}


def attention_by_segments(qkv: torch.Tensor, row_length: int | None) -> torch.Tensor:
    """One softmax per segment, written out: its queries' tokens attend to its keys' tokens."""
    bounds = torch.tensor(SEGMENTS[row_length])
    queries = sentence_attention.row_bounds(bounds, row_length) if row_length else bounds
    found = torch.full_like(qkv[:, 0], torch.nan)
    for (start, stop), (first, last) in zip(
        itertools.pairwise(queries.tolist()), itertools.pairwise(bounds.tolist()), strict=True
    ):
        q, k, v = (x.transpose(0, 1) for x in (qkv[start:stop, 0], *qkv[first:last, 1:].unbind(1)))
        weights = (q @ k.transpose(1, 2) / qkv.shape[-1] ** 0.5).softmax(-1)
        found[start:stop] = (weights @ v).transpose(0, 1)
    return found


def attend(qkv: torch.Tensor, row_length: int | None) -> torch.Tensor:
    bounds = torch.tensor(SEGMENTS[row_length], dtype=torch.int32, device=qkv.device)
    longest = row_length or 40
    return sentence_attention.attend(qkv, bounds, longest=longest, row_length=row_length)


@pytest.mark.parametrize("row_length", SEGMENTS)
def test_attention_by_segments_is_the_masked_one(row_length: int | None) -> None:
    """Of every token, padding too: in a padded batch it attends to its sentence, as published."""
    qkv = torch.randn(SEGMENTS[row_length][-1], 3, 2, 8)
    torch.testing.assert_close(attend(qkv, row_length), attention_by_segments(qkv, row_length))
    if row_length:
        real = torch.arange(ROW) < torch.tensor([[5], [127], [160]])
        q, k, v = qkv.unflatten(0, (-1, ROW)).permute(2, 0, 3, 1, 4)
        mask = real[:, None, None, :]
        masked = torch.nn.functional.scaled_dot_product_attention(q, k, v, mask)
        torch.testing.assert_close(attend(qkv, ROW), masked.transpose(1, 2).flatten(0, 1))


@pytest.mark.gpu
@pytest.mark.parametrize("row_length", SEGMENTS)
def test_flash_attention_is_the_masked_one(row_length: int | None) -> None:
    """Outputs of all tokens, and gradients: exactly 0 for padding's keys and values."""
    torch.manual_seed(0)
    qkv = torch.randn(SEGMENTS[row_length][-1], 3, 2, 64).bfloat16()
    out = torch.randn(len(qkv), 2, 64).bfloat16()
    found = []
    for device, dtype in (("cpu", torch.float32), ("cuda", torch.bfloat16)):
        leaf = qkv.to(device, dtype).requires_grad_()
        y = attend(leaf, row_length)
        y.backward(out.to(device, dtype))
        assert leaf.grad is not None
        found.append((y.detach().float().cpu(), leaf.grad.float().cpu()))
    for fast, exact in zip(found[1], found[0], strict=True):
        torch.testing.assert_close(fast, exact, atol=0.03, rtol=0.03)
    if row_length:
        assert found[1][1][5:160, 1:].abs().max() == 0


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_half_precisions_follow_fp32(precision: str) -> None:
    losses = {}
    for p in ("fp32", precision):
        cfg = config(precision=p, model=NO_DROPOUT, loss_scale=128.0)
        ours = trainer(cfg)
        losses[p] = [float(ours.step(ours.prepare(b), 1e-3)[0]) for b in batches(cfg)]
    assert losses[precision] == pytest.approx(losses["fp32"], abs=0.03)


def test_published_parameter_count() -> None:
    """distilbert-base-uncased with its classification head has 66,955,010 parameters."""
    assert distilbert_sst2().model.parameters == 66_955_010
    small = trainer(config())
    assert sum(t.numel() for t in small.weights().values()) == MODEL.parameters


def test_only_matrices_decay() -> None:
    decayed, others = trainer(config())._optimizer.param_groups
    assert {p.dim() for p in decayed["params"]} == {2}
    assert {p.dim() for p in others["params"]} == {1}
    assert others["weight_decay"] == 0.0


# --- folders that cannot be used


def resolved(weights: Path) -> Any:
    return resolve(
        dataclasses.replace(distilbert_sst2(), data="synthetic", weights=str(weights)),
        Cluster("cpu", 1, 1),
    )


def changed_config(folder: Path, target: Path, **changes: Any) -> Path:
    target.mkdir()
    data = json.loads((folder / "config.json").read_text()) | changes
    (target / "config.json").write_text(json.dumps(data))
    (target / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes())
    return target


def test_wrong_weights_are_named(folders: Any, tmp_path: Path) -> None:
    source = folders["distilbert"]
    with pytest.raises(InputError, match="expected a Hugging Face folder"):
        resolved(tmp_path)
    with pytest.raises(InputError, match="'roberta' model; expected one of: distilbert, bert"):
        resolved(changed_config(source, tmp_path / "roberta", model_type="roberta"))
    with pytest.raises(InputError, match="activation 'relu' is not supported"):
        resolved(changed_config(source, tmp_path / "relu", activation="relu"))
    wide = config(weights=str(changed_config(source, tmp_path / "wide", hidden_dim=128)))
    with pytest.raises(
        InputError, match=r"expand.weight should be \(128, 48\), received \(96, 48\)"
    ):
        trainer(wide)
    damaged = changed_config(source, tmp_path / "damaged")
    (damaged / "model.safetensors").write_bytes(b"12345678 not safetensors")
    with pytest.raises(InputError, match="is damaged or is no weights file"):
        trainer(config(weights=str(damaged)))
    lacking = changed_config(source, tmp_path / "lacking")
    tensors = load_file(source / "model.safetensors")
    tensors.pop("distilbert.transformer.layer.1.ffn.lin1.bias")
    save_file(tensors, lacking / "model.safetensors")
    with pytest.raises(InputError, match=r"lack transformer\.layer\.1\.ffn\.lin1\.bias"):
        trainer(config(weights=str(lacking)))
