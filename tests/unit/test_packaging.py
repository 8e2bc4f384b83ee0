"""One source of the version, and everything that the package reads is shipped with it."""

import subprocess
import sys
import tomllib
from pathlib import Path

import trainmark

ROOT = Path(__file__).parents[2]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def test_the_version_has_one_source() -> None:
    assert "version" not in PYPROJECT["project"]
    assert PYPROJECT["project"]["dynamic"] == ["version"]
    attribute = PYPROJECT["tool"]["setuptools"]["dynamic"]["version"]["attr"]
    assert attribute == "trainmark.__version__"
    changelog = (ROOT / "CHANGELOG.md").read_text()
    newest = next(line for line in changelog.splitlines() if line.startswith("## "))
    assert newest.startswith(f"## [{trainmark.__version__}] - ")


def test_the_version_needs_no_installation_and_no_torch(tmp_path: Path) -> None:
    """A source tree alone is enough, and the answer comes at once."""
    code = (
        f"import sys; sys.path.insert(0, {str(ROOT)!r}); from trainmark.cli import main;"
        "main(['--version']); assert 'torch' not in sys.modules"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert done.stdout == f"trainmark {trainmark.__version__}\n"


def test_every_data_file_is_shipped() -> None:
    package = ROOT / "trainmark"
    present = {p for p in package.rglob("*") if p.is_file() and "__pycache__" not in p.parts}
    others = {path for path in present if path.suffix != ".py"}
    globs = PYPROJECT["tool"]["setuptools"]["package-data"]["trainmark"]
    shipped = {path for pattern in globs for path in package.glob(pattern)}
    assert {"py.typed", "style.css", "published_results.json"} <= {p.name for p in others}
    assert others == shipped
