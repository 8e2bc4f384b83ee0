"""Any values, in flags and in configuration files, are read or refused with one message."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.small import FLAGS, config
from tests.unit.refusals import refused, small
from trainmark.cli import main
from trainmark.config import Interval, parse_profile, to_plain, with_file
from trainmark.errors import InputError
from trainmark.workloads import named_run

FUZZ = settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
NUMBERS = st.one_of(
    st.integers(-(2**40), 2**40),
    st.sampled_from([0, 1, -1, 2**31 - 1, 2**31, 2**62]),
    st.floats(allow_nan=True, allow_infinity=True),
)
TEXTS = st.text(st.characters(exclude_categories=["Cs", "Cc"]), max_size=12)


# --- flags

SCALAR_FLAGS = (
    *("seed", "lr", "loss-scale", "global-batch", "micro-batch", "accumulate", "eval-batch"),
    *("epochs", "max-steps", "evals-per-epoch", "target", "warmup-clock", "log-every"),
    *("keep-checkpoints", "shuffle-window", "synthetic-rows", "profile", "checkpoint-every"),
    *("model.numerical-features", "model.embedding-dim", "model.init", "model.table-rows"),
    *("model.bottom-mlp", "model.top-mlp", "optimizer.name", "optimizer.eps"),
    *("optimizer.beta1", "schedule.warmup-steps", "schedule.decay-start"),
    *("schedule.decay-steps", "schedule.decay-power", "schedule.end-factor"),
    *("schedule.first-step", "precision", "device", "data", "compile", "quality-split"),
)


@FUZZ
@given(
    st.dictionaries(
        st.sampled_from(SCALAR_FLAGS), st.one_of(NUMBERS.map(str), TEXTS), min_size=1, max_size=3
    ),
    st.sampled_from(["uniform", "planted"]),
)
def test_any_flag_values_are_shown_or_refused(
    capsys: pytest.CaptureFixture[str], flags: dict[str, str], ids: str
) -> None:
    words = [f"--{flag}={value}" for flag, value in flags.items()]
    shown_or_refused(capsys, *FLAGS, "--synthetic-ids", ids, *words)


def shown_or_refused(capsys: pytest.CaptureFixture[str], *words: str) -> None:
    capsys.readouterr()
    code = main(["show", "dlrm-demo", *words])
    printed = capsys.readouterr()
    assert code in (0, 2)
    if code == 2:
        assert printed.out == ""
        assert printed.err.count("trainmark: ") == 1
        assert "Traceback" not in printed.err
    else:
        assert printed.err == ""


# --- configuration files

JSON_VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), NUMBERS, TEXTS),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(TEXTS, inner, max_size=3)),
    max_leaves=6,
)
FIELDS = sorted(to_plain(named_run("dlrm-demo")))


@FUZZ
@given(st.dictionaries(st.one_of(st.sampled_from(FIELDS), TEXTS), JSON_VALUES, max_size=4))
def test_any_configuration_file_is_read_or_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: dict[str, Any]
) -> None:
    path = tmp_path / "run.json"
    path.write_text(json.dumps(content))
    shown_or_refused(capsys, "--config", str(path))


@pytest.mark.parametrize(
    ("name", "content", "part"),
    [
        ("a.toml", "lr = ", "cannot be read"),
        ("a.toml", "lr = 0.1\nlr = 0.2", "cannot be read"),
        ("a.toml", b"\xff\xfe", "cannot be read"),
        ("a.toml", "learning_rate = 1", "Unknown field 'learning_rate'"),
        ("a.toml", "max_step = 1", "Did you mean 'max_steps'?"),
        ("a.toml", "[model]\nembeding_dim = 1", "Did you mean 'embedding_dim'?"),
        ("a.toml", "[schedule]\nwarmup_steps = 'long'", "schedule.warmup_steps"),
        ("a.toml", "model = 3", "model"),
        ("a.toml", "name = 'dlrm-small'", "configures name 'dlrm-small'"),
        ("a.json", "{", "cannot be read"),
        ("a.json", "[1, 2]", "must hold a table"),
        ("a.json", '{"schema": "trainmark.result/1"}', "has no 'config'"),
        ("a.json", '{"schema": "trainmark.result/1", "config": 5}', "has no 'config'"),
        ("a.json", '{"lr": NaN}', "lr must be a finite number"),
        ("a.json", "[" * 100_000, "cannot be read"),
    ],
)
def test_broken_configuration_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, content: str | bytes, part: str
) -> None:
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    output = tmp_path / "run"
    refused(capsys, small("--config", str(path), output=output), part, lines=None)
    assert not output.exists()


def test_a_directory_as_configuration_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    refused(capsys, small("--config", str(tmp_path)), "cannot be read")


def test_a_file_changes_only_what_it_names(tmp_path: Path) -> None:
    path = tmp_path / "a.toml"
    path.write_text("[schedule]\nwarmup_steps = 7\n")
    before, after = config(), with_file(config(), path)
    assert after.schedule.warmup_steps == 7
    assert before.schedule.decay == after.schedule.decay
    assert to_plain(after) | {"schedule": to_plain(before)["schedule"]} == to_plain(before)


# --- fields with words of their own


@pytest.mark.parametrize(
    ("text", "interval"),
    [
        ("never", Interval()),
        ("1 step", Interval(steps=1)),
        ("1000 steps", Interval(steps=1000)),
        ("30 minutes", Interval(seconds=1800)),
        ("0.5 minutes", Interval(seconds=30)),
    ],
)
def test_intervals(text: str, interval: Interval) -> None:
    assert Interval.parse(text) == interval


@pytest.mark.parametrize(
    "text",
    [
        *("", "Never", "never 5 steps", "10", "steps", "5steps", "10  steps", "5 minutes "),
        *("0 steps", "-1 steps", "1.5 steps", "1e3 steps", "inf steps", "٣ steps"),
        *("0 minutes", "nan minutes", "inf minutes", "5 hours"),
    ],
)
def test_other_intervals_are_refused(text: str) -> None:
    with pytest.raises(InputError, match="'never', 'N steps' or 'N minutes'"):
        Interval.parse(text)


def test_when_a_save_is_due() -> None:
    assert not Interval().due(1000, math.inf)
    assert [step for step in range(31) if Interval(steps=10).due(step, 0)] == [10, 20, 30]
    half_hour = Interval(seconds=1800)
    assert not half_hour.due(5, 1799.9)
    assert half_hour.due(5, 1800)


def test_profiles() -> None:
    assert parse_profile("0:3") == range(3)
    for text in ("", "3", "3:", ":3", "3:3", "-1:3", "a:b", "1:2:3"):
        with pytest.raises(InputError, match="START:STOP"):
            parse_profile(text)
