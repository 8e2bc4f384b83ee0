"""Crosses: combinations of features with rows of their own, from the choice to a served score."""

import dataclasses
import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from numpy.typing import NDArray
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import roc_auc_score
from sklearn.preprocessing import OneHotEncoder

from tests import small
from tests.unit.refusals import refused
from trainmark.checkpoint import checkpoints
from trainmark.cli import main
from trainmark.clickdata import feature_spec
from trainmark.config import TrainOptions
from trainmark.embeddings.tables.batch import IdGroup
from trainmark.run import evaluation, run_folder
from trainmark.verbs.flags import parse_run
from trainmark.workloads import resolve
from trainmark.workloads.dlrm import auto, cross_choice, sharding, standalone
from trainmark.workloads.dlrm.crosses import CROSS_ROWS, crossed, with_crosses
from trainmark.workloads.dlrm.runs import DlrmRun, Model

NETWORK = ["--epochs", "2", "--log-every", "1000", "--device", "cpu"]


def by_hand(*ids: int) -> int:
    """Of one row, by Python's integers."""
    return sum(i * 17_364**power for power, i in enumerate(reversed(ids))) % 65_521


@pytest.mark.parametrize("features", [1, 2, 3])
def test_combinations_have_the_rows_of_the_hash(features: int) -> None:
    ids = np.random.default_rng(0).integers(0, 2**31 - 1, (features, 100))
    expected = [by_hand(*map(int, column)) for column in ids.T]
    assert crossed(list(ids)).tolist() == expected
    assert crossed(list(torch.from_numpy(ids))).tolist() == expected


@pytest.mark.parametrize("sizes", [(180, 180), (19, 19, 19)])
def test_near_combinations_share_no_rows(sizes: tuple[int, ...]) -> None:
    ids = np.array(list(itertools.product(*map(range, sizes)))).T
    assert len(set(crossed(list(ids)).tolist())) == np.prod(sizes)


def test_a_batch_has_the_ids_of_crosses_behind_its_own() -> None:
    """Of features in groups of several types, whose own arithmetic would overflow."""
    model = Model(table_rows=(100, 30_000, 100, CROSS_ROWS, CROSS_ROWS), crosses=("0x2", "2x1x0"))
    small_ids = torch.tensor([[99, 1], [98, 2]], dtype=torch.int8)
    groups = [IdGroup([0, 2], small_ids), IdGroup([1], torch.tensor([[29_999, 5]]).short())]
    *own, behind = with_crosses(groups, model)
    assert own == groups
    assert behind.features == [3, 4]
    assert behind.ids.tolist() == [
        [by_hand(99, 98), by_hand(1, 2)],
        [by_hand(98, 29_999, 99), by_hand(2, 5, 1)],
    ]


# --- which crosses a log has


def log(rows: int, seed: int, strength: float) -> tuple[list[NDArray[Any]], NDArray[np.bool_]]:
    """Four columns that matter by themselves; of the last three, the combinations as well."""
    random, effects = np.random.default_rng(seed), np.random.default_rng(7)
    ids = [random.integers(0, values, rows).astype(np.int8) for values in (30, 9, 8, 7)]
    alone = sum(effects.normal(0, 0.5, 30)[column] for column in ids)
    together = effects.normal(0, strength, (9, 8, 7))[ids[1], ids[2], ids[3]]
    return ids, random.random(rows) < 1 / (1 + np.exp(1 - alone - together))


def test_a_cross_is_found_where_there_is_one() -> None:
    assert cross_choice.choose(*log(8000, seed=1, strength=1.0))[0] == (1, 2, 3)


@pytest.mark.parametrize("seed", range(5))
def test_none_is_found_where_columns_matter_by_themselves(seed: int) -> None:
    assert cross_choice.choose(*log(8000, seed=seed, strength=0.0)) == []


@pytest.mark.parametrize("label", [False, True])
def test_rows_that_say_nothing_have_none(label: bool) -> None:
    ids, labels = log(500, seed=1, strength=1.0)
    assert cross_choice.choose(ids, np.full(500, label)) == []
    assert cross_choice.choose(ids[:1], labels) == []
    assert cross_choice.choose([], labels) == []
    assert cross_choice.choose([column[:0] for column in ids], labels[:0]) == []


def test_what_columns_say_by_themselves_is_a_logistic_regression() -> None:
    ids, labels = log(3000, seed=2, strength=1.0)
    inputs = OneHotEncoder().fit_transform(np.stack(ids, 1))
    peer = LogisticRegression(max_iter=1000).fit(inputs, labels)
    expected = labels - peer.predict_proba(inputs)[:, 1]
    np.testing.assert_allclose(cross_choice.unexplained(ids, labels), expected, atol=0.01)


def test_the_score_of_noise_is_normal() -> None:
    random = np.random.default_rng(0)
    scores = [
        cross_choice.score(random.integers(0, 500, 2000), random.normal(size=2000))
        for _ in range(300)
    ]
    assert abs(np.mean(scores)) < 0.25
    assert 0.8 < np.std(scores) < 1.2


# --- a model with crosses


def test_a_cross_is_a_table_like_others(tmp_path: Path) -> None:
    """The same weights, to the bit, as of a dataset that has the combinations as a feature."""
    plain = small.write_dataset(tmp_path / "plain", train_rows=600, cardinalities=(50, 7, 3))
    wide = small.write_dataset(tmp_path / "wide", train_rows=600, cardinalities=(50, 7, 3, 65_521))
    types = feature_spec.read(plain).feature_spec
    for split, part in itertools.product(("train", "test"), ("numerical", "label")):
        (wide / split / f"{part}.bin").write_bytes((plain / split / f"{part}.bin").read_bytes())
    for split in ("train", "test"):
        files = [plain / split / f"cat_{i}.bin" for i in range(3)]
        ids = [np.fromfile(file, str(types[file.name].dtype)) for file in files]
        for file in files:
            (wide / split / file.name).write_bytes(file.read_bytes())
        rows = [by_hand(int(a), int(b), int(c)) for c, a, b in zip(*ids, strict=True)]
        np.array(rows, np.int32).tofile(wide / split / "cat_3.bin")
    words = ["train", "dlrm-auto", *NETWORK, "--model.interaction", "dot_and_inputs"]
    crosses = ["--model.crosses", "1x2x0"]
    for data, flags in ((plain, crosses), (wide, [])):
        output = str(tmp_path / f"run_{data.name}")
        assert main([*words, "--data", str(data), "--output", output, *flags]) == 0
    runs = [tmp_path / "run_plain", tmp_path / "run_wide"]
    assert small.saved(small.newest(runs[0])) == small.saved(small.newest(runs[1]))
    found = [small.result(run)["quality"]["value"] for run in runs]
    assert found[0] == found[1]


def write_csv(path: Path, rows: int, seed: int, grown: bool = False) -> pd.DataFrame:
    ids, labels = log(rows, seed, strength=2.0)
    table = pd.DataFrame({name: [f"{name}{i}" for i in column]
                          for name, column in zip("abcd", ids, strict=True)})  # fmt: skip
    if grown:
        table.loc[: rows // 10, "b"] = "a new one"
    table["clicked"] = labels.astype(int)
    table.to_csv(path, index=False)
    return table


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run of dlrm-auto on a log that has a cross, and its files."""
    folder = tmp_path_factory.mktemp("crosses")
    write_csv(folder / "train.csv", 4000, seed=1)
    write_csv(folder / "test.csv", 500, seed=2)
    files = ["--train", str(folder / "train.csv"), "--test", str(folder / "test.csv")]
    columns = ["--columns", "label=clicked categorical=a,b,c,d", "--output", str(folder / "data")]
    assert main(["prepare", "csv", *files, *columns]) == 0
    words = ["--data", str(folder / "data"), "--output", str(folder / "run"), *NETWORK]
    assert main(["train", "dlrm-auto", *words]) == 0
    return folder


def test_dlrm_auto_finds_and_tries_them(trained: Path) -> None:
    found = small.result(trained / "run")
    assert found["config"]["model"]["crosses"][0] == "1x2x3"
    assert found["config"]["model"]["interaction"] == "dot_and_inputs"
    (why,) = [note for note in found["notes"] if note.startswith("Chose")]
    assert why.startswith("Chose --model.interaction dot_and_inputs --model.crosses 1x2x3")
    cfg = run_folder.read_config(trained / "run")
    asked = auto.dlrm_auto()
    assert len(auto.candidates(asked, cfg)) == 3


def test_all_that_scores_agrees(trained: Path, tmp_path: Path) -> None:
    """The evaluation, raw files by the run and by its export, requests, and each layout."""
    pytest.importorskip("onnxruntime")
    from tests.unit.served import served
    from tests.unit.test_export_formats import run_onnx

    run, test = trained / "run", pd.read_csv(trained / "test.csv")
    expected = evaluation.evaluate(run, data=None, device="cpu")["splits"]["test"]["auc"]
    for layout in ("safetensors", "onnx", "torch"):
        words = ["--format", layout, "--output", str(tmp_path / layout)]
        assert main(["export", str(run), *words]) == 0
    scores = []
    for number, model in enumerate((run, tmp_path / "safetensors")):
        output = tmp_path / f"{number}.csv"
        words = ["--input", str(trained / "test.csv"), "--output", str(output), "--device", "cpu"]
        assert main(["predict", str(model), *words]) == 0
        scores.append(pd.read_csv(output)["score"].to_numpy())
    client = served(run)
    assert list(client.get("/model").json()["table_rows"]) == list("abcd")
    body = {"rows": test.drop(columns="clicked").to_dict("records")}
    scores.append(np.array(client.post("/score", json=body).json()["scores"]))

    source = trained / "data"
    types = feature_spec.read(source).feature_spec
    ids = torch.stack([
        torch.from_numpy(
            np.fromfile(source / "test" / name, str(types[name].dtype)).astype(np.int64)
        )
        for name in feature_spec.read(source).categorical
    ], 1)  # fmt: skip
    numbers = torch.empty(len(ids), 0)
    in_onnx = run_onnx(tmp_path / "onnx" / "model.onnx", numerical=numbers, categorical=ids)
    plain = standalone.load(tmp_path / "safetensors")
    program = torch.export.load(tmp_path / "torch" / "model.pt2").module()
    scores += [in_onnx.numpy(), plain(numbers, ids).numpy(), program(numbers, ids).numpy()]
    for found in scores:
        assert found == pytest.approx(scores[0], abs=1e-6)
        assert roc_auc_score(test["clicked"], found) == pytest.approx(expected, abs=1e-6)
    prepared = served(tmp_path / "safetensors", values="prepared")
    body = {"numerical": [[]] * len(ids), "categorical": ids.tolist()}
    found = prepared.post("/score", json=body).json()["scores"]
    assert found == pytest.approx(scores[0], abs=1e-6)


def test_new_ids_leave_crosses_what_they_were(trained: Path, tmp_path: Path) -> None:
    """A run from another has its crosses, and their rows, also where a table has more rows."""
    write_csv(tmp_path / "new.csv", 800, seed=3, grown=True)
    words = ["--input", str(tmp_path / "new.csv"), "--output", str(tmp_path / "data")]
    earlier = ["--vocabulary", str(trained / "data"), "--grow", "--frequency-threshold", "2"]
    assert main(["prepare", "csv", *words, *earlier]) == 0
    words = ["--data", str(tmp_path / "data"), "--output", str(tmp_path / "run"), *NETWORK]
    flags = ["--from", str(trained / "run"), "--lr", "1e-12", "--max-steps", "2"]
    assert main(["train", "dlrm-auto", *words, *flags]) == 0
    found, before = (small.result(folder / "run")["config"]["model"]
                     for folder in (tmp_path, trained))  # fmt: skip
    assert found["crosses"] == before["crosses"]
    assert found["table_rows"][1] > before["table_rows"][1]
    assert found["table_rows"][4:] == before["table_rows"][4:]
    rows = [
        checkpoints.read(small.newest(folder / "run"), ["model.tables.4.weight"])
        for folder in (tmp_path, trained)
    ]
    torch.testing.assert_close(*rows, rtol=0, atol=1e-6)


def test_crosses_are_placed_beside_what_was_counted(trained: Path) -> None:
    cfg = run_folder.read_config(trained / "run")
    *own, last = sharding.profiles(cfg)
    assert sharding.counted(cfg)
    assert [len(own) + 1, last.rows] == [len(cfg.model.table_rows), CROSS_ROWS]


NO_CROSS = "two or more different features of 0 to 2, with an x between them."
THERE_ALREADY = "model.crosses must be of different features each."


@pytest.mark.parametrize(
    ("expected", "crosses"),
    [
        *((NO_CROSS, crosses) for crosses in ("0", "0x0", "0x9", "axb", "0x1 1x", "0x1x")),
        *((THERE_ALREADY, crosses) for crosses in ("0x1 0x1", "0x1x2 2x0x1")),
    ],
)
def test_what_is_no_cross_or_there_already_is_refused(
    expected: str, crosses: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = small.write_dataset(tmp_path / "data")
    words = ["train", "dlrm-auto", "--data", str(data), "--output", str(tmp_path / "run")]
    words += ["--model.crosses", *crosses.split()]
    refused(capsys, words, f"{expected} Received: {crosses}")


def test_none_are_added_to_tables_that_were_described_one_by_one(trained: Path) -> None:
    """With their widths, or where they lie: of a cross nobody has said it."""
    cfg, asked = run_folder.read_config(trained / "run"), auto.dlrm_auto()
    widths = dataclasses.replace(asked.model, table_widths=(16, 8, 8, 8))
    places = dataclasses.replace(asked.sharding, placement="placement.json")
    for change in ({"model": widths}, {"sharding": places}):
        assert len(auto.candidates(dataclasses.replace(asked, **change), cfg)) == 2


def test_crosses_that_a_user_chose_are_not_replaced_by_an_earlier_run_s(
    trained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Neither with --from nor when the run is continued, which is refused."""
    earlier, asked = run_folder.read_config(trained / "run"), auto.dlrm_auto()
    chosen = dataclasses.replace(asked, model=dataclasses.replace(asked.model, crosses=("0x1",)))
    assert auto.like_the_earlier(chosen, earlier).model.crosses == ("0x1",)
    assert auto.like_the_earlier(asked, earlier).model.crosses == earlier.model.crosses
    words = ["--data", str(trained / "data"), "--output", str(trained / "run"), *NETWORK]
    refused(capsys, ["train", "dlrm-auto", *words, "--model.crosses", "0x1"], "crosses")


@pytest.mark.parametrize("file", ["result.json", "config.json"])
@pytest.mark.parametrize("crosses", [[], ["0x1"], ["0x1", "0x2", "0x3"]])
def test_a_run_s_configuration_takes_other_crosses(
    file: str, crosses: list[str], trained: Path
) -> None:
    """However many the run has."""
    before = run_folder.read_config(trained / "run").model.table_rows[:4]
    words = ["dlrm-auto", "--config", str(trained / "run" / file), "--model.crosses", *crosses]
    found = resolve(parse_run("train", words, TrainOptions)[0], small.ONE_CPU)
    assert isinstance(found, DlrmRun)
    assert found.model.table_rows == before + (CROSS_ROWS,) * len(crosses)


def test_crosses_are_of_datasets(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["train", "dlrm-demo", *small.FLAGS, "--output", str(tmp_path / "run")]
    refused(capsys, [*words, "--model.crosses", "0x1"], "crosses are for a dataset of files")


def test_a_configuration_without_crosses_is_read(trained: Path) -> None:
    """As earlier versions wrote it."""
    plain = json.loads((trained / "run" / "config.json").read_text())
    plain.pop("checksum")
    plain["model"].pop("crosses")
    plain["model"]["table_rows"] = plain["model"]["table_rows"][:4]
    assert run_folder.parse_config(plain, trained).model.crosses == ()
