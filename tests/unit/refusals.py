"""What a refusal looks like: exit code 2, one message, nothing half-written."""

from pathlib import Path

import pytest

from tests.small import FLAGS
from trainmark.cli import main


def refused(
    capsys: pytest.CaptureFixture[str], arguments: list[str], *parts: str, lines: int | None = 1
) -> str:
    """`trainmark ARGUMENTS` ends with exit code 2 and one message that has these parts."""
    capsys.readouterr()
    assert main(arguments) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    message = printed.err
    assert message.startswith("trainmark: ")
    assert message.count("trainmark: ") == 1
    assert "Traceback" not in message
    if lines is not None:
        assert len(message.splitlines()) == lines, message
    for part in parts:
        assert part in message, message
    return message


def small(*flags: str, output: Path | str = "/nonexistent/never") -> list[str]:
    return ["train", "dlrm-demo", *FLAGS, "--output", str(output), *flags]
