"""Commands that must not load torch, which takes seconds."""

import json
import subprocess
import sys

CODE = """
import json, sys
from trainmark.cli import main
for words in json.loads(sys.argv[1]):
    assert main(words) == 0, words
    assert "torch" not in sys.modules, words
"""


def run_without_torch(*commands: list[str]) -> str:
    """What `trainmark` prints for commands that end well, one after another in a new process."""
    line = [sys.executable, "-c", CODE, json.dumps(commands)]
    done = subprocess.run(line, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
