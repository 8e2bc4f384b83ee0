"""The tests that may be skipped, by what they need. Any other skip fails the session.

`--require java,torchrec` says what must be here: skips for want of it fail, too.
"""

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import pytest


@dataclass(frozen=True)
class Need:
    """What tests may lack, the reason that their skip gives, and which tests they are."""

    what: str
    reason: str
    """A regular expression for the whole reason."""
    tests: tuple[str, ...]
    """How their ids begin."""

    def explains(self, test: str, reason: str) -> bool:
        return test.startswith(self.tests) and re.fullmatch(self.reason, reason, re.S) is not None


EXTRAS = (
    "fastapi|mlperf_logging|numba|onnx|onnxruntime|optuna|pandas|prometheus_client|pyspark|"
    "starlette|tokenizers|torchx|transformers|tritonclient|uvicorn"
)
KERNELS = (
    "tests/distributed/test_interactions.py::test_by_the_kernels",
    "tests/gpu/test_embedding_kernels.py",
    "tests/unit/test_click_loss.py",
    "tests/unit/test_dlrm_kernels_benchmark.py",
    "tests/unit/test_fp8_mlp.py",
    "tests/unit/test_kernels_",
    "tests/unit/test_llama3_kernels.py",
    "tests/unit/test_relu_mlp.py",
    "tests/unit/test_sharded_kernels.py",
    "tests/unit/test_terabyte.py::test_kernels",
)

NEEDS = {
    "extras": Need(
        "optional packages, which `make test` installs and requires",
        rf"could not import '({EXTRAS})[\w.]*': No module named '\1'|"
        r"pyspark is not installed .*|needs numba .*",
        ("tests/",),
    ),
    "torchrec": Need(
        "TorchRec, which `make test` installs where it can; .ci/run requires it",
        r"could not import 'torchrec': No module named 'torchrec'|torchrec is not installed .*|"
        r"\S+ cannot be imported: .*",
        (
            "tests/distributed/test_dlrm_torchrec.py",
            "tests/unit/test_torchrec_interactions.py",
            "tests/distributed/test_interactions.py::test_on_two_ranks",
            "tests/unit/test_dlrm_dcnv2_benchmark.py::test_rows_of_both_systems",
            "tests/unit/test_dlrm_dcnv2_benchmark.py::test_the_peer_trains_as_we_do",
            "tests/unit/test_dlrm_gpu_benchmark.py::test_a_peer_trains_as_we_do",
            "tests/unit/test_prepare_npy.py::test_folding_agrees_with_torchrec",
            "tests/unit/test_prepare_npy.py::test_torchrec_reads_what_we_write",
            "tests/unit/test_ranks.py::test_a_group_for_the_exchange_with_oneself",
        ),
    ),
    "java": Need(
        "Java for Spark, which no package brings; .ci/run installs and requires it",
        r"no Java \d+ was found.*",
        ("tests/unit/test_prepare_spark.py",),
    ),
    "triton": Need(
        "Triton, which has wheels for Linux only",
        r"no Triton here|could not import 'triton(\.language)?': No module named 'triton'",
        KERNELS,
    ),
    "interpreter": Need(
        "Triton's interpreter, used where there is no GPU: tests/gpu has these kernels on one",
        r"kernels run on the GPU here.*|kernels run on a CPU if interpreted",
        KERNELS,
    ),
    "no-gpu": Need(
        "a machine without a GPU, to be refused --device cuda",
        "there is a GPU here",
        ("tests/unit/test_inference.py::test_flags",),
    ),
    "glibc": Need("glibc's malloc", "glibc's malloc only", ("tests/unit/test_allocator.py",)),
    "x86-64": Need("Linux on x86-64", "needs Linux on x86-64", ("tests/unit/test_amx.py",)),
    "huge-pages": Need(
        "a kernel with transparent huge pages on `madvise`",
        "a kernel that gives huge pages .*",
        ("tests/unit/test_allocator.py::test_huge_pages",),
    ),
    "user": Need(
        "a user who is not root",
        "root may write anywhere",
        ("tests/unit/test_cli_errors.py::test_an_unwritable_folder",),
    ),
    "network": Need(
        "network namespaces: the `ip` command and root",
        "there is no ip command here|network namespaces need .*",
        ("tests/distributed/test_launch_machines.py",),
    ),
    "slurm": Need(
        "SLURM's daemons, and root to start them",
        "SLURM is not installed here .*|SLURM's daemons need root",
        ("tests/distributed/test_launch_slurm.py",),
    ),
    "chromium": Need(
        "Debian's Chromium, which .ci/run installs and requires",
        "there is no chromium here .*",
        ("tests/unit/test_board_browser.py",),
    ),
    "text": Need(
        "a text that is not in the repository",
        "no text on this machine",
        ("tests/unit/test_llama3.py::test_real_text",),
    ),
}


def pytest_addoption(parser: pytest.Parser) -> None:
    text = f"what must be here, with commas between; of {', '.join(NEEDS)}"
    parser.addoption("--require", default="", metavar="NAMES", help=text)


def _required(config: pytest.Config) -> set[str]:
    return set(filter(None, config.getoption("--require").split(",")))


def pytest_configure(config: pytest.Config) -> None:
    if unknown := _required(config) - set(NEEDS):
        names = ", ".join(sorted(unknown))
        raise pytest.UsageError(f"--require {names}: expected some of {', '.join(NEEDS)}")


def _reporter(config: pytest.Config) -> pytest.TerminalReporter | None:
    """None in a worker of xdist, whose reports reach the one of the main process."""
    return config.pluginmanager.get_plugin("terminalreporter")


def _skips(reporter: pytest.TerminalReporter) -> Iterator[tuple[str, str, str | None]]:
    """Every test, or file of tests, that was skipped: its id, the reason, what it needed."""
    for report in reporter.stats.get("skipped", []):
        test, reason = report.nodeid, str(report.longrepr[2]).removeprefix("Skipped: ")
        fitting = (name for name, need in NEEDS.items() if need.explains(test, reason))
        yield test, reason, next(fitting, None)


def _faults(reporter: pytest.TerminalReporter) -> Iterator[str]:
    """A sentence for each skip that is not allowed."""
    required = _required(reporter.config)
    for test, reason, need in _skips(reporter):
        if need is None:
            yield f"{test} was skipped ({reason}), and tests/skips.py does not allow it."
        elif need in required:
            yield f"{test} was skipped ({reason}), but --require names {need}."


def pytest_sessionfinish(session: pytest.Session) -> None:
    reporter = _reporter(session.config)
    if reporter and any(_faults(reporter)):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if not (skips := list(_skips(terminalreporter))):
        return
    terminalreporter.section("skipped tests")
    counts = Counter(need for _, _, need in skips if need is not None)
    for need in sorted(set(counts) - _required(terminalreporter.config)):
        terminalreporter.line(f"{need}: {counts[need]} without {NEEDS[need].what}")
    for line in _faults(terminalreporter):
        terminalreporter.line(f"FAILED: {line}", red=True)
