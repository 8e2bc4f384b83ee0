"""A skip that tests/skips.py does not name fails the session, and one that it names does not."""

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests import skips

ROOT = Path(__file__).parents[2]
LISTED = "no Java 17 was found; .ci/run installs one"
SPARK = "tests/unit/test_prepare_spark.py"


def session(folder: Path, file: str, skip: str, *flags: str) -> "subprocess.CompletedProcess[str]":
    """pytest on one file with a test that passes and one that is skipped."""
    path = folder / file
    path.parent.mkdir(parents=True)
    path.write_text(f"import pytest\n\ndef test_passes():\n    pass\n\n{skip}\n")
    (folder / "pytest.ini").write_text("[pytest]\n")
    command = [sys.executable, "-m", "pytest", "-p", "xdist", "-p", "tests.skips"]
    command += ["-c", str(folder / "pytest.ini"), "--rootdir", str(folder), *flags, str(path)]
    # No plugin but those named: Hypothesis alone takes a second to import.
    environment = os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)


def in_a_test(reason: str) -> str:
    return f"def test_skips():\n    pytest.skip({reason!r})"


def in_a_file(reason: str) -> str:
    return f"pytest.skip({reason!r}, allow_module_level=True)"


@pytest.mark.parametrize(
    ("where", "flags"), [(in_a_test, ()), (in_a_file, ()), (in_a_file, ("-n", "2"))]
)
def test_an_unlisted_skip_fails(
    tmp_path: Path, where: Callable[[str], str], flags: tuple[str, ...]
) -> None:
    done = session(tmp_path, SPARK, where("not today"), *flags)
    assert done.returncode == 1, done.stdout
    assert "was skipped (not today), and tests/skips.py does not allow it." in done.stdout


@pytest.mark.parametrize("flags", [(), ("-n", "2")], ids=["one process", "xdist"])
def test_a_listed_skip_passes_and_is_named(tmp_path: Path, flags: tuple[str, ...]) -> None:
    done = session(tmp_path, SPARK, in_a_test(LISTED), "--require", "torchrec", *flags)
    assert done.returncode == 0, done.stdout
    assert "java: 1 without Java" in done.stdout
    assert "FAILED" not in done.stdout


def test_what_is_required_may_not_be_missing(tmp_path: Path) -> None:
    done = session(tmp_path, SPARK, in_a_test(LISTED), "--require", "torchrec,java")
    assert done.returncode == 1, done.stdout
    assert f"test_skips was skipped ({LISTED}), but --require names java." in done.stdout


def test_a_reason_is_good_for_its_tests_only(tmp_path: Path) -> None:
    done = session(tmp_path, "tests/unit/test_train.py", in_a_test(LISTED))
    assert done.returncode == 1, done.stdout


def test_a_package_that_is_broken_is_not_a_package_that_is_missing() -> None:
    extras = skips.NEEDS["extras"]
    missing = "could not import '{}': No module named '{}'"
    assert extras.explains(SPARK, missing.format("onnx", "onnx"))
    assert not extras.explains(SPARK, missing.format("onnx", "numpy"))
    assert not extras.explains(SPARK, missing.format("nonesuch", "nonesuch"))


def test_an_unknown_name_is_refused(tmp_path: Path) -> None:
    done = session(tmp_path, SPARK, in_a_test(LISTED), "--require", "jav")
    assert done.returncode == pytest.ExitCode.USAGE_ERROR
    assert "--require jav: expected some of extras, torchrec, java" in done.stderr


@pytest.mark.parametrize("name", skips.NEEDS)
def test_the_listed_tests_exist(name: str) -> None:
    for test in skips.NEEDS[name].tests:
        file, _, function = test.partition("::")
        found = [path for path in ROOT.glob(f"{file}*") if path.is_dir() or path.suffix == ".py"]
        assert found, test
        assert re.search(rf"^def {function}", found[0].read_text(), re.M) if function else True
