"""`trainmark predict`: every row of files, as `trainmark evaluate` scores it, broken off or not."""

import itertools
import json
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest
import torch

from tests.unit.criteo_oracle import random_lines, write_day
from tests.unit.refusals import refused
from tests.unit.test_evaluation import HEADER, evaluate, lines, prepared, train
from tests.unit.test_serve_scores import class_probabilities, sentences_run
from trainmark.cli import main
from trainmark.corpus import sentence_files
from trainmark.inference import predict as module
from trainmark.inference import serving
from trainmark.inference.options import ServeOptions
from trainmark.inference.scored_parts import Parts
from trainmark.kernels.compiled import INSTALLED
from trainmark.run.assessment import read_scores
from trainmark.workloads.dlrm import one_pass, raw_files, standalone

__all__ = ["sentences_run"]  # a fixture

ROWS = lines(700, seed=3)
NAMES = HEADER.split(",")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Trained on a CSV log, beside which `new.csv` lies, and evaluated on that."""
    folder = prepared(tmp_path_factory.mktemp("predict"))
    train(folder, "run", "--eval-batch", "64")
    (folder / "new.csv").write_text("\n".join([HEADER, *ROWS]) + "\n")
    evaluate(folder / "run", "--input", str(folder / "new.csv"))
    return folder / "run"


def expected(run: Path) -> np.ndarray:
    return read_scores(run, "input").scores


def predict(run: Path, output: Path, *flags: str, inputs: str | None = None) -> pa.Table:
    given = inputs or str(run.parent / "new.csv")
    words = ["predict", str(run), "--input", given, "--output", str(output), "--device", "cpu"]
    assert main([*words, *flags]) == 0
    assert not list(output.parent.glob(".*"))
    return pa.csv.read_csv(output) if output.suffix == ".csv" else pq.read_table(output)


def test_scores_are_those_of_evaluate_and_columns_are_carried_along(
    run: Path, tmp_path: Path
) -> None:
    found = predict(run, tmp_path / "s.parquet", "--keep", "user", "clicked", "--memory", "8G")
    assert found.column_names == ["user", "clicked", "score"]
    np.testing.assert_allclose(found["score"], expected(run), atol=1e-6)
    users, clicks = zip(*((row.split(",")[1], row[0]) for row in ROWS), strict=True)
    assert found["user"].to_pylist() == list(users)
    assert found["clicked"].to_pylist() == list(clicks)  # text, as the file has it
    as_csv = predict(run, tmp_path / "s.csv", "--keep", "seen,seen")
    assert as_csv.column_names == ["seen", "score"]
    np.testing.assert_array_equal(np.float32(as_csv["score"]), found["score"])
    assert as_csv["seen"].to_pylist() == [int(row.split(",")[-1]) for row in ROWS]


def test_columns_with_the_names_of_answers_are_kept_beside_them(run: Path, tmp_path: Path) -> None:
    """Of scores by other models, say."""
    rows = [f"{row},{number},-{number}" for number, row in enumerate(ROWS[:9])]
    log = tmp_path / "log.csv"
    log.write_text("\n".join([f"{HEADER},score,score_predicted", *rows]) + "\n")
    found = predict(
        run, tmp_path / "s.parquet", "--keep", "score_predicted", "score", inputs=str(log)
    )
    assert found["score"].to_pylist() == [str(number) for number in range(9)]
    assert found["score_predicted"].to_pylist() == [f"-{number}" for number in range(9)]
    np.testing.assert_allclose(found["score_predicted_predicted"], expected(run)[:9], atol=1e-6)


def test_a_model_of_numbers_alone(tmp_path: Path) -> None:
    folder = prepared(tmp_path, columns="label=clicked numerical=price:plain")
    train(folder, "run")
    (tmp_path / "new.csv").write_text("\n".join([HEADER, *ROWS]) + "\n")
    evaluate(folder / "run", "--input", str(tmp_path / "new.csv"))
    scores = expected(folder / "run")
    found = predict(folder / "run", tmp_path / "s.parquet")
    np.testing.assert_allclose(found["score"], scores, atol=1e-6)
    program = folder / "run" / "export-torch" / "model.pt2"
    assert main(["export", str(folder / "run"), "--format", "torch"]) == 0
    prices = torch.tensor([[float(row.split(",")[3])] for row in ROWS])
    clicks = torch.export.load(program).module()(prices, torch.empty(len(ROWS), 0).long())
    np.testing.assert_allclose(clicks.numpy(), scores, atol=1e-6)


def test_values_that_the_model_does_not_know_are_warned_of(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Such as ids that some program has written as 7.0 since."""

    def told(user: str) -> str:
        fields = [row.split(",") for row in ROWS]
        rows = [HEADER, *(",".join([f[0], f[1] + user, *f[2:]]) for f in fields)]
        (tmp_path / "log.csv").write_text("\n".join(rows) + "\n")
        capsys.readouterr()
        predict(run, tmp_path / "s.csv", inputs=str(tmp_path / "log.csv"))
        return " ".join(capsys.readouterr().out.split())

    assert "The model does not know many values of user (100%)." in told(user="000")
    assert "Warning" not in told(user="")


def test_labels_and_their_order_are_not_needed(run: Path, tmp_path: Path) -> None:
    """Parquet, typed columns in another order, no label; and a CSV whose labels are not read."""
    _, users, cities, prices, seen = zip(*(row.split(",") for row in ROWS), strict=True)
    columns = {
        "id": np.arange(len(ROWS)),
        "seen": list(map(int, seen)),
        "price": list(map(float, prices)),
        "city": list(cities),
        "user": list(users),
    }
    pq.write_table(pa.table(columns), tmp_path / "new.parquet", row_group_size=90)
    found = predict(
        run, tmp_path / "s.parquet", "--keep", "id", inputs=str(tmp_path / "new.parquet")
    )
    np.testing.assert_allclose(found["score"], expected(run), atol=1e-6)
    assert found["id"].type == pa.int64()
    assert found["id"].to_pylist() == list(range(len(ROWS)))
    (tmp_path / "odd.csv").write_text("\n".join([HEADER, *("?" + row[1:] for row in ROWS)]))
    found = predict(run, tmp_path / "s.parquet", inputs=str(tmp_path / "odd.csv"))
    np.testing.assert_allclose(found["score"], expected(run), atol=1e-6)


def test_an_onnx_model_of_raw_values(
    run: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """By the lines of its README.txt, with the encoder that lies beside it; not by `predict`, which
    says so before it encodes anything."""
    pytest.importorskip("onnxruntime")
    words = ["export", str(run), "--format", "onnx", "--output", str(tmp_path / "onnx")]
    assert main(words) == 0
    monkeypatch.chdir(tmp_path / "onnx")
    readme = Path("README.txt").read_text()
    scoring, *_, encoding = (
        "\n".join(line.strip() for line in block)
        for is_code, block in itertools.groupby(
            readme.splitlines(), lambda line: line.startswith("    ")
        )
        if is_code
    )
    _, users, cities, prices, seen = zip(*(row.split(",") for row in ROWS), strict=True)
    given: dict[str, Any] = {
        "raw_numbers": [[float(price)] for price in prices],
        "raw_categories": list(zip(users, cities, map(int, seen), strict=True)),
    }
    exec(encoding, given)
    assert (given["encoder"].numerical, given["encoder"].categorical) == (
        ("price",),
        ("user", "city", "seen"),
    )
    exec(scoring, given)
    np.testing.assert_allclose(given["clicks"], expected(run), atol=1e-6)
    monkeypatch.setattr(raw_files, "_encode_by", None)
    words = ["predict", ".", "--input", str(run.parent / "new.csv"), "--output", "s.csv"]
    refused(capsys, words, "holds no model*.safetensors")


def test_rows_that_are_skipped_take_their_columns_with_them(run: Path, tmp_path: Path) -> None:
    rows = [*ROWS]
    rows[3] = rows[3].rpartition(",")[0] + ",then"
    rows[500] += ",surplus"
    (tmp_path / "bad.csv").write_text("\n".join([HEADER, *rows]) + "\n")
    flags = ("--bad-rows", "skip", "--keep", "seen")
    found = predict(run, tmp_path / "s.parquet", *flags, inputs=str(tmp_path / "bad.csv"))
    good = [i for i in range(len(ROWS)) if i not in (3, 500)]
    assert found["seen"].to_pylist() == [ROWS[i].split(",")[-1] for i in good]
    np.testing.assert_allclose(found["score"], expected(run)[good], atol=1e-6)


def test_criteo_lines_with_a_label_and_without(clicks: Path, tmp_path: Path) -> None:
    day = random_lines(random.Random(7), 150)
    write_day(tmp_path / "day_0", day)
    run = clicks / "run"
    evaluate(run, "--input", str(tmp_path / "day_0"))
    flags = ("--keep", "label")
    found = predict(run, tmp_path / "s.parquet", *flags, inputs=str(tmp_path / "day_0"))
    np.testing.assert_allclose(found["score"], expected(run), atol=1e-6)
    np.testing.assert_array_equal(found["label"], read_scores(run, "input").labels)
    text = (tmp_path / "day_0").read_bytes()
    bare = [line.split(b"\t", 1)[1] for line in text.split(b"\n") if line]
    for end in (b"\n", b""):
        (tmp_path / "bare").write_bytes(b"\n".join(bare) + end)
        without = predict(run, tmp_path / "t.parquet", inputs=str(tmp_path / "bare"))
        np.testing.assert_array_equal(without["score"], found["score"])


def test_the_splits_of_a_dataset(run: Path, tmp_path: Path) -> None:
    data = str(run.parent / "data")
    for split in ("test", "validation"):
        found = predict(run, tmp_path / "s.parquet", "--split", split, inputs=data)
        np.testing.assert_allclose(found["score"], read_scores(run, split).scores, atol=1e-6)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_run_that_was_broken_off_goes_on_to_the_same_bytes(
    precision: str,
    run: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """In one pass, and by the trainer."""
    monkeypatch.setattr(raw_files, "PART_ROWS", 128)
    monkeypatch.setattr(module, "PART_ROWS", 130)  # two batches of 64 rows
    flags = ("--keep", "seen", "--precision", precision)
    predict(run, tmp_path / "whole.parquet", *flags)
    output = tmp_path / "s.parquet"
    output.write_text("old")
    added: list[int] = []
    add = Parts.add

    def break_off(parts: Parts, columns: Any) -> None:
        if len(added) == 2:
            raise KeyboardInterrupt
        added.append(len(columns["score"]))
        add(parts, columns)

    with monkeypatch.context() as broken:
        broken.setattr(Parts, "add", break_off)
        words = ["predict", str(run), "--input", str(run.parent / "new.csv")]
        words += ["--output", str(output), "--device", "cpu", *flags]
        assert main(words) == 130
    assert added == [128, 128]
    assert output.read_text() == "old"
    scored = _count_scored(monkeypatch)
    predict(run, output, *flags)
    assert sum(scored) == len(ROWS) - 256
    assert "256 rows of" in capsys.readouterr().err
    assert output.read_bytes() == (tmp_path / "whole.parquet").read_bytes()


def test_what_was_done_for_something_else_is_not_used(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(raw_files, "PART_ROWS", 64)
    (tmp_path / "new.csv").write_text("\n".join([HEADER, *ROWS[::-1]]) + "\n")
    words = ["predict", str(run), "--input", str(tmp_path / "new.csv"), "--device", "cpu"]
    with monkeypatch.context() as broken:
        broken.setattr(Parts, "join", _interrupted)
        assert main([*words, "--output", str(tmp_path / "s.parquet")]) == 130
    found = predict(run, tmp_path / "s.parquet")  # of the other file
    assert "it begins again" in capsys.readouterr().err
    np.testing.assert_allclose(found["score"], expected(run), atol=1e-6)


def _interrupted(*_: Any) -> None:
    raise KeyboardInterrupt


def _count_scored(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    counted: list[int] = []
    answers, score = module._answers, raw_files._score

    def counted_at_once(*arguments: Any) -> np.ndarray:
        found = score(*arguments)
        counted.append(len(found))
        return found

    monkeypatch.setattr(raw_files, "_score", counted_at_once)

    def noted(*arguments: Any) -> Iterator[dict[str, np.ndarray]]:
        for found in answers(*arguments):
            counted.append(len(found["score"]))
            yield found

    monkeypatch.setattr(module, "_answers", noted)
    return counted


def test_what_cannot_be_scored_is_refused_in_a_sentence(
    run: Path, clicks: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log, output = str(run.parent / "new.csv"), str(tmp_path / "s.parquet")

    def ask(*flags: str, inputs: str = log, to: str = output) -> list[str]:
        words = ["predict", str(run), "--device", "cpu"]
        return [*words, "--input", inputs, "--output", to, *flags]

    refused(capsys, ask("--keep", "usr"), "for --keep", "user")
    refused(capsys, ask("--checkpoint", "step-77"), "--checkpoint must be")
    refused(capsys, ask(to=str(tmp_path)), "is a folder")
    refused(capsys, ask(to="/dev/null"), "is a device or a pipe")
    refused(capsys, ask(to=str(tmp_path / "s.txt")), ".parquet or .csv")
    refused(capsys, ask(to=log), "is one of the files to score")
    refused(capsys, ask(inputs=str(tmp_path / "no.csv")), "No file matches")
    refused(capsys, ask(inputs=str(clicks / "data")), "not what")
    refused(capsys, ask("--split", "train", inputs=str(run.parent / "data")), "held-out split")
    refused(capsys, ask("--split", "test"), "--split is for a dataset")
    refused(capsys, ask("--column", "user"), "--column is for sentences")
    (tmp_path / "less.csv").write_text("user,city,price\nu1,c1,0.5\n")
    refused(capsys, ask(inputs=str(tmp_path / "less.csv")), "no column 'seen'")
    (tmp_path / "bad.csv").write_text("user,city,price,seen\nu1,c1,0.5,then\n")
    config = json.loads((run / "config.json").read_text()) | {"data": str(clicks / "data")}
    config.pop("checksum")
    shutil.copytree(run, tmp_path / "other")
    (tmp_path / "other" / "config.json").write_text(json.dumps(config))
    other = [word.replace(str(run), str(tmp_path / "other")) for word in ask()]
    refused(capsys, other, f"{clicks / 'data'} has changed since")
    assert main(ask(inputs=str(tmp_path / "bad.csv"))) == 2
    assert "bad.csv:2: seen is 'then'" in capsys.readouterr().err
    assert not list(tmp_path.glob(".*"))
    listed = {"user": ["u1"], "city": ["c1"], "price": [0.5], "seen": [10**9], "tags": [["a"]]}
    pq.write_table(pa.table(listed), tmp_path / "lists.parquet")
    kept = ask("--keep", "tags", inputs=str(tmp_path / "lists.parquet"), to=f"{tmp_path}/s.csv")
    assert main(kept) == 2
    assert "CSV has no form for" in capsys.readouterr().err
    write_day(tmp_path / "day_0", random_lines(random.Random(7), 5))
    words = ["predict", str(clicks / "run"), "--input", str(tmp_path / "day_0"), "--output", output]
    refused(capsys, [*words, "--keep", "C1"], "have a label alone")


# --- exported models


@pytest.mark.parametrize("layout", ["safetensors", "torch", "onnx"])
def test_an_export_carries_what_encodes_raw_values(
    layout: str, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if layout == "onnx":
        pytest.importorskip("onnx")
    target = tmp_path / "exported"
    assert main(["export", str(run), "--format", layout, "--output", str(target)]) == 0
    named = json.loads((target / "config.json").read_text())["columns"]
    assert named == {
        "numerical": ["price"],
        "categorical": ["user", "city", "seen.hour", "seen.weekday"],
    }
    if layout == "onnx":
        onnxruntime = pytest.importorskip("onnxruntime")
        session = onnxruntime.InferenceSession(target / "model.onnx")
        told = session.get_modelmeta().custom_metadata_map
        assert {name: json.loads(text) for name, text in told.items()} == named
    for name in ("vocabulary/vocabulary.json", "vocabulary/cat_0.parquet", "prepare.json"):
        theirs, ours = run.parent / "data" / name, target / "preparation" / name
        assert theirs.read_bytes() == ours.read_bytes()
        assert theirs.samefile(ours) == name.startswith("vocabulary/")  # no second copy
    capsys.readouterr()
    assert main(["verify", str(target)]) == 0
    sealed = json.loads((target / "checksums.json").read_text())["files"]
    assert "preparation/vocabulary/cat_0.parquet" in sealed


def test_an_export_scores_files_as_fast_as_the_server(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a CPU in one pass over the samples, not layer after layer."""
    pytest.importorskip("numba")
    assert main(["export", str(run), "--output", str(tmp_path / "exported")]) == 0
    monkeypatch.delattr(standalone.Dlrm, "forward")
    log = str(run.parent / "new.csv")
    found = predict(tmp_path / "exported", tmp_path / "s.parquet", inputs=log)
    np.testing.assert_allclose(found["score"], expected(run), atol=1e-6)


def test_an_export_needs_nothing_else(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where neither the run nor its dataset is, it scores raw files, and raw values over HTTP."""
    elsewhere = tmp_path / "elsewhere"
    shutil.copytree(run.parent, elsewhere)
    config = elsewhere / "run" / "config.json"
    moved = json.loads(config.read_text()) | {"data": str(elsewhere / "data")}
    moved.pop("checksum")
    config.write_text(json.dumps(moved))
    target, log = tmp_path / "exported", str(tmp_path / "new.csv")
    assert main(["export", str(elsewhere / "run"), "--output", str(target)]) == 0
    shutil.copyfile(run.parent / "new.csv", log)
    shutil.rmtree(elsewhere)
    monkeypatch.setattr(raw_files, "PART_ROWS", 128)
    monkeypatch.setattr(raw_files, "BATCH", 50)
    found = predict(target, tmp_path / "s.parquet", "--keep", "user", inputs=log)
    np.testing.assert_allclose(found["score"], expected(run), atol=1e-6)
    assert found["user"].to_pylist() == [row.split(",")[1] for row in ROWS]
    with monkeypatch.context() as broken:
        broken.setattr(Parts, "join", _interrupted)
        words = ["predict", str(target), "--input", log, "--device", "cpu", "--keep", "user"]
        assert main([*words, "--output", str(tmp_path / "t.parquet")]) == 130
    predict(target, tmp_path / "t.parquet", "--keep", "user", inputs=log)
    assert (tmp_path / "t.parquet").read_bytes() == (tmp_path / "s.parquet").read_bytes()

    (source,) = serving.sources(ServeOptions(folders=(str(target),), device="cpu"))
    scorer = source.load(source.newest())
    assert scorer.facts["values"] == "raw"
    rows = [dict(zip(NAMES[1:], row.split(",")[1:], strict=True)) for row in ROWS[:40]]
    np.testing.assert_allclose(
        scorer.score([scorer.read({"rows": rows})]), expected(run)[:40], atol=1e-6
    )

    words = [*words[:6], "--output", str(tmp_path / "u.parquet")]
    refused(capsys, [*words, "--checkpoint", "last"], "is an exported model")
    refused(capsys, ["infer", str(target)], "is an exported model, not the folder of a run")
    words[3] = str(run.parent / "data")
    refused(capsys, words, "an exported model scores raw files")
    words[3] = log
    vocabulary = target / "preparation" / "vocabulary" / "cat_0.parquet"
    vocabulary.write_bytes(vocabulary.read_bytes()[:-1])
    refused(capsys, words, "cat_0.parquet is not as it was written")
    shutil.rmtree(target / "preparation")
    (target / "checksums.json").unlink()
    refused(capsys, words, "does not carry the vocabularies")


def test_a_run_is_scored_by_a_trainer_or_without_one(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without, where a CPU computes it in one pass: the scores are the same."""
    without = predict(run, tmp_path / "s.parquet")
    if INSTALLED:
        with monkeypatch.context() as broken:
            broken.delattr(module, "_of_dataset")
            predict(run, tmp_path / "t.parquet")
    monkeypatch.setattr(one_pass, "suits", lambda *_: False)
    monkeypatch.delattr(raw_files, "_scores")
    by_trainer = predict(run, tmp_path / "s.parquet")
    np.testing.assert_allclose(without["score"], by_trainer["score"], rtol=1e-6)


def test_an_infinite_logit_is_no_click(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("numba")
    logits_of = one_pass.logits_of

    def infinite(*arguments: Any) -> Any:
        logits = logits_of(*arguments)
        return lambda numbers, ids: (
            logits(numbers, ids) + np.where(np.arange(len(ids)) == 7, np.inf, 0)
        )

    monkeypatch.setattr(one_pass, "logits_of", infinite)
    words = ["predict", str(run), "--input", str(run.parent / "new.csv"), "--device", "cpu"]
    words += ["--output", str(tmp_path / "s.csv")]
    assert main(words) == 2
    assert "The prediction for row 7 is not finite" in capsys.readouterr().err


# --- sentences


def test_sentences_have_the_class_and_probabilities_of_the_evaluation(
    sentences_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = class_probabilities(sentences_run)

    def check(found: pa.Table) -> None:
        assert found.column_names[-3:] == ["class", "probability_0", "probability_1"]
        both = np.stack([found["probability_0"], found["probability_1"]], 1)
        np.testing.assert_allclose(both, wanted, atol=1e-6)
        np.testing.assert_array_equal(found["class"], wanted.argmax(1))

    monkeypatch.setattr(sentence_files, "PART_BYTES", 1 << 12)  # several parts
    monkeypatch.setattr(sentence_files, "PART_ROWS", 64)
    tsv = sentences_run.parent / "table.tsv"
    texts, labels = zip(*(row.split("\t") for row in tsv.read_text().splitlines()[1:]), strict=True)
    found = predict(sentences_run, tmp_path / "s.parquet", "--keep", "label", inputs=str(tsv))
    check(found)
    assert found["label"].to_pylist() == list(labels)
    (tmp_path / "plain.txt").write_text("\n".join(texts) + "\n")
    check(predict(sentences_run, tmp_path / "s.csv", inputs=str(tmp_path / "plain.txt")))
    raw = pa.array([label.encode() for label in labels], pa.binary_view())
    views = {"review": pa.array(texts, pa.string_view()), "label": raw}
    pq.write_table(pa.table(views), tmp_path / "t.parquet")
    flags = ("--column", "review", "--keep", "label", "review")
    model_folder = sentences_run / "model"  # in Hugging Face's layout, without the run
    found = predict(model_folder, tmp_path / "s.csv", *flags, inputs=str(tmp_path / "t.parquet"))
    check(found)
    assert found["review"].to_pylist() == list(texts)
    assert list(map(str, found["label"].to_pylist())) == list(labels)
    check(predict(sentences_run, tmp_path / "s.parquet", inputs=str(sentences_run.parent / "data")))


def test_empty_sentences_and_other_models(
    sentences_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "t.csv").write_text('id,sentence\n1,good\n2,"  "\n3,"bad,\nbad"\n')
    words = ["predict", str(sentences_run), "--input", str(tmp_path / "t.csv")]
    words += ["--output", str(tmp_path / "s.parquet"), "--device", "cpu"]
    refused(capsys, words, "t.csv:3: the sentence is empty", "--bad-rows skip")
    refused(capsys, [*words, "--column", "text"], "no column 'text'", "it has id, sentence")
    refused(capsys, [*words, "--precision", "bf16"], "fp32")
    flags, of = ("--keep", "id", "--bad-rows"), str(tmp_path / "t.csv")
    skipped = predict(sentences_run, tmp_path / "s.parquet", *flags, "skip", inputs=of)
    assert skipped["id"].to_pylist() == ["1", "3"]
    kept = predict(sentences_run, tmp_path / "s.parquet", *flags, "keep", inputs=of)
    assert kept["id"].to_pylist() == ["1", "2", "3"]
    assert kept.take([0, 2]).equals(skipped)
    (tmp_path / "llama").mkdir()
    (tmp_path / "llama" / "config.json").write_text('{"model_type": "llama"}')
    words[1] = str(tmp_path / "llama")
    refused(capsys, words, "gives no scores for rows")
