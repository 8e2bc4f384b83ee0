"""The README's and getting_started's commands run, and the pages name only what exists."""

import random
import re
import shlex
import subprocess
from pathlib import Path

import pytest

from tests.docs.commands import HELP, PAGES, ROOT, flags, parses, verb_of
from trainmark import cli, workloads
from trainmark.clickdata import feature_spec, spec_rules
from trainmark.inference import figures
from trainmark.run import result as results
from trainmark.run.result import read


def blocks(page: str, language: str) -> list[str]:
    """The fenced blocks of a page in one language ('' for those without)."""
    fenced = re.findall(r"^```(\w*)\n(.*?)^```$", (ROOT / page).read_text(), re.M | re.S)
    return [text for of, text in fenced if of == language]


def commands(page: str) -> list[list[str]]:
    """The commands of a page's shell blocks, as words."""
    # A backslash at the end continues a line, and a word.
    joined = [block.replace("\\\n", "") for block in blocks(page, "sh")]
    lines = [line for block in joined for line in block.splitlines()]
    return [words for line in lines if (words := shlex.split(line, comments=True))]


def trainmark_commands(page: str) -> list[list[str]]:
    """The words after `trainmark`."""
    return [words[1:] for words in commands(page) if words[0] == "trainmark"]


STARTED = "docs/getting_started.md"
ALL = [(page, words) for page in PAGES for words in trainmark_commands(page)]


def test_flags_are_found() -> None:
    """The other tests compare with these sets: they must not be empty, nor accept anything."""
    assert {"--lr", "--model.table-rows", "--no-eager", "--no-compile", "--from"} <= flags("train")
    assert {"--input", "--frequency-threshold"} <= flags("prepare criteo")
    assert "--batch-size" not in flags("train")
    assert parses(["train", "dlrm-demo", "--lr", "0.1"]) == 0
    assert parses(["train", "dlrm-demo", "--batch-size", "1"]) == 2
    assert parses(["train", "dlrm-dem"]) == 2


def test_pages_were_read() -> None:
    assert len(PAGES) >= 6
    assert len(trainmark_commands("README.md")) == 6
    assert len(trainmark_commands(STARTED)) >= 16
    assert len(ALL) >= 50


@pytest.mark.parametrize(("page", "words"), ALL, ids=lambda value: str(value)[:60])
def test_command_parses(page: str, words: list[str], tmp_path: Path) -> None:
    if "--config" in words:  # the file is read while parsing
        file = tmp_path / "config.toml"
        file.write_text("seed = 1\n")
        words = [str(file) if w == words[words.index("--config") + 1] else w for w in words]
    assert parses(words) == 0, page


def test_make_demo_parses() -> None:
    """`make -n demo` prints commands of make's own and trainmark's; the latter parse."""
    done = subprocess.run(
        ["make", "--always-make", "--no-print-directory", "-n", "demo"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    lines = [shlex.split(line) for line in done.stdout.splitlines() if line.strip()]
    own = [words[1:] for words in lines if Path(words[0]).name == "trainmark"]
    assert [verb_of(words) for words in own] == [
        "prepare synthetic", "prepare criteo", "train", "evaluate", "report"
    ]  # fmt: skip
    others = {Path(words[0]).name for words in lines} - {"trainmark"}
    assert others <= {"python", "python3", "touch"}, others
    for words in own:
        assert parses(words) == 0, words


def in_backticks(page: str) -> list[str]:
    """The spans of code in a page's text, outside of its blocks."""
    return re.findall(r"`([^`\n]+)`", without_code((ROOT / page).read_text()))


def without_code(text: str) -> str:
    return re.sub(r"^```.*?^```", "", text, flags=re.M | re.S)


# docs/coming_from.md names the flags of others, and has tests of its own for ours.
@pytest.mark.parametrize("page", [page for page in PAGES if page != "docs/coming_from.md"])
def test_named_flags_exist(page: str) -> None:
    """Every --flag in backticks is a flag of some verb."""
    known = frozenset().union(*map(flags, HELP))
    for span in in_backticks(page):
        for flag in re.findall(r"(?<![\w-])--[a-z][\w.-]*", span):
            assert flag in known, f"{page}: {span}"


@pytest.mark.parametrize("page", PAGES)
def test_named_verbs_targets_and_runs_exist(page: str) -> None:
    for span in in_backticks(page):
        words = span.split()
        if words[0] == "trainmark" and len(words) > 1:
            assert words[1] in cli.VERBS or words[1].startswith("--"), f"{page}: {span}"
        if words[0] == "make" and len(words) == 2:
            assert re.search(rf"^{words[1]}:", (ROOT / "Makefile").read_text(), re.M), span
        if re.fullmatch(r"dlrm-[\w-]+", span):
            assert span in workloads.named_runs(), f"{page}: {span}"


def anchors(page: Path) -> set[str]:
    """What a link into a page may name, as GitHub makes it of its headings."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.M)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES)
def test_lines_fit(page: str) -> None:
    """120 columns; a row of a table cannot be broken."""
    lines = (ROOT / page).read_text().splitlines()
    assert [line for line in lines if len(line) > 120 and not line.startswith("|")] == []


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 75


@pytest.mark.parametrize("page", PAGES)
def test_named_files_exist(page: str) -> None:
    text = without_code((ROOT / page).read_text())
    home = (ROOT / page).parent
    for target, section in re.findall(r"\]\(([^)#]*)#?([^)]*)\)", text):
        if "://" not in target:
            file = home / target if target else ROOT / page
            assert file.exists(), f"{page} links to {target}"
            assert not section or section in anchors(file), f"{page} links to {target}#{section}"
    for path in re.findall(r"`((?:trainmark|tests|docs|benchmarks)/[\w./]+)`", text):
        assert (ROOT / path).exists(), f"{page} names {path}"


def test_the_specification_in_the_docs_is_valid(tmp_path: Path) -> None:
    (text,) = blocks("docs/data.md", "yaml")
    (tmp_path / "feature_spec.yaml").write_text(text)
    spec = feature_spec.read(tmp_path)
    spec_rules.check(spec)
    assert spec.cardinalities == (7912889,)


def test_the_schemas_are_those_of_the_files() -> None:
    """They outlive any renaming of modules."""
    assert f"schema `{results.SCHEMA}`" in (ROOT / "docs/metrics.md").read_text()
    assert f"schema `{figures.SCHEMA}`" in (ROOT / "docs/inference.md").read_text()


def test_cheap_commands_run(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`list` and `show`, in this process, and the dry run that the page gives."""
    monkeypatch.setenv("COLUMNS", "120")
    cheap = [
        words
        for words in trainmark_commands(STARTED)
        if words[0] in ("list", "show") or "--dry-run" in words
    ]
    assert len(cheap) == 3
    for words in cheap:
        assert cli.main(words) == 0
    printed = capfd.readouterr().out
    assert "dlrm-mlperfx2" in printed
    assert "32,709,138" in printed  # rows of dlrm-small's tables
    assert "weights" in printed


SMALLER = {
    "prepare synthetic": ["--rows", "90000"],
    "train": ["--max-steps", "12", "--global-batch", "2048"],
    "infer": ["--steps", "5"],
}


def run_chain(chain: list[list[str]]) -> None:
    """Commands as a newcomer types them, with fewer rows and steps."""
    for words in chain:
        assert cli.main([*words, *SMALLER.get(verb_of(words), [])]) == 0, words


def test_the_full_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The demo chain of getting_started."""
    monkeypatch.chdir(tmp_path)
    chain = [words for words in trainmark_commands(STARTED) if "demo/" in " ".join(words)]
    assert [verb_of(words) for words in chain] == [
        "prepare synthetic", "prepare criteo", "train", "evaluate", "infer", "report", "export"
    ]  # fmt: skip
    run_chain(chain)
    result = read(tmp_path / "demo" / "run")
    assert result.steps.all == 12
    assert result.samples == 12 * 2048
    assert {e.split for e in result.evaluations} == {"test", "validation"}
    page = (tmp_path / "demo" / "run" / "report.html").read_text()
    assert "<svg" in page
    assert "http" not in re.sub(r"http://www\.w3\.org/\S+", "", page)  # loads nothing
    exported = {path.name for path in (tmp_path / "demo" / "run" / "export").iterdir()}
    names = {"README.txt", "checksums.json", "config.json", "model.py", "model.safetensors"}
    names |= {"preparation"}
    assert exported == names


def write_log(path: Path, days: int, rows: int) -> None:
    """CSV files with the columns that the README describes."""
    path.mkdir()
    chosen = random.Random(0)
    for day in range(days):
        lines = [
            f"{chosen.randrange(2)},{chosen.randrange(18, 80)},{chosen.randrange(100)},"
            f"{chosen.randrange(500)},city {chosen.randrange(30)},2026-01-0{day + 1} 12:00:00"
            for _ in range(rows)
        ]
        header = "clicked,age,price,user,city,seen_at"
        (path / f"day_{day}.csv").write_text("\n".join([header, *lines, ""]))


def test_your_own_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The README's chain, on a log with the columns that it describes."""
    monkeypatch.chdir(tmp_path)
    chain = trainmark_commands("README.md")
    assert [verb_of(words) for words in chain] == [
        "prepare csv", "train", "evaluate", "report", "export", "serve"
    ]  # fmt: skip
    write_log(tmp_path / "logs", days=3, rows=16_000)
    run_chain(chain[:-1])  # a server would not end; test_command_parses has it
    result = read(tmp_path / "my" / "run")
    assert result.samples == 12 * 2048
    # user, city, hour, day of the week, bins of age
    assert len(result.config["model"]["table_rows"]) == 5
    assert (tmp_path / "my" / "run" / "report.html").is_file()
    assert (tmp_path / "my" / "run" / "export" / "model.safetensors").is_file()
