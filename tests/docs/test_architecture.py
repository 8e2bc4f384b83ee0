"""The rooms of `docs/architecture.md`: all of them are there, and imports only go down."""

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.docs.commands import ROOT
from trainmark import workloads

PACKAGE = ROOT / "trainmark"
PAGE = (ROOT / "docs" / "architecture.md").read_text()
MAX_TOP_MODULES = 12
WORKLOAD_ROOMS = ("workloads", "embeddings", "clicklog", "clickdata", "corpus", "kernels")
"""Where workloads may be named: `clickdata` is the part of `clicklog` that training reads,
`kernels` say what they were measured with."""

Modules = dict[str, Path]


def modules(package: Path) -> Modules:
    """Dotted name -> file, of all modules below a package."""
    found = {}
    for path in package.rglob("*.py"):
        parts = path.relative_to(package.parent).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imports(name: str, known: Modules) -> Iterator[str]:
    """The modules that one imports anywhere in its code, also in functions and for types only."""
    for node in ast.walk(ast.parse(known[name].read_text())):
        if isinstance(node, ast.Constant) and node.value in known and node.value != "trainmark":
            yield str(node.value)  # for importlib
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in known)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name}: relative imports hide what they go to"
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                if full in known:
                    yield full
                elif node.module in known:
                    yield str(node.module)


def room(name: str, known: Modules) -> str:
    """The package that a module lies in; a module at the top is a room of its own."""
    _, *parts = name.split(".")
    is_package = known[name].name == "__init__.py"
    if not is_package and len(parts) > 1:
        parts = parts[:-1]
    return ".".join(parts) or "__init__"


def layers(page: str) -> dict[str, int]:
    """Room -> the line of the page's picture that it is in; lower lines are lower layers."""
    (block,) = re.findall(r"^```text\n(.*?)^```", page, re.M | re.S)
    lines = [line.split("#")[0].split() for line in block.splitlines()]
    found = {name: number for number, line in enumerate(lines) for name in line}
    assert len(found) == sum(map(len, lines)), "a room is named twice"
    return found


def violations(package: Path, page_layers: dict[str, int]) -> list[str]:
    known = modules(package)
    return [
        f"{name} imports {other}"
        for name in known
        for other in imports(name, known)
        if room(name, known) != room(other, known)
        and page_layers[room(other, known)] <= page_layers[room(name, known)]
    ]


def test_the_page_names_every_room() -> None:
    known = modules(PACKAGE)
    assert layers(PAGE).keys() == {room(name, known) for name in known}


def test_imports_only_go_down() -> None:
    known = modules(PACKAGE)
    assert sum(len(list(imports(name, known))) for name in known) > 800
    assert violations(PACKAGE, layers(PAGE)) == []


def test_no_module_imports_itself_in_a_circle() -> None:
    known = modules(PACKAGE)
    graph = {name: set(imports(name, known)) - {name} for name in known}
    while leaves := {name for name, needed in graph.items() if not needed & graph.keys()}:
        graph = {name: needed for name, needed in graph.items() if name not in leaves}
    assert not graph


@pytest.mark.parametrize(
    ("code", "caught"),
    [
        ("import trainmark.high", True),
        ("def f():\n    from trainmark.high import x", True),
        ("from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import trainmark.high", True),
        ("from trainmark import beside", True),
        ("import trainmark.lowest", False),
    ],
)
def test_an_import_that_goes_up_is_caught(tmp_path: Path, code: str, caught: bool) -> None:
    package = tmp_path / "trainmark"
    package.mkdir()
    for name in ("__init__", "high", "low", "beside", "lowest"):
        (package / f"{name}.py").write_text(code if name == "low" else "x = 1")
    order = {"high": 0, "low": 1, "beside": 1, "lowest": 2, "__init__": 3}
    assert bool(violations(package, order)) == caught


def test_few_modules_lie_at_the_top() -> None:
    top = {path.stem for path in PACKAGE.glob("*.py")} - {"__init__", "__main__"}
    assert len(top) <= MAX_TOP_MODULES


def test_every_package_says_what_it_owns() -> None:
    for name, path in modules(PACKAGE).items():
        if path.name == "__init__.py":
            doc = ast.get_docstring(ast.parse(path.read_text())) or ""
            assert re.match(r".+\.(\n|$)", doc), f"{name} has no owner sentence"


WORKLOAD = re.compile("|".join([*workloads.DEFINITIONS, "llama"]), re.I)


def workloads_named(code: str) -> list[str]:
    """Identifiers and strings that name a workload; docstrings and comments may."""
    prose = {
        (node.value.lineno, node.value.col_offset)
        for node in ast.walk(ast.parse(code))
        if isinstance(node, ast.Expr)
    }
    tokens = tokenize.generate_tokens(io.StringIO(code).readline)
    return [
        token.string
        for token in tokens
        if token.type not in (tokenize.COMMENT, tokenize.NL)
        and token.start not in prose
        and WORKLOAD.search(token.string)
    ]


@pytest.mark.parametrize(
    "code",
    [
        "from trainmark.workloads import dlrm",
        "import trainmark.workloads.llama3.runs",
        "def is_dlrm(): ...",
        "f(distilbert=1)",
        "x = f'{1} of DLRM'",
    ],
)
def test_a_named_workload_is_caught(code: str) -> None:
    assert workloads_named(code)
    assert not workloads_named('"""Of DLRM."""\nx = 1  # dlrm')


def test_shared_code_names_no_workload() -> None:
    shared = [
        path
        for path in PACKAGE.rglob("*.py")
        if path.relative_to(PACKAGE).parts[0] not in WORKLOAD_ROOMS
    ]
    assert len(shared) > 60
    assert {
        str(path): found for path in shared if (found := workloads_named(path.read_text()))
    } == {}
