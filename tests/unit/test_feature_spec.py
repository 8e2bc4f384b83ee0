"""feature_spec.yaml: every rule has its message, every bad file its sentence."""

import contextlib
import re
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings, strategies

from trainmark.clickdata import feature_spec, spec_rules
from trainmark.errors import InputError
from trainmark.validation import parse


def plain() -> dict[str, Any]:
    """A valid specification with two numericals and two categoricals, as YAML gives it."""

    def chunks(mapping: str) -> list[dict[str, Any]]:
        contents = {"numerical.bin": ["num_0", "num_1"], "label.bin": ["label"]}
        contents |= {"cat_0.bin": ["cat_0.bin"], "cat_1.bin": ["cat_1.bin"]}
        return [
            {"type": "split_binary", "features": features, "files": [f"{mapping}/{file}"]}
            for file, features in contents.items()
        ]

    return {
        "feature_spec": {
            "num_0": {"dtype": "float16"},
            "num_1": {"dtype": "float16"},
            "label": {"dtype": "bool"},
            "cat_0.bin": {"dtype": "int8", "cardinality": 100},
            "cat_1.bin": {"dtype": "int32", "cardinality": 40000},
        },
        "source_spec": {"train": chunks("train"), "test": chunks("test")},
        "channel_spec": {
            "categorical": ["cat_0.bin", "cat_1.bin"],
            "numerical": ["num_0", "num_1"],
            "label": ["label"],
        },
        "metadata": {},
    }


def build(data: dict[str, Any]) -> feature_spec.FeatureSpec:
    return parse(feature_spec.FeatureSpec, data, "test.yaml")


RULES: dict[str, tuple[Callable[..., Any], str]] = {
    # name: (what breaks the rule, given feature_spec, source_spec and channel_spec; its message)
    "no dtype": (lambda f, s, c: f["num_0"].pop("dtype"), "'num_0' has no dtype"),
    "unknown dtype": (
        lambda f, s, c: f["num_0"].update(dtype="torch.half"),
        "'torch.half', which numpy does not know",
    ),
    "hotness": (lambda f, s, c: f["cat_0.bin"].update(hotness=0), "'cat_0.bin' has hotness 0"),
    "channels": (
        lambda f, s, c: c.update(extra=[]),
        "exactly the channels categorical, numerical, label; it has",
    ),
    "two labels": (
        lambda f, s, c: c["label"].append(c["numerical"].pop()),
        "label channel should have exactly one feature; it has label, num_1",
    ),
    "no label": (
        lambda f, s, c: c["label"].clear(),
        "label channel should have exactly one feature; it has none",
    ),
    "twice in a channel": (
        lambda f, s, c: c["categorical"].append("cat_0.bin"),
        "'cat_0.bin' is listed 2 times in channel_spec",
    ),
    "in two channels": (
        lambda f, s, c: c["numerical"].append("cat_0.bin"),
        "'cat_0.bin' is listed 2 times in channel_spec",
    ),
    "not described": (
        lambda f, s, c: c["categorical"].append("ghost"),
        "'ghost' of channel_spec is not described",
    ),
    "in no channel": (
        lambda f, s, c: c["categorical"].pop(),
        "'cat_1.bin' of feature_spec is in no channel",
    ),
    "no cardinality": (
        lambda f, s, c: f["cat_0.bin"].pop("cardinality"),
        "an integer cardinality; it has none",
    ),
    "auto cardinality": (
        lambda f, s, c: f["cat_0.bin"].update(cardinality="auto"),
        "an integer cardinality; it has 'auto'",
    ),
    "cardinality 0": (
        lambda f, s, c: f["cat_0.bin"].update(cardinality=0),
        "cardinality 0; 1 or more",
    ),
    "does not fit": (
        lambda f, s, c: f["cat_0.bin"].update(cardinality=129),
        "129, which does not fit its dtype int8",
    ),
    "float ids": (
        lambda f, s, c: f["cat_1.bin"].update(dtype="float32"),
        "has dtype float32; one of int8, int16, int32, uint8, int64 is expected",
    ),
    "big-endian ids": (
        lambda f, s, c: f["cat_1.bin"].update(dtype=">i4"),
        "has dtype >i4; one of int8, int16, int32, uint8, int64 is expected",
    ),
    "float64 numerical": (
        lambda f, s, c: f["num_1"].update(dtype="float64"),
        "'num_1' has dtype float64; float16 or float32 is expected",
    ),
    "numericals of two types": (
        lambda f, s, c: f["num_1"].update(dtype="float32"),
        "some numerical features are float16 and some float32",
    ),
    "int8 label": (
        lambda f, s, c: f["label"].update(dtype="int8"),
        "'label' has dtype int8; bool is expected",
    ),
    "no test": (
        lambda f, s, c: s.pop("test"),
        "exactly the mappings train, test; it has train.",
    ),
    "a third mapping": (
        lambda f, s, c: s.update(validation=s["test"]),
        "exactly the mappings train, test; it has train, test, validation.",
    ),
    "csv": (
        lambda f, s, c: s["train"][0].update(type="csv"),
        "train, chunk 0: type 'csv' is not trainable",
    ),
    "two files": (
        lambda f, s, c: s["test"][1]["files"].append("b"),
        "test, chunk 1: exactly one file is expected; it has test/label.bin, b",
    ),
    "no file": (
        lambda f, s, c: s["test"][1]["files"].clear(),
        "exactly one file is expected; it has none",
    ),
    "empty chunk": (
        lambda f, s, c: s["train"].append(dict(s["train"][0], features=[])),
        "train, chunk 4: it has no features",
    ),
    "unknown in chunk": (
        lambda f, s, c: s["train"].append(dict(s["train"][0], features=["ghost"])),
        "train, chunk 4: feature 'ghost' is not described",
    ),
    "shared categorical": (
        lambda f, s, c: s["train"][2]["features"].extend(s["train"].pop()["features"]),
        "a categorical feature must be alone",
    ),
    "shared label": (
        lambda f, s, c: s["train"][1]["features"].append("ghost"),
        "the label must be alone",
    ),
    "numerical order": (
        lambda f, s, c: s["train"][0]["features"].reverse(),
        "in the order of channel_spec, num_0, num_1; it has num_1, num_0",
    ),
    "some numericals": (
        lambda f, s, c: s["train"][0]["features"].pop(),
        "must hold all numerical features",
    ),
    "twice in mapping": (
        lambda f, s, c: s["train"].append(s["train"][2]),
        "source_spec train holds feature 'cat_0.bin' 2 times",
    ),
    "not in mapping": (lambda f, s, c: s["train"].pop(), "source_spec train lacks cat_1.bin"),
}

BREAK_OTHERS_TOO = {"two labels", "no label", "in two channels", "shared label", "some numericals"}
"""Rules that cannot be broken without breaking another."""


@pytest.mark.parametrize("rule", RULES)
def test_each_rule_has_its_own_message(rule: str) -> None:
    data = plain()
    break_rule, message = RULES[rule]
    break_rule(data["feature_spec"], data["source_spec"], data["channel_spec"])
    with pytest.raises(InputError, match=re.escape(message)) as error:
        spec_rules.check(build(data))
    assert ("problems:" in str(error.value)) == (rule in BREAK_OTHERS_TOO)


def test_valid_specifications_pass() -> None:
    spec_rules.check(build(plain()))
    spec_rules.check(feature_spec.default_spec([3, 200], 0))
    spec_rules.check(feature_spec.default_spec([], 4))
    validation = feature_spec.of_mappings(feature_spec.default_spec([3], 1), ["validation"])
    spec_rules.check(validation, ("validation",))
    with pytest.raises(InputError, match="exactly the mappings train, test; it has validation"):
        spec_rules.check(validation)


def test_all_problems_are_reported_at_once() -> None:
    data = plain()
    data["feature_spec"]["label"]["dtype"] = "int8"
    data["source_spec"]["test"][2]["type"] = "csv"
    with pytest.raises(InputError, match=r"(?s)2 problems.*bool is expected.*'csv'"):
        spec_rules.check(build(data))


def test_largest_ids_fit_exactly() -> None:
    data = plain()
    data["feature_spec"]["cat_0.bin"]["cardinality"] = 128  # ids 0 to 127
    spec_rules.check(build(data))


def test_generic_form_parses_and_is_then_refused() -> None:
    """The README example of NVIDIA's generic format: torch dtypes, CSV, own channel names."""
    text = """
    feature_spec:
      user_gender: {dtype: torch.int8, cardinality: 3}
      user_age: {dtype: torch.float32}
      clicked: {dtype: torch.bool}
    source_spec:
      train:
      - {type: csv, features: [user_gender, user_age, clicked], files: [a.csv, b.csv]}
    channel_spec: {numeric_inputs: [user_age], categorical_user_inputs: [user_gender],
                   label_ch: [clicked]}
    """
    spec = build(yaml.safe_load(text))
    with pytest.raises(InputError, match=r"(?s)torch.int8.*exactly the channels"):
        spec_rules.check(spec)


@pytest.mark.parametrize(
    ("cardinality", "dtype"),
    [
        (1, "int8"),
        (126, "int8"),
        (127, "int16"),
        (32766, "int16"),
        (32767, "int32"),
        (2147483646, "int32"),
    ],
)
def test_dtype_boundaries(cardinality: int, dtype: str) -> None:
    assert feature_spec.dtype_for(cardinality) == dtype


def test_too_large_a_cardinality() -> None:
    with pytest.raises(InputError, match="2,147,483,647 distinct ids"):
        feature_spec.dtype_for(2147483647)


def test_dtypes_of_criteo() -> None:
    """Published for the frequency threshold 15."""
    cardinalities = (
        "7912889,33823,17139,7339,20046,4,7105,1382,63,5554114,582469,245828,11,2209,10667,104,4,"
        "968,15,8165896,2675940,7156453,302516,12022,97,35"
    )
    dtypes = "32,32,16,16,16,8,16,16,8,32,32,32,8,16,16,8,8,16,8,32,32,32,32,16,8,8"
    found = [feature_spec.dtype_for(int(c)) for c in cardinalities.split(",")]
    assert found == [f"int{bits}" for bits in dtypes.split(",")]


def test_round_trip(tmp_path: Path) -> None:
    spec = feature_spec.default_spec([10, 500, 70000], 13, {"best_auc": 0.8})
    feature_spec.write(spec, tmp_path / feature_spec.FILE_NAME)
    assert feature_spec.read(tmp_path) == spec
    assert feature_spec.read(tmp_path / feature_spec.FILE_NAME) == spec
    assert spec.cardinalities == (10, 500, 70000)
    assert spec.numerical == tuple(f"num_{i}" for i in range(13))
    assert spec.files("test")["cat_2.bin"] == "test/cat_2.bin"
    assert spec.files("train")["num_12"] == "train/numerical.bin"
    assert [path.name for path in tmp_path.iterdir()] == [feature_spec.FILE_NAME]


def test_file_is_what_nvidia_writes(tmp_path: Path) -> None:
    path = tmp_path / "spec.yaml"
    feature_spec.write(build(plain()), path)
    assert path.read_text() == yaml.dump(plain()) + "\n"


BAD_FILES = {
    b"": "it holds nothing",
    b"[1, 2]": "it holds a list",
    b"feature_spec: [": "not readable as YAML",
    b"\xff\xfe\x00": "not readable as YAML",
    b"a: 2001-99-99": "not readable as YAML",
    b"[" * 5000: "not readable as YAML",
    b"!!python/object/apply:os.system ['true']": "not readable as YAML",
    b"feature_spec: {}\nchannel_spec: {}": "source_spec is missing",
    b"feature_spec: 3\nsource_spec: {}\nchannel_spec: {}": "feature_spec: ",
    b"feature_spec: {a: {cardinality: [1]}}\nsource_spec: {}\nchannel_spec: {}": "cardinality",
    b"feature_spec: {}\nsource_spec: {a: [{type: csv}]}\nchannel_spec: {}": "features is missing",
}


@pytest.mark.parametrize("content", BAD_FILES, ids=lambda c: repr(c[:30]))
def test_bad_files_name_the_path_and_the_reason(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "feature_spec.yaml"
    path.write_bytes(content)
    with pytest.raises(InputError, match=re.escape(BAD_FILES[content])) as error:
        feature_spec.read(tmp_path)
    assert str(path) in str(error.value)


def _nested_aliases(place: str) -> bytes:
    """A few hundred bytes that stand for 10^20 values, under one of the four keys."""
    lines = ["a0: &a0 [x,x,x,x,x,x,x,x,x,x]"]
    for depth in range(1, 20):
        lines.append(f"a{depth}: &a{depth} [{','.join([f'*a{depth - 1}'] * 10)}]")
    return "\n".join([*lines, f"{place}: *a19"]).encode()


@pytest.mark.parametrize(
    "content",
    [
        *(_nested_aliases(key) for key in ("feature_spec", "source_spec", "metadata", "unknown")),
        b"metadata: &a {self: *a}",
        b"a: &a {x: 1}\n"
        + b"".join(
            b"b%d: &b%d {<<: [%s]}\n" % (n, n, b",".join([b"*b%d" % (n - 1) if n else b"*a"] * 9))
            for n in range(20)
        ),
    ],
    ids=["features", "sources", "metadata", "unknown", "itself", "merged"],
)
def test_aliases_do_not_make_a_file_larger_without_bound(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "feature_spec.yaml"
    path.write_bytes(content)
    with pytest.raises(InputError, match="its aliases stand for") as caught:
        feature_spec.read(path)
    assert len(str(caught.value)) < 400 + len(str(path))


def test_what_was_received_is_quoted_in_part(tmp_path: Path) -> None:
    """However long it is: 1,000,000 names have a long `repr`."""
    with pytest.raises(InputError, match="feature_spec: ") as caught:
        parse(feature_spec.FeatureSpec, {"feature_spec": ["name"] * 1_000_000}, "x.yaml")
    assert len(str(caught.value)) < 1000


def test_missing_file_names_the_path(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"nowhere does not exist"):
        feature_spec.read(tmp_path / "nowhere")


@pytest.fixture
def dataset(tmp_path: Path) -> Path:
    """Three rows of the specification above."""
    (tmp_path / "train").mkdir()
    row_bytes = {"numerical.bin": 4, "label.bin": 1, "cat_0.bin": 1, "cat_1.bin": 4}
    for name, size in row_bytes.items():
        (tmp_path / "train" / name).write_bytes(bytes(3 * size))
    return tmp_path


def test_count_rows(dataset: Path) -> None:
    assert feature_spec.count_rows(build(plain()), dataset, "train") == 3


def test_hotness_multiplies_the_row_size(dataset: Path) -> None:
    data = plain()
    data["feature_spec"]["cat_1.bin"]["hotness"] = 2
    (dataset / "train" / "cat_1.bin").write_bytes(bytes(24))
    assert feature_spec.count_rows(build(data), dataset, "train") == 3


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("cat_1.bin", None, "cat_1.bin does not exist"),
        ("label.bin", b"", "label.bin is empty"),
        ("cat_1.bin", bytes(11), "cat_1.bin is truncated: 11 bytes"),
        ("numerical.bin", bytes(8), "most have 3 rows, but .*numerical.bin has 2"),
    ],
)
def test_damaged_files_are_named(
    name: str, content: bytes | None, message: str, dataset: Path
) -> None:
    path = dataset / "train" / name
    path.unlink()
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(InputError, match=message):
        feature_spec.count_rows(build(plain()), dataset, "train")


def test_unknown_mapping(dataset: Path) -> None:
    with pytest.raises(InputError, match=r"no mapping 'validation'; there is train, test"):
        feature_spec.count_rows(build(plain()), dataset, "validation")


@settings(max_examples=150, deadline=None)
@given(data=strategies.data())
def test_no_damage_to_the_file_gives_a_traceback(data: strategies.DataObject) -> None:
    """Whatever stands in the file: it is accepted, or refused in one sentence."""
    text = bytearray(yaml.dump(plain()).encode())
    for _ in range(data.draw(strategies.integers(1, 4))):
        start = data.draw(strategies.integers(0, len(text)))
        stop = start + data.draw(strategies.integers(0, 12))
        text[start:stop] = data.draw(strategies.sampled_from(SHRAPNEL))
    with tempfile.TemporaryDirectory() as folder, contextlib.suppress(InputError):
        path = Path(folder, feature_spec.FILE_NAME)
        path.write_bytes(text)
        spec = feature_spec.read(path)
        spec_rules.check(spec)
        feature_spec.count_rows(spec, folder, "train")


SHRAPNEL = [
    *(b"", b"\n", b" ", b"- ", b": ", b"[", b"]", b"{}", b"null", b"-1", b"1e99", b"0", b".nan"),
    *(
        b"true",
        b"2001-01-01",
        b"'",
        b'"\\0"',
        b"&a ",
        b"*a",
        b"\xff",
        b"\x00",
        b"int8",
        b"O",
        b"S0",
    ),
    *(b"label", b"train", b"numerical", b"cat_0.bin", b"../..", b"9" * 5000, b"!!binary ", b"<<: "),
]
