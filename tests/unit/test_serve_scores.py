"""Scores over HTTP are those of the evaluation, for all that can be served."""

import json
import random
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from sklearn.metrics import log_loss, roc_auc_score

from tests import small, small_distilbert
from tests.docs.commands import ROOT
from tests.unit.served import TEST_LINES, TestClient, assert_refused, served, train
from tests.unit.test_distilbert_data import WORDS
from tests.unit.test_prepare_npy import read
from tests.unit.test_prepare_tabular import COLUMNS, random_rows, write_csv
from trainmark.cli import main
from trainmark.config import filled
from trainmark.errors import InputError
from trainmark.run import evaluation, run_folder, trained


def scores(client: TestClient, body: dict[str, Any]) -> list[float]:
    answer = client.post("/score", json=body)
    assert answer.status_code == 200, answer.text
    found: list[float] = answer.json()["scores"]
    return found


def logits_of(run: Path, split: str) -> NDArray[np.float64]:
    """What `trainmark evaluate` predicts for a split."""
    with trained.loaded(run, device="cpu") as model:
        predict = filled(model.workload.build_predictor)(model.trainer)
        data = model.workload.build_data(model.cfg, split, 0, 1)
        return np.concatenate([predict(batch).double().numpy() for batch in data])


def predictions(run: Path, split: str) -> list[float]:
    """The same as probabilities of clicks."""
    return list(1 / (1 + np.exp(-logits_of(run, split))))


def class_probabilities(run: Path) -> NDArray[np.float64]:
    """The same of the validation split's sentences."""
    odds = np.exp(logits_of(run, "validation"))
    shares: NDArray[np.float64] = odds / odds.sum(1, keepdims=True)
    return shares


# --- clicks

ARRAYS = {
    "numerical": [[int(field) if field else None for field in line[1:14]] for line in TEST_LINES],
    "categorical": [[field or None for field in line[14:]] for line in TEST_LINES],
}


def records(model: dict[str, Any], arrays: dict[str, Any]) -> dict[str, Any]:
    names = model["numerical"] + model["categorical"]
    rows = zip(arrays["numerical"], arrays["categorical"], strict=True)
    return {"rows": [dict(zip(names, [*row[0], *row[1]], strict=True)) for row in rows]}


def test_raw_values_score_as_the_evaluation_predicts(clicks: Path) -> None:
    client = served(clicks / "run")
    found = scores(client, ARRAYS)
    assert found == pytest.approx(predictions(clicks / "run", "test"), abs=1e-6)
    expected = evaluation.evaluate(clicks / "run", data=None, device="cpu")["splits"]["test"]
    labels = [int(line[0]) for line in TEST_LINES]
    assert roc_auc_score(labels, found) == pytest.approx(expected["auc"], abs=1e-9)
    assert log_loss(labels, found) == pytest.approx(expected["log_loss"], abs=1e-6)
    # The same rows as records, one at a time, in another order of features.
    body = records(client.get("/model").json(), ARRAYS)
    for row, score in list(zip(body["rows"], found, strict=True))[:9]:
        turned = {name: row[name] for name in reversed(row)}
        assert scores(client, {"rows": [turned]}) == pytest.approx([score], abs=1e-6)


@pytest.mark.parametrize("interaction", ["dcn", "projection", "cat", "dot_and_inputs"])
def test_every_interaction_is_served(interaction: str, clicks: Path, tmp_path: Path) -> None:
    run = train(clicks / "data", tmp_path / "run", "--model.interaction", interaction)
    expected = pytest.approx(predictions(run, "test"), abs=1e-6)
    assert scores(served(run), ARRAYS) == expected
    target = tmp_path / "exported"
    assert main(["export", str(run), "--output", str(target)]) == 0
    assert scores(served(target, data=str(clicks / "data")), ARRAYS) == expected


def prepared_rows(data: Path) -> dict[str, Any]:
    rows = read(data, "test")
    ids = np.stack(rows["ids"], axis=1)
    return {"numerical": rows["numerical"].tolist(), "categorical": ids.tolist()}


def test_prepared_values_and_exports_score_the_same(clicks: Path, tmp_path: Path) -> None:
    target = tmp_path / "exported"
    assert main(["export", str(clicks / "run"), "--output", str(target)]) == 0
    expected = pytest.approx(scores(served(clicks / "run"), ARRAYS), abs=1e-6)
    prepared = prepared_rows(clicks / "data")
    for folder in (clicks / "run", target):
        client = served(folder, values="prepared")
        assert scores(client, prepared) == expected
        model = client.get("/model").json()
        assert model["categorical"][25] == "cat_25.bin"  # of the feature specification
        assert scores(client, records(model, prepared)) == expected
    assert scores(served(target), ARRAYS) == expected  # by the vocabularies that it carries
    shutil.rmtree(target / "preparation")  # as one of an earlier version
    (target / "checksums.json").unlink()
    assert served(target).get("/model").json()["values"] == "prepared"
    assert scores(served(target, data=str(clicks / "data")), ARRAYS) == expected


def test_8_bit_tables(clicks: Path, tmp_path: Path) -> None:
    run = train(clicks / "data", tmp_path / "run", "--table-precision", "int8",
                "--fp32-up-to-rows", "20", "--positive-weight", "5")  # fmt: skip
    assert scores(served(run), ARRAYS) == pytest.approx(predictions(run, "test"), abs=1e-6)


def test_what_it_tells(clicks: Path) -> None:
    client = served(clicks / "run")
    assert client.get("/health").json() == {"status": "ok"}
    assert "raw values" in client.get("/").json()["requests"]
    model = client.get("/model").json()
    cfg = run_folder.read_config(clicks / "run")
    assert (model["name"], model["workload"], model["values"]) == ("dlrm-demo", "dlrm", "raw")
    assert (model["step"], model["samples"]) == (7, 400)
    assert model["numerical"] == [f"I{i}" for i in range(1, 14)]
    assert list(model["table_rows"].values()) == list(cfg.model.table_rows)
    assert list(model["table_rows"])[25] == "C26"
    (score,) = scores(client, client.get("/example").json())
    assert 0 < score < 1


def test_data_without_vocabularies(tmp_path: Path) -> None:
    """Made elsewhere, or in memory: numbers and ids are all there is to send."""
    data, run = small.write_dataset(tmp_path / "data"), tmp_path / "run"
    assert small.train(run, "--data", str(data), "--model.table-rows", "50", "7", "3") == 0
    client = served(run)
    assert "prepared values" in client.get("/").json()["requests"]
    assert scores(client, prepared_rows(data)) == pytest.approx(predictions(run, "test"), abs=1e-6)
    made_up = tmp_path / "made_up"
    assert small.train(made_up, "--model.numerical-features", "0") == 0
    found = scores(served(made_up), {"categorical": [[49, 6, 2], [0, 0, 0]]})
    assert len(found) == 2
    with pytest.raises(InputError, match="--values raw: give --data"):
        served(made_up, values="raw")
    with pytest.raises(InputError, match="has no vocabularies"):
        served(run, values="raw")


# --- one's own columns


def test_own_columns_by_name(tmp_path: Path) -> None:
    rows = random_rows(700)
    write_csv(tmp_path / "log.csv", rows)
    data = tmp_path / "data"
    flags = ["--input", str(tmp_path / "log.csv"), "--output", str(data), "--columns", COLUMNS]
    assert main(["prepare", "csv", *flags, "--frequency-threshold", "9"]) == 0
    run = train(data, tmp_path / "run")
    names = ("age", "visits", "user", "city", "score", "tag", "seen")
    sent = [{name: row[name] for name in names} for row in rows[600:650]]  # the test split
    for row in sent:
        row["seen"] = None if row["seen"] is None else str(row["seen"])
    client = served(run)
    assert scores(client, {"rows": sent}) == pytest.approx(predictions(run, "test"), abs=1e-6)
    assert list(client.get("/model").json()["table_rows"])[-2:] == ["seen.hour", "seen.weekday"]
    # What no log had scores as what was too rare; what is missing is a value of its own.
    asked = [sent[0] | {"city": city} for city in ("Atlantis", "Utopia", None)]
    first, second, missing = scores(client, {"rows": asked})
    assert first == pytest.approx(second, abs=1e-7)
    assert first != pytest.approx(missing, abs=1e-7)


def test_numbers_alone(tmp_path: Path) -> None:
    """Standardised, in bins and with indicators: by name, as arrays, and from a file."""
    rng = random.Random(1)
    rows = [[rng.randrange(2), *(_number(rng) for _ in range(3))] for _ in range(700)]
    text = ["y,a,b,c", *(",".join("" if v is None else str(v) for v in row) for row in rows)]
    (tmp_path / "log.csv").write_text("\n".join(text) + "\n")
    data = tmp_path / "data"
    flags = ["--input", str(tmp_path / "log.csv"), "--output", str(data)]
    assert main(["prepare", "csv", *flags, "--columns", "label=y numerical=a,b,c"]) == 0
    run = train(data, tmp_path / "run")
    client = served(run)
    sent = [row[1:] for row in rows[600:650]]  # the test split
    expected = pytest.approx(predictions(run, "test"), abs=1e-6)
    assert scores(client, {"numerical": sent}) == expected
    records = [dict(zip("abc", row, strict=True)) for row in sent]
    assert scores(client, {"rows": records}) == expected
    answer = client.post("/score", json={"categorical": [[]]})
    assert answer.status_code == 422
    assert "'numerical' has 0 values" in answer.text
    (tmp_path / "test.csv").write_text("\n".join([text[0], *text[601:651]]) + "\n")
    arguments = ["evaluate", str(run), "--device", "cpu"]
    assert main([*arguments, "--input", str(tmp_path / "test.csv")]) == 0
    found = json.loads((run / "evaluation.json").read_text())
    assert main(arguments) == 0
    usual = json.loads((run / "evaluation.json").read_text())
    (split,) = found["splits"].values()
    assert split["auc"] == pytest.approx(usual["splits"]["test"]["auc"], abs=1e-9)


def _number(rng: random.Random) -> float | None:
    return None if rng.random() < 0.2 else rng.choice([0.0, rng.lognormvariate(2, 3), -7.0])


def test_the_columns_of_the_page(tmp_path: Path) -> None:
    """The page's two bodies are the same row."""
    page = (ROOT / "docs" / "inference.md").read_text().partition("## Serving")[2]
    (columns,) = re.findall(r"`(numerical=.*)`:", page)
    (block,) = re.findall(r"^```json\n(.*?)^```", page, re.M | re.S)
    bodies = [json.loads(line) for line in block.splitlines()]
    lines = ["clicked,age,price,user,city,seen_at"]
    lines += [f"{i % 2},{i % 50},{i % 7},{i % 9},Oslo,2026-01-31 12:00:00" for i in range(200)]
    (tmp_path / "log.csv").write_text("\n".join(lines) + "\n")
    data = tmp_path / "data"
    flags = ["--input", str(tmp_path / "log.csv"), "--output", str(data)]
    assert main(["prepare", "csv", *flags, "--columns", f"label=clicked {columns}"]) == 0
    client = served(train(data, tmp_path / "run"))
    first, second = (scores(client, body) for body in bodies)
    assert first == second
    assert len(first) == 1


# --- sentences


@pytest.fixture(scope="module")
def sentences_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on the table of sentences that lies beside it."""
    pytest.importorskip("tokenizers")
    folder = tmp_path_factory.mktemp("sentences")
    (folder / "tokenizer").mkdir()
    (folder / "tokenizer" / "vocab.txt").write_text("\n".join(WORDS) + "\n")
    rng = random.Random(0)
    rows = [
        (" ".join(rng.choices(WORDS[4:], k=rng.randrange(1, 40))), rng.randrange(2))
        for _ in range(150)
    ]
    table = "".join(f"{text}\t{label}\n" for text, label in rows)
    (folder / "table.tsv").write_text("sentence\tlabel\n" + table)
    flags = ["--train", str(folder / "table.tsv"), "--dev", str(folder / "table.tsv")]
    flags += ["--tokenizer", str(folder / "tokenizer"), "--output", str(folder / "data")]
    assert main(["prepare", "sst2", *flags, "--sequence-length", "32"]) == 0
    flags = ["--data", str(folder / "data"), "--output", str(folder / "run")]
    assert main(["train", "distilbert-demo", *small_distilbert.FLAGS, *flags]) == 0
    return folder / "run"


def test_sentences_score_as_the_evaluation_predicts(sentences_run: Path) -> None:
    expected = class_probabilities(sentences_run)
    table = (sentences_run.parent / "table.tsv").read_text().splitlines()[1:]
    texts = [line.split("\t")[0] for line in table]
    assert max(len(text.split()) for text in texts) > 32  # some are cut
    for folder in (sentences_run, sentences_run / "model"):
        client = served(folder)
        answer = client.post("/score", json={"sentences": texts})
        np.testing.assert_allclose(answer.json()["probabilities"], expected, atol=1e-6)
        alone = client.post("/score", json={"sentences": texts[:1]}).json()["probabilities"]
        np.testing.assert_allclose(alone, expected[:1], atol=1e-6)
    told = served(sentences_run).get("/model").json()
    assert (told["name"], told["classes"], told["longest_tokens"]) == ("distilbert-demo", 2, 32)


@pytest.mark.parametrize(
    ("body", "part"),
    [
        ({"sentences": ["good", ""]}, "Sentence 1 is '', expected a text"),
        ({"sentences": [7]}, "Sentence 0 is 7, expected a text"),
        ({"sentences": [None]}, "Sentence 0 is null, expected a text"),
        ({"sentences": "good"}, "expected 'sentences', a list of texts"),
        ({"rows": ["good"]}, "The body has 'rows'; expected 'sentences'"),
        ({"sentences": []}, "no rows"),
    ],
)
def test_bad_sentences(sentences_run: Path, body: dict[str, Any], part: str) -> None:
    assert_refused(served(sentences_run).post("/score", json=body), part)


def test_sentences_that_are_not_utf8(sentences_run: Path) -> None:
    client = served(sentences_run)
    one = {"name": "sentences", "datatype": "BYTES", "shape": [1]}
    raw = (2).to_bytes(4, "little") + b"\xffa"
    head = json.dumps({"inputs": [one | {"parameters": {"binary_data_size": len(raw)}}]}).encode()
    headers = {"Inference-Header-Content-Length": str(len(head))}
    path = "/v2/models/distilbert-demo/infer"
    answer = client.post(path, content=head + raw, headers=headers)
    assert answer.status_code == 400
    assert "'sentences' has a text that is not UTF-8" in answer.json()["error"]
    told = client.get("/metrics").text  # as its client got it
    labels = 'model="distilbert-demo",protocol="v2-http",status="400"'
    assert f"trainmark_serve_requests_total{{{labels}}} 1.0" in told
