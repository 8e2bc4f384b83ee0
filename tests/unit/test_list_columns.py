"""Columns of lists: from Parquet and CSV files to a served model."""

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from sklearn.metrics import roc_auc_score

from tests import small
from trainmark.cli import main
from trainmark.clickdata import feature_spec
from trainmark.clicklog.sources import column_types, convert, lists
from trainmark.clicklog.sources.column_spec import ColumnUse
from trainmark.errors import InputError
from trainmark.run import run_folder
from trainmark.scoring import Served
from trainmark.workloads.dlrm import serving

WORDS = ("drama", "comedy", "war", "news", "sport", "kids", "rare")
COLUMNS = "label=clicked numerical=age categorical=tags,seen,city"
ROWS = 3000


def make_log(seed: int = 0) -> dict[str, list[Any]]:
    """Whoever likes the war or the kids clicks; the rest is noise. `rare` comes five times."""
    random = np.random.default_rng(seed)
    tags: list[Any] = [
        [WORDS[i] for i in random.choice(6, random.integers(0, 4), replace=False)]
        for _ in range(ROWS)
    ]
    for row in range(5):
        tags[100 * row] = ["rare", None, "war"]
    tags[7] = None
    seen = [random.integers(0, 30, random.integers(0, 6)).tolist() for _ in range(ROWS)]
    chance = [0.1 + 0.4 * ("war" in (t or [])) + 0.4 * ("kids" in (t or [])) for t in tags]
    return {
        "clicked": (random.random(ROWS) < chance).astype(int).tolist(),
        "age": random.normal(40, 10, ROWS).round(3).tolist(),
        "tags": tags,
        "seen": seen,
        "city": [f"c{city}" for city in random.integers(0, 9, ROWS)],
    }


def write_parquet(path: Path, log: dict[str, list[Any]]) -> Path:
    pq.write_table(pa.table(log), path, row_group_size=700)
    return path


def write_csv(path: Path, log: dict[str, list[Any]]) -> Path:
    lines = [",".join(log)]
    for row in zip(*log.values(), strict=True):
        fields = [
            "|".join("" if v is None else str(v) for v in f) if isinstance(f, list) else str(f)
            for f in (f if f is not None else [] for f in row)
        ]
        lines.append(",".join(fields))
    path.write_text("\n".join(lines) + "\n")
    return path


def prepare(kind: str, log: Path, output: Path, columns: str = COLUMNS, *flags: str) -> int:
    command = ["prepare", kind, "--input", str(log), "--columns", columns, "--output", str(output)]
    command += ["--holdout", "0.2", "--vocabulary-from", "all", "--frequency-threshold", "10"]
    return main([*command, *flags])


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("lists")
    assert prepare("parquet", write_parquet(folder / "log.parquet", make_log()), folder / "d") == 0
    return folder / "d"


def in_order(log: dict[str, list[Any]], column: str, threshold: int = 10) -> list[list[int]]:
    """Every row's ids by falling count, then by value: 0 for what is rare."""
    there = [[v for v in values or [] if v is not None] for values in log[column]]
    counts = Counter(value for values in there for value in values)
    kept = sorted((v for v in counts if counts[v] >= threshold), key=lambda v: (-counts[v], v))
    ids = {value: place for place, value in enumerate(kept, 1)}
    return [[ids.get(value, 0) for value in values] for values in there]


def test_values_of_lists_share_a_vocabulary(dataset: Path) -> None:
    log = make_log()
    spec = feature_spec.read(dataset)
    assert spec.hotness == (3, 5, 1)
    assert [spec.feature_spec[n].varies for n in spec.categorical] == [True, True, False]
    for number, (column, most) in enumerate((("tags", 3), ("seen", 5))):
        expected = in_order(log, column)
        name = spec.categorical[number]
        dtype = str(spec.feature_spec[name].dtype)
        held_out = [
            np.fromfile(dataset / split / name, dtype).reshape(-1, most)
            for split in ("test", "validation")
        ]
        # Held-out rows are the last, in their order.
        found = [[i for i in row if i >= 0] for row in np.concatenate(held_out).tolist()]
        assert found == expected[-len(found) :]
        trained = np.fromfile(dataset / "train" / name, dtype).reshape(-1, most).tolist()
        rest = [[i for i in row if i >= 0] for row in trained]
        assert sorted(rest) == sorted(expected[: -len(found)])
        assert all(row == sorted(row, key=lambda i: i < 0) for row in trained)  # -1 comes last
    assert 0 in np.fromfile(dataset / "train/cat_0.bin", np.int8)  # `rare` is


def test_csv_gives_the_same_bytes(dataset: Path, tmp_path: Path) -> None:
    log = write_csv(tmp_path / "log.csv", make_log())
    columns = COLUMNS.replace("tags,seen", "tags:string[3],seen:int64[5|]")
    assert prepare("csv", log, tmp_path / "d", columns) == 0
    for name in ("cat_0.bin", "cat_1.bin", "label.bin"):
        for split in ("train", "test", "validation"):
            found = (tmp_path / "d" / split / name).read_bytes()
            assert found == (dataset / split / name).read_bytes(), (split, name)


def test_memory_changes_no_byte(dataset: Path, tmp_path: Path) -> None:
    log = write_parquet(tmp_path / "log.parquet", make_log())
    assert prepare("parquet", log, tmp_path / "d", COLUMNS, "--memory", "4G") == 0
    for name in ("cat_0.bin", "cat_1.bin"):
        found = (tmp_path / "d/train" / name).read_bytes()
        assert found == (dataset / "train" / name).read_bytes()


@pytest.mark.parametrize("reading", ["string[2]", "int64[2]", "float64[2]", "hex[2]"])
@pytest.mark.parametrize("values", [["5", "", "7", "5", None], [5, None, 7, 5, None]])
def test_lists_with_a_dictionary_are_read_as_others(reading: str, values: list[Any]) -> None:
    plain = pa.array(values)
    columns = [pa.ListArray.from_arrays([0, 3, 5], c) for c in (plain.dictionary_encode(), plain)]
    use = ColumnUse("x", "categorical", reading)
    found: list[Any] = []
    for column in columns:
        try:
            column_types.resolve([use], [column.type], "auto")
        except InputError:
            found.append("refused")
        else:
            places = convert.convert([column], [use]).categorical
            found.append([getattr(place, "numbers", place).tolist() for place in places])
    assert found[0] == found[1]
    assert (found[0] == "refused") == (reading == "hex[2]" and values[0] == 5)


@pytest.mark.parametrize(
    ("reading", "words"),
    [
        ("list", "No row of tags has more than one value."),
        ("string[9;]", "Every row of tags has room for 9 values; the longest list has 3."),
        ("string[5;]", None),
    ],
)
def test_room_and_separators_that_rows_do_not_need(
    reading: str, words: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = ["clicked,tags", *["0,a;b;c", "1,a;b", "0,"] * 20]
    (tmp_path / "log.csv").write_text("\n".join(lines) + "\n")
    columns = f"label=clicked categorical=tags:{reading}"
    assert prepare("csv", tmp_path / "log.csv", tmp_path / "d", columns) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert words in said if words else "Warning" not in said


@pytest.mark.parametrize("flags", [[], ["--memory", "4G"]])
def test_files_of_lists_with_dictionaries(flags: list[str], tmp_path: Path) -> None:
    """Each group of rows has a dictionary of its own, over which Arrow makes no batch."""
    coded = pa.list_(pa.dictionary(pa.int32(), pa.string()))
    tags = [["a"], ["b", None, "", "a"], [], None] * 20
    log = {"clicked": [0, 1] * 40, "tags": pa.array(tags, coded)}
    pq.write_table(pa.table(log), tmp_path / "log.parquet", row_group_size=30)
    columns = "label=clicked categorical=tags"
    assert prepare("parquet", tmp_path / "log.parquet", tmp_path / "d", columns, *flags) == 0
    spec = feature_spec.read(tmp_path / "d")
    assert spec.hotness == (2,)  # nothing has no place
    held_out = np.fromfile(tmp_path / "d/test/cat_0.bin", np.int8).reshape(-1, 2).tolist()
    assert held_out == [[1, -1], [2, 1], [-1, -1], [-1, -1]] * 2


@pytest.mark.parametrize(
    ("reading", "between"),
    [
        ("string[3,]", ","),
        ("string[3,]", ", "),
        ("string[3 ]", " "),
        ("string[3\t]", "\t"),
        ("list", " | "),
    ],
)
def test_what_may_stand_between_the_values_of_a_text(
    reading: str, between: str, tmp_path: Path
) -> None:
    rows = [between.join(tags) for tags in (["war"], ["kids", "war", "news"], [])] * 20
    lines = [f'{row % 2},"{tags}",c' for row, tags in enumerate(rows)]
    (tmp_path / "log.csv").write_text("\n".join(["clicked,tags,city", *lines]) + "\n")
    columns = f"label=clicked categorical=tags:{reading},city"
    assert prepare("csv", tmp_path / "log.csv", tmp_path / "d", columns) == 0
    known = pq.read_table(tmp_path / "d/vocabulary/cat_0.parquet")["value"].to_pylist()
    assert known == ["kids", "news", "war"]
    assert feature_spec.read(tmp_path / "d").hotness[1] == 1
    run = tmp_path / "run"
    command = ["train", "dlrm-auto", "--data", str(tmp_path / "d"), "--output", str(run)]
    assert main([*command, "--device", "cpu", "--epochs", "1"]) == 0
    scorer = loaded(run)
    asked = {"tags": ["kids", "war"], "city": "c"}
    of_json = scorer.score([scorer.read({"rows": [asked]})])
    text = np.array([[between.join(asked["tags"]).encode(), b"c"]], object)
    np.testing.assert_array_equal(
        of_json, scorer.score([scorer.read_tensors({"categorical": text})])
    )


# --- to a served model


def loaded(run: Path) -> Any:
    return serving.load(
        Served(
            folder=run,
            run=run_folder.read_config(run),
            checkpoint=run_folder.find_checkpoint(run),
            device="cpu",
        )
    )


def test_from_lists_to_a_served_model(
    dataset: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The whole road: Parquet, training, new files, answers."""
    run = tmp_path / "run"
    flags = ["--model.pooling", "mean", "--device", "cpu", "--global-batch", "64", "--epochs", "4"]
    command = ["train", "dlrm-auto", "--data", str(dataset), "--output", str(run)]
    assert main([*command, *flags]) == 0
    assert small.result(run)["quality"]["value"] > 0.7  # without the tags, 0.5
    new = make_log(seed=5)
    log = write_parquet(tmp_path / "new.parquet", new)
    capsys.readouterr()
    assert main(["evaluate", str(run), "--input", str(log), "--device", "cpu"]) == 0
    scorer = loaded(run)
    names = ("age", "tags", "seen", "city")
    rows = [
        dict(zip(names, row, strict=True)) for row in zip(*(new[n] for n in names), strict=True)
    ]
    scores = scorer.score([scorer.read({"rows": rows})])
    said = json.loads((run / "evaluation.json").read_text())["splits"]["input"]
    assert roc_auc_score(new["clicked"], scores) == pytest.approx(said["auc"], abs=1e-6)
    assert said["auc"] > 0.7
    check_requests(scorer)
    tensors = {
        "numerical": np.array([new["age"]]).T,
        "categorical": np.array([texts(row) for row in rows], object),
    }
    np.testing.assert_array_equal(scorer.score([scorer.read_tensors(tensors)]), scores)
    assert main(["export", str(run), "--output", str(tmp_path / "export")]) == 0
    for model in (run, tmp_path / "export"):
        output = tmp_path / f"{model.name}.parquet"
        command = ["predict", str(model), "--input", str(log), "--output", str(output)]
        assert main([*command, "--device", "cpu"]) == 0
        found = pq.read_table(output)["score"].to_numpy()
        np.testing.assert_allclose(found, scores, atol=1e-6)


def texts(row: dict[str, Any]) -> list[bytes]:
    """A row's categories as tensors have them: lists with bars between their values."""
    lists_of = (row["tags"] or [], row["seen"])
    joined = ["|".join("" if v is None else str(v) for v in values) for values in lists_of]
    return [text.encode() for text in (*joined, row["city"])]


def check_requests(scorer: Any) -> None:
    def score(**changes: Any) -> float:
        row = {"age": 40, "tags": ["war"], "seen": [3], "city": "c1"} | changes
        return float(scorer.score([scorer.read({"rows": [row]})])[0])

    (most_frequent,) = scorer.example["rows"][0]["tags"]
    assert most_frequent in WORDS
    assert score(tags=["war"]) == score(tags=["war", None, ""])
    assert score(tags=None) == score(tags=[])
    assert score(tags=["never seen"]) == score(tags=["rare"])
    assert score(tags=["war"]) > score(tags=[])
    assert json.dumps(scorer.facts["expects"])
    for wrong, words in (
        ("war", "tags is 'war', expected a list of at most 3 values"),
        (["a", "b", "c", "d"], "expected a list of at most 3 values"),
        ([["war"]], "expected a list of at most 3 values"),
    ):
        with pytest.raises(Exception, match=words):
            score(tags=wrong)
    with pytest.raises(Exception, match="seen"):
        score(seen=["x"])


# --- what is refused


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--model.crosses", "0x1"], "model.crosses are for one id of each feature"),
        (["--model.table-widths", "8", "16", "16"], "Tables of several widths are for one id of"),
    ],
)
def test_what_lists_exclude(
    flags: list[str],
    words: str,
    dataset: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    command = ["train", "dlrm-auto", "--data", str(dataset), "--output", str(tmp_path / "run")]
    said = refused(capsys, main([*command, "--device", "cpu", *flags]))
    assert words in said
    assert "a sample has up to 3 5 1 of them" in said
    assert "or prepare data without columns of lists." in said
    assert not (tmp_path / "run").exists()


def refused(capsys: pytest.CaptureFixture[str], code: int) -> str:
    assert code == 2
    return capsys.readouterr().err


def test_lists_that_are_too_long(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = write_parquet(tmp_path / "log.parquet", make_log())
    columns = COLUMNS.replace("seen", "seen:int64[4]")
    said = refused(capsys, prepare("parquet", log, tmp_path / "d", columns))
    assert "expected a list of at most 4 values" in said
    assert re.search(r"seen:int64\[[5-9]\] takes this one", said)
    assert prepare("parquet", log, tmp_path / "d", columns, "--bad-rows", "keep") == 0
    spec = feature_spec.read(tmp_path / "d")
    assert spec.hotness == (3, 4, 1)
    expected = [row[:4] for row in in_order_cut(make_log())]
    name = spec.categorical[1]
    dtype = str(spec.feature_spec[name].dtype)
    found = np.fromfile(tmp_path / "d/validation" / name, dtype).reshape(-1, 4).tolist()
    assert [[i for i in row if i >= 0] for row in found] == expected[-len(found) :]


def test_a_text_has_room_for_the_longest_list_that_there_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As a list of Parquet's has; --columns need not say how long it is."""
    log = make_log() | {"city": ["c"] * ROWS}
    found = {}
    for longest in (5, 37, 101):
        log["seen"][3] = list(range(longest))
        output = tmp_path / str(longest)
        columns = COLUMNS.replace("tags,seen", "tags:list,seen:list")
        code = prepare("csv", write_csv(tmp_path / "log.csv", log), output, columns)
        if longest > lists.MOST:
            assert "seen:string[101] takes this one" in refused(capsys, code)
            continue
        assert code == 0
        assert "Warning" not in capsys.readouterr().out
        assert feature_spec.read(output).hotness == (3, longest, 1)
        facts = json.loads((output / "vocabulary/vocabulary.json").read_text())
        readings = [use["reading"] for use in facts["inputs"]["columns"]]
        assert readings == ["standard", "string[3]", f"string[{longest}]", "string"]
        name = feature_spec.read(output).categorical[0]
        found[longest] = (output / "train" / name).read_bytes()
    declared = COLUMNS.replace("tags,seen", "tags:string[3],seen:list")
    log["seen"][3] = list(range(5))
    assert prepare("csv", write_csv(tmp_path / "log.csv", log), tmp_path / "d", declared) == 0
    assert (tmp_path / "d/train/cat_0.bin").read_bytes() == found[5]


def test_later_rows_have_the_room_of_the_earlier_ones(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With --vocabulary, nothing advises what contradicts the earlier dataset, and the same
    --columns agree with it."""
    log, old = make_log() | {"city": ["c"] * ROWS}, str(tmp_path / "old")
    columns = COLUMNS.replace("tags,seen", "tags:string[20],seen:list")
    path = write_csv(tmp_path / "log.csv", log)
    assert prepare("csv", path, tmp_path / "old", columns) == 0
    assert "Every row of tags has room for 20 values" in capsys.readouterr().out
    log["seen"][3] = list(range(9))
    path = write_csv(tmp_path / "log.csv", log)
    command = ("csv", path, tmp_path / "new", columns, "--vocabulary", old)
    said = refused(capsys, prepare(*command))
    assert "expected a list of at most 5 values, each string or nothing. With" in said
    assert "of lists that are too long, the last values" in said
    assert prepare(*command, "--bad-rows", "keep") == 0
    assert "Warning" not in capsys.readouterr().out
    assert feature_spec.read(tmp_path / "new").hotness == (20, 5, 1)
    semicolons = columns.replace("tags:string[20]", "tags:string[20;]")
    assert prepare("csv", path, tmp_path / "old;", semicolons, "--bad-rows", "keep") == 0
    columns = columns.replace("tags:string[20]", "tags:list")
    said = refused(capsys, prepare("csv", path, tmp_path / "n", columns, "--vocabulary", f"{old};"))
    assert f"--columns reads 'tags' as list; {old}; has it as string[20;]" in said


def test_rows_have_no_room_for_any_number_of_values(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = make_log()
    path = write_csv(tmp_path / "log.csv", log)
    columns = "label=clicked categorical=tags:string[{}]"
    said = refused(capsys, prepare("csv", path, tmp_path / "d", columns.format(200_000)))
    assert "string[200000] in --columns: a list may have at most 10,000 values" in said
    assert prepare("csv", path, tmp_path / "d", columns.format(2000)) == 0
    assert feature_spec.read(tmp_path / "d").hotness == (2000,)
    log["seen"][3] = [7] * 10_001
    path = write_csv(tmp_path / "long.csv", log)
    said = refused(
        capsys, prepare("csv", path, tmp_path / "c", "label=clicked categorical=seen:list")
    )
    assert "at most 100 values, each string or nothing. With" in said
    parquet = write_parquet(tmp_path / "log.parquet", log)
    said = refused(capsys, prepare("parquet", parquet, tmp_path / "p"))
    assert "longest list of seen has 10,001 values; at most 10,000 are stored" in said
    assert "seen:int64[10000] with --bad-rows keep" in said


def test_one_list_that_is_much_longer_than_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """All rows are stored as long as the longest."""
    seen: list[Any] = [[1, 2], [3], [], None] * 1000
    for longest, is_said in ((20, False), (300, True)):
        seen[5] = [7] * longest
        log = write_parquet(tmp_path / "log.parquet", {"clicked": [0, 1] * 2000, "seen": seen})
        output = tmp_path / f"d{longest}"
        assert prepare("parquet", log, output, "label=clicked categorical=seen") == 0
        assert feature_spec.read(output).hotness == (longest,)
        said = capsys.readouterr().out
        assert ("The longest list of seen has 300 values" in said) == is_said
        assert ("have at most 2. seen:int64[2] with --bad-rows keep takes" in said) == is_said


def in_order_cut(log: dict[str, list[Any]]) -> list[list[int]]:
    """Counted as they are kept: the first four."""
    return in_order(log | {"seen": [values[:4] for values in log["seen"]]}, "seen")


def test_a_way_to_read_lists_that_is_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = write_parquet(tmp_path / "log.parquet", make_log())
    columns = COLUMNS.replace("tags", "tags:list(4)")
    assert "float64, hex, list, string[20]." in refused(
        capsys, prepare("parquet", log, tmp_path / "d", columns)
    )


@pytest.mark.parametrize(
    ("columns", "words"),
    [
        (COLUMNS.replace("tags", "tags:string"), "tags is a column of list"),
        (COLUMNS.replace("age", "seen").replace("tags,seen", "tags"), "seen is a column of list"),
        (
            COLUMNS.replace("city", "age:list").replace("=age ", "=clicked "),
            "names 'clicked' twice",
        ),
        ("label=clicked categorical=age:list", "age is a column of double; lists, or texts"),
        (COLUMNS.replace("seen", "seen:int64[0]"), "int64[0]"),
    ],
)
def test_columns_that_are_no_lists(
    columns: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = write_parquet(tmp_path / "log.parquet", make_log())
    assert words in refused(capsys, prepare("parquet", log, tmp_path / "d", columns))


@pytest.mark.parametrize("reading", ["", ":list", ":int64[5]"])
def test_lists_of_lists_are_refused(
    reading: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = {"clicked": [0, 1] * 20, "seen": [[[1, 2], [3]]] * 40}
    pq.write_table(pa.table(log), tmp_path / "log.parquet")
    columns = f"label=clicked categorical=seen{reading}"
    code = prepare("parquet", tmp_path / "log.parquet", tmp_path / "d", columns)
    assert "seen is a column of list<element: list<element: int64>>" in refused(capsys, code)


def test_torchrecs_files_have_no_lists_of_different_lengths(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = write_parquet(tmp_path / "log.parquet", make_log())
    code = prepare("parquet", log, tmp_path / "d", COLUMNS, "--to", "npy")
    assert "equally many ids of a feature in every row" in refused(capsys, code)


def test_readings() -> None:
    assert str(lists.parse("int64[20;]")) == "int64[20;]"
    assert str(lists.parse("string[20|]")) == "string[20]"
    assert lists.parse("string") is None
    assert lists.parse(None) is None
