"""Which dataset a model belongs to: others are refused, other rows of the same columns are not."""

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests import small
from tests.unit.criteo_oracle import random_lines, write_day
from tests.unit.refusals import refused
from tests.unit.test_prepare_engine import ROOMY, TIGHT
from tests.unit.test_prepare_engine import prepare as prepare_criteo
from trainmark import files
from trainmark.cli import main
from trainmark.clickdata import identity, vocabulary_file
from trainmark.clicklog.engine.limits import Limits
from trainmark.clicklog.sources import column_spec
from trainmark.errors import InputError
from trainmark.run.run_folder import find_checkpoint, read_config

COLUMNS = "label=clicked numerical=age:plain,price:plain categorical=user:int64,city"
CITIES = ("Bern", "Chur", "Genf")
NETWORK = (
    *("--model.embedding-dim", "8", "--model.bottom-mlp", "16", "8", "--model.top-mlp", "16", "1"),
    *("--global-batch", "64", "--device", "cpu", "--warmup-clock", "2"),
)


def _edited(data: dict[str, Any]) -> str:
    """As JSON, without the checksum of what it was."""
    return json.dumps({key: value for key, value in data.items() if key != "checksum"})


def write_log(
    path: Path, *, cities: tuple[str, ...] = CITIES, repeats: int = 14, seed: int = 0
) -> None:
    """Every value occurs equally often, and in every log: tables have the same sizes."""
    rng = random.Random(seed)
    rows = [
        (rng.randrange(2), rng.randrange(90), rng.random(), i % 11, cities[i % len(cities)])
        for i in range(11 * 3 * repeats)
    ]
    rng.shuffle(rows)
    lines = [",".join(map(str, row)) for row in rows]
    path.write_text("\n".join(["clicked,age,price,user,city", *lines]) + "\n")


def prepare(folder: Path, *flags: str, columns: str = COLUMNS, **log: Any) -> Path:
    folder.parent.mkdir(parents=True, exist_ok=True)
    csv = folder.with_suffix(".csv")
    write_log(csv, **log)
    arguments = ["--input", str(csv), "--output", str(folder), "--columns", columns, *flags]
    arguments += ["--vocabulary-from", "all"]
    assert main(["prepare", "csv", *arguments]) == 0
    return folder


def train_flags(data: Path, output: Path, *flags: str) -> list[str]:
    return ["train", "dlrm-demo", "--data", str(data), "--output", str(output), *NETWORK, *flags]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `data`, and `run`, which was trained on it, and its `export`."""
    folder = tmp_path_factory.mktemp("identity")
    data = prepare(folder / "data")
    assert main(train_flags(data, folder / "run", "--max-steps", "2")) == 0
    assert main(["export", str(folder / "run")]) == 0
    return folder


def verbs(trained: Path, data: Path, output: Path) -> list[list[str]]:
    """Every way to use the model with a dataset."""
    run, there = str(trained / "run"), ["--data", str(data)]
    served = [*there, "--device", "cpu", "--port", "0"]
    return [
        ["evaluate", run, *there, "--device", "cpu"],
        ["infer", run, *there, "--device", "cpu"],
        ["serve", run, *served],
        ["serve", str(trained / "run" / "export"), *served],
        train_flags(data, output, "--from", run),
        train_flags(data, trained / "run", "--max-steps", "3"),
    ]


# --- what is carried


def test_a_run_its_checkpoints_and_its_export_carry_it(trained: Path) -> None:
    lines = identity.of_dataset(trained / "data")
    price, user, city = lines[1:]
    assert price == "numerical plain - - price"
    assert user.startswith("categorical int64 12 ")
    assert user.endswith(" user")
    assert city.startswith("categorical string 4 ")
    assert city.endswith(" city")
    run = trained / "run"
    state = json.loads((find_checkpoint(run) / "manifest.json").read_text())["state"]
    result = json.loads((run / "result.json").read_text())
    exported = json.loads((run / "export" / "config.json").read_text())
    assert read_config(run).dataset == lines
    assert [state["config"]["dataset"], result["config"]["dataset"], exported["dataset"]] == [
        list(lines)
    ] * 3
    assert "dataset" not in result["changed"]


def test_rows_dates_and_counts_are_no_part_of_it(trained: Path, tmp_path: Path) -> None:
    """Nor how the file of a vocabulary is laid out: other rows give other counts here."""
    lines = identity.of_dataset(trained / "data")
    other = prepare(tmp_path / "other", repeats=20, seed=1)
    assert identity.of_dataset(other) == lines


def test_it_does_not_depend_on_memory_and_threads(tmp_path: Path) -> None:
    lines = random_lines(random.Random(2), 3000)
    write_day(tmp_path / "day_0", lines[:2000])
    write_day(tmp_path / "day_1", lines[2000:])
    found = set()
    one = Limits(memory=4096, workers=1, piece_bytes=20_000)
    for number, limits in enumerate([ROOMY, TIGHT, one]):
        data = prepare_criteo(tmp_path / "day_*", tmp_path / str(number), limits)
        found.add(identity.of_dataset(data))
    (columns,) = found
    assert columns[0] == "numerical nvidia - - num_0"
    assert len(columns) == 39


# --- what is refused


CHANGES: dict[str, tuple[Callable[[Path], Path], str]] = {
    "values": (
        lambda folder: prepare(folder, cities=("Bern", "Chur", "Zug")),
        "its categorical column 'city' has another vocabulary",
    ),
    "name": (
        lambda folder: prepare(
            folder, columns=COLUMNS.replace("age:plain,price:plain", "price:plain,age:plain")
        ),
        "it has the numerical column 'price' where the model has the numerical column 'age'",
    ),
    "transform": (
        lambda folder: prepare(folder, columns=COLUMNS.replace("price:plain", "price:log")),
        "its numerical column 'price' was read as log, not as plain",
    ),
    "type": (
        lambda folder: prepare(folder, columns=COLUMNS.replace(":int64", "")),
        "its categorical column 'user' was read as string, not as int64",
    ),
    "fewer": (
        lambda folder: prepare(folder, columns=COLUMNS.replace(",city", "")),
        "it has no categorical column 'city'",
    ),
}


@pytest.mark.parametrize("change", CHANGES)
def test_other_data_are_refused_by_every_verb(
    change: str, trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make, how = CHANGES[change]
    data, before = make(tmp_path / "other"), small.snapshot(trained / "run")
    for arguments in verbs(trained, data, tmp_path / "run"):
        remedy = f"--vocabulary {trained / 'data'}"
        if arguments[1].endswith("export"):
            remedy = "--vocabulary"
        refused(capsys, arguments, f"{data} is not what the model was trained on: {how}", remedy)
    assert small.snapshot(trained / "run") == before
    assert not (tmp_path / "run").exists()


def test_a_dataset_that_was_prepared_anew_is_another(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data, run = tmp_path / "data", tmp_path / "run"
    shutil.copytree(trained / "data", data)
    assert main(train_flags(data, run, "--max-steps", "2")) == 0
    shutil.rmtree(data)
    prepare(data, cities=("Bern", "Chur", "Zug"))
    how = f"{data} has changed since the model was trained on it: its categorical column 'city'"
    refused(capsys, ["evaluate", str(run), "--device", "cpu"], how, "train a new run")
    continuing = train_flags(data, run, "--max-steps", "3")
    refused(capsys, continuing, f"The run in {run} cannot be continued", how, "another --output")


@pytest.mark.parametrize(
    ("place", "value", "reason"),
    [
        (("inputs", "columns"), [{"role": "numerical", "reading": "plain"}], "column"),
        (("inputs", "columns", 0, "reading"), 3, "reading"),
        (("inputs", "columns", 0, "reding"), "plain", "reding"),
        (("inputs", "columns", 0, "reading"), None, "age lacks its reading"),
        (("inputs",), [], "inputs"),
        (("inputs",), None, "inputs"),
        (("columns", "city", "max_rows"), 10**30, "max_rows"),
        (("columns", "city", "digest"), None, "digest"),
        (("recipe",), [], "recipe"),
    ],
)
def test_an_edited_vocabulary_file_is_held_to_its_form(
    trained: Path, tmp_path: Path, place: tuple[Any, ...], value: Any, reason: str
) -> None:
    facts = files.read_json(trained / "data" / "vocabulary" / "vocabulary.json")
    *path, last = place
    inside: Any = facts
    for key in path:
        inside = inside[key]
    inside[last] = value
    (tmp_path / "vocabulary.json").write_text(json.dumps(facts))
    with pytest.raises(InputError, match=rf"vocabulary\.json.*{reason}"):
        vocabulary_file.read(tmp_path)
    with pytest.raises(InputError, match="way to read the numerical column age 'quik'"):
        column_spec.from_inputs([{"column": "age", "role": "numerical", "reading": "quik"}])


def _cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-8])


def _without_a_column(file: Path) -> None:
    facts = json.loads(file.read_text())
    del facts["columns"]["city"]
    file.write_text(_edited(facts))


def _with_a_word_for_settings(file: Path) -> None:
    file.write_text(_edited(json.loads(file.read_text()) | {"settings": "x"}))


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        ("vocabulary/cat_1.parquet", _cut),
        ("vocabulary/vocabulary.json", _without_a_column),
        ("prepare.json", _with_a_word_for_settings),
    ],
)
def test_an_edited_dataset_is_not_grown(
    trained: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    name: str,
    damage: Callable[[Path], None],
) -> None:
    data = shutil.copytree(trained / "data", tmp_path / "data")
    (data / "checksums.json").unlink(missing_ok=True)
    (data / "vocabulary" / "checksums.json").unlink(missing_ok=True)
    damage(data / name)
    log = tmp_path / "log.csv"
    write_log(log)
    words = ["--input", str(log), "--output", str(tmp_path / "grown"), "--grow"]
    assert main(["prepare", "csv", *words, "--vocabulary", str(data)]) == 2
    assert f"trainmark: {data / name} " in capsys.readouterr().err
    assert not (tmp_path / "grown").exists()


@pytest.mark.parametrize(
    ("key", "value", "part"),
    [
        ("table_rows", [], "is not what the model was trained on"),
        ("table_rows", [10**30, 4], "table_rows"),
        ("bottom_mlp", [10**30, 8], "bottom_mlp"),
        ("numerical_features", None, "numerical_features"),
    ],
)
def test_an_edited_export_scores_nothing(
    trained: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    key: str,
    value: Any,
    part: str,
) -> None:
    """Its tables must be those that its vocabularies have ids for."""
    export = shutil.copytree(trained / "run" / "export", tmp_path / "export")
    (export / "checksums.json").unlink()
    config = json.loads((export / "config.json").read_text())
    (export / "config.json").write_text(_edited(config | {key: value}))
    write_log(tmp_path / "log.csv")
    words = ["--input", str(tmp_path / "log.csv"), "--output", str(tmp_path / "scores.csv")]
    assert main(["predict", str(export), *words]) == 2
    assert part in capsys.readouterr().err.splitlines()[-1]
    assert not (tmp_path / "scores.csv").exists()


# --- what is accepted


def test_other_days_of_the_same_vocabulary(trained: Path, tmp_path: Path) -> None:
    """Also where they have values that the vocabulary does not know, and lack some that it does."""
    old = ["--vocabulary", str(trained / "data")]
    data = prepare(tmp_path / "new", *old, cities=("Bern", "Zug"), seed=3)
    assert identity.of_dataset(data) == identity.of_dataset(trained / "data")
    run = str(trained / "run")
    assert main(["evaluate", run, "--data", str(data), "--device", "cpu"]) == 0
    assert main(train_flags(data, tmp_path / "run", "--from", run, "--max-steps", "1")) == 0


def test_a_run_of_an_earlier_version(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It does not say what it was trained on: it is taken at its table sizes, and continued."""
    run = tmp_path / "run"
    shutil.copytree(trained / "run", run)
    config = json.loads((run / "config.json").read_text())
    del config["dataset"]
    (run / "config.json").write_text(_edited(config))
    other = prepare(tmp_path / "other", cities=("Bern", "Chur", "Zug"))
    assert main(["evaluate", str(run), "--data", str(other), "--device", "cpu"]) == 0
    assert main(train_flags(trained / "data", run, "--max-steps", "3")) == 0
    assert read_config(run).dataset == identity.of_dataset(trained / "data")


def test_datasets_without_vocabularies(tmp_path: Path) -> None:
    """They are known by their sizes alone, to whoever knows more."""
    plain = small.write_dataset(tmp_path / "plain", cardinalities=(12, 4))
    assert identity.of_dataset(plain)[-1] == "categorical - 4 - cat_1.bin"
    numerical = ["numerical - - - num_0"]
    known = ["numerical log - - age"]
    ids, learned = ["categorical - 4 - cat_0.bin"], ["categorical int64 4 0123456789abcdef user"]
    assert identity.difference(known + learned, numerical + ids) is None
    assert identity.difference(numerical + ids, known + learned) is None
    larger = ["categorical - 5 - cat_0.bin"]
    assert identity.difference(known + learned, numerical + larger) == (
        "its categorical column 'user' has 5 ids, not 4"
    )
    more = identity.difference(known, known + larger)
    assert more == "it has a categorical column 'cat_0.bin' more"


def test_texts_are_told_apart_by_where_they_end(tmp_path: Path) -> None:
    found = set()
    for number, cities in enumerate((("ab", "c", "d"), ("a", "bc", "d"))):
        found.add(identity.of_dataset(prepare(tmp_path / str(number), cities=cities))[-1])
    assert len(found) == 2


def test_what_extends_a_dataset(tmp_path: Path) -> None:
    old = prepare(tmp_path / "old")
    grown = prepare(tmp_path / "grown", cities=(*CITIES, "Sion"))
    lines = identity.of_dataset(old)
    path = grown / "vocabulary" / "vocabulary.json"
    facts = json.loads(path.read_text())
    assert identity.no_extension(lines, old) is None
    assert identity.no_extension((), grown) is None
    told = identity.no_extension(lines, grown)
    assert told == "its categorical column 'city' has another vocabulary"

    kind, reading, rows, digest, name = lines[-1].split(" ", 4)
    assert (kind, reading, rows, name) == ("categorical", "string", "4", "city")
    before = [{"digest": "0123456789abcdef", "rows": 2}, {"digest": digest, "rows": 4}]
    facts["columns"]["city"]["extends"] = before
    path.write_text(_edited(facts))
    assert identity.no_extension(lines, grown) is None
    assert identity.no_extension(identity.of_dataset(grown), old) is not None
    assert "'city' more" in str(identity.no_extension(lines[:-1], grown))
    assert identity.difference(lines, identity.of_dataset(grown)) is not None
    with pytest.raises(InputError, match=r"extends what the model was trained on.*train --from"):
        identity.check(lines, grown, str(old))
    with pytest.raises(InputError, match=r"not what the model was trained on.*--vocabulary"):
        identity.check(identity.of_dataset(grown), old, str(grown))
