"""How a rank ends: without the interpreter's own end, in which a thread of gloo may be lost."""

import os
import subprocess
import sys

import pytest

from trainmark.distributed import launched

# Whatever runs at the interpreter's end ends this process with SIGABRT, as that thread does.
WITH_A_BAD_END = """
import atexit, os, runpy, sys
atexit.register(os.abort)
sys.argv = ["trainmark", *sys.argv[1:]]
runpy.run_module("trainmark", run_name="__main__")
"""


def ended(*words: str) -> subprocess.CompletedProcess[str]:
    """A rank that has done `trainmark WORDS...`; its output is buffered, as that of a log is."""
    variables = {"TORCHELASTIC_RUN_ID": "1", "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    variables |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}  # where nobody listens
    return subprocess.run(
        [sys.executable, "-c", WITH_A_BAD_END, *words],
        env=os.environ | variables,
        capture_output=True,
        text=True,
    )


def test_a_rank_ends_with_its_own_exit_code_and_all_it_has_printed() -> None:
    good = ended("list")
    assert good.returncode == 0, good.stderr
    assert "llama3-demo" in good.stdout
    bad = ended("train", "no-such-run")
    assert bad.returncode == 2
    assert "no-such-run" in bad.stderr


LOST = [
    "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer",
    "NCCL Error 6: remote process exited or there was a network error",
    "Connection reset by peer",
]


@pytest.mark.parametrize("seen", LOST)
def test_what_a_rank_sees_of_the_death_of_another(seen: str) -> None:
    assert launched.is_echo(RuntimeError(seen))
    assert not launched.is_echo(ValueError(seen))


def test_a_rank_that_has_lost_another_says_so_in_a_sentence() -> None:
    """Also where it was not torchrun that started it."""
    code = f"""
import runpy, sys
from trainmark import cli
from trainmark.distributed import launched
launched.ECHO_GRACE_S = 0.1
launched.connect = lambda: None
def lost(arguments, started): raise RuntimeError({LOST[1]!r})
cli.VERBS["list"] = lost
sys.argv = ["trainmark", "list"]
runpy.run_module("trainmark", run_name="__main__")
"""
    variables = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | variables, capture_output=True, text=True
    )
    assert done.returncode == 1
    assert "the connection to another rank was lost" in done.stderr
    assert "Traceback" not in done.stderr
