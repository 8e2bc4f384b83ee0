"""Debian's Chromium, asked over a pipe in its DevTools protocol: no driver, no package."""

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.waiting import PATIENCE_S, wait_until

CHROMIUM = shutil.which("chromium")
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
    "--disable-background-networking", "--disable-extensions", "--remote-debugging-pipe",
)  # fmt: skip
PHONE = {"width": 390, "height": 844, "deviceScaleFactor": 2, "mobile": True}


class Browser:
    """One tab of a browser."""

    def __init__(self, writing: int, reading: int) -> None:
        self._to, self._from = os.fdopen(writing, "wb"), os.fdopen(reading, "rb")
        self._asked = 0
        self._session: str | None = None
        self.errors: list[str] = []
        """What scripts threw, and what the page's policy forbade."""
        target = self.ask("Target.createTarget", url="about:blank")["targetId"]
        attached = self.ask("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.ask(f"{domain}.enable")

    def ask(self, method: str, **parameters: Any) -> dict[str, Any]:
        """A command's result."""
        self._asked += 1
        message = {"id": self._asked, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        self._to.write(json.dumps(message).encode() + b"\0")
        self._to.flush()
        while (answer := self._next()).get("id") != self._asked:
            pass
        assert "error" not in answer, answer
        return dict(answer["result"])

    def _next(self) -> dict[str, Any]:
        text = bytearray()
        while (byte := self._from.read(1)) != b"\0":
            assert byte, "Chromium has ended"
            text += byte
        message: dict[str, Any] = json.loads(text)
        if message.get("method") == "Runtime.exceptionThrown":
            self.errors.append(str(message["params"]["exceptionDetails"]))
        if message.get("method") == "Log.entryAdded":
            self.errors.append(str(message["params"]["entry"]["text"]))
        return message

    def open(self, address: str) -> None:
        """Load a page, and wait until it is there."""
        self.ask("Page.navigate", url="about:blank")
        self.ask("Page.navigate", url=address)
        self.wait("location.href != 'about:blank' && document.readyState == 'complete'")

    def wait(self, expression: str) -> None:
        """Until an expression holds in the page."""
        wait_until(lambda: self.value(expression), pause=0.05)

    def value(self, expression: str) -> Any:
        """What an expression is, in the page."""
        found = self.ask(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def press(self, *keys: str) -> None:
        """Keys, one after another: Tab, Enter, or a character."""
        codes = {"Tab": 9, "Enter": 13, " ": 32}
        for key in keys:
            text = {"Enter": "\r", "Tab": ""}.get(key, key)
            event: dict[str, Any] = {
                "key": key,
                "code": "Space" if key == " " else key,
                "text": text,
            }
            event |= {"windowsVirtualKeyCode": codes.get(key, ord(key[0].upper()))}
            self.ask("Input.dispatchKeyEvent", type="keyDown", **event)
            self.ask("Input.dispatchKeyEvent", type="keyUp", **event)


@contextmanager
def started(folder: Path) -> Iterator[Browser]:
    """A browser whose profile lies in a folder."""
    if CHROMIUM is None:
        pytest.skip("there is no chromium here (apt-get install chromium)")
    commands, answers = os.pipe(), os.pipe()
    # It reads commands at descriptor 3 and answers at 4.
    redirect = f'exec "$0" "$@" 3<&{commands[0]} 4>&{answers[1]}'
    words = ["bash", "-c", redirect, CHROMIUM, *FLAGS, f"--user-data-dir={folder}"]
    process = subprocess.Popen(
        words, pass_fds=(commands[0], answers[1]), stderr=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
    )  # fmt: skip
    os.close(commands[0])
    os.close(answers[1])
    try:
        yield Browser(commands[1], answers[0])
    finally:
        process.terminate()
        process.wait(PATIENCE_S)
