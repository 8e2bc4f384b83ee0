"""The Dockerfiles name the pinned versions, and only files and extras that exist.

No engine builds them here: what can be checked without one is checked.
"""

import re
import shlex
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FILES = {
    "Dockerfile": {"torch", "torchx"},
    "docker/serve.Dockerfile": {"torch", "uvicorn", "grpcio"},
    "docker/spark.Dockerfile": {"pyspark", "pyarrow"},
}
"""Each file, and what its labels must name at least."""

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def pinned() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pairs = [line.split("==") for line in lines if not line.startswith("#")]
    return {_plain(name): version for name, version in pairs}


def _plain(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def instructions(name: str) -> list[tuple[str, str]]:
    """(FROM, python:...), (RUN, ...) and so on; continued lines are joined."""
    text = re.sub(r"^#.*\n", "", (ROOT / name).read_text(), flags=re.M)
    lines = text.replace("\\\n", " ").splitlines()
    return [(line.split()[0], line.partition(" ")[2]) for line in lines if line.strip()]


def installs(name: str) -> list[list[str]]:
    """The words after every `pip install`."""
    commands = [part for kind, rest in instructions(name) if kind == "RUN"
                for part in rest.split("&&")]  # fmt: skip
    words = [shlex.split(command) for command in commands]
    return [found[2:] for found in words if found[:2] == ["pip", "install"]]


def requirements() -> set[str]:
    """Every package that the project asks for."""
    extras = PROJECT["optional-dependencies"].values()
    asked = [*PROJECT["dependencies"], *(name for extra in extras for name in extra)]
    return {_plain(re.split(r"[<>=\[]", name)[0]) for name in asked}


@pytest.mark.parametrize("name", FILES)
def test_labels_name_the_pinned_versions(name: str) -> None:
    (label,) = [rest for kind, rest in instructions(name) if kind == "LABEL"]
    named = dict(word.removeprefix("trainmark.").split("=") for word in shlex.split(label))
    assert FILES[name] <= set(named)
    versions = pinned()
    assert named == {package: versions[package] for package in named}


@pytest.mark.parametrize("name", FILES)
def test_everything_is_installed_in_the_pinned_versions(name: str) -> None:
    found = installs(name)
    assert len(found) >= 1
    for words in found:
        assert words[words.index("--constraint") + 1] == "constraints.txt"
        packages = [w for w in words if not w.startswith("-") and w != "constraints.txt"]
        for package in packages:
            if package.startswith("."):  # the project itself
                extras = re.findall(r"\w+", package)
                assert set(extras) <= set(PROJECT["optional-dependencies"])
            else:
                assert _plain(package) in requirements()
                assert _plain(package) in pinned()


@pytest.mark.parametrize("name", FILES)
def test_the_base_is_one_python(name: str) -> None:
    (base,) = [rest for kind, rest in instructions(name) if kind == "FROM"]
    match = re.fullmatch(r"python:(\d+)\.(\d+)\.\d+-slim-bookworm", base)
    assert match is not None, f"{base} is not pinned"
    least = PROJECT["requires-python"].removeprefix(">=").split(".")
    assert (int(match[1]), int(match[2])) >= tuple(map(int, least))


@pytest.mark.parametrize("name", FILES)
def test_copied_files_exist_and_reach_the_build(name: str) -> None:
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    sources = [word for kind, rest in instructions(name) if kind == "COPY"
               for word in rest.split()[:-1]]  # fmt: skip
    assert {"pyproject.toml", "constraints.txt", "trainmark"} <= set(sources)
    for source in sources:
        assert (ROOT / source).exists()
        assert f"!{source}" in ignored
