"""Whether the memory of `trainmark serve` grows under full load from clients of all kinds.

    python benchmarks/serve_soak.py FOLDER --minutes 60

200 clients at once: most ask again and again; some send a body byte by byte, some break off in the
middle or send nonsense, some send 100 MB. FOLDER gets the run that is served. Rows have, minute by
minute, the server's resident memory and what each kind of client was answered.
"""

import argparse
import asyncio
import json
import re
import subprocess
import sys
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import psutil

from benchmarks.common import write_results
from trainmark.cli import main as trainmark

CLIENTS = {"asking": 160, "slow": 20, "breaking off": 10, "nonsense": 5, "100 MB": 5}
SMALL = (
    *("--synthetic-rows", "4000", "--global-batch", "512", "--model.embedding-dim", "8"),
    *("--model.bottom-mlp", "16", "8", "--model.top-mlp", "16", "1", "--device", "cpu"),
    *("--warmup-clock", "2", "--evals-per-epoch", "1", "--checkpoint-every", "4 steps"),
)
PAUSE_S = 0.5
"""Of clients that do not ask: without, those who break off are a flood of thousands a minute."""
LARGE_BYTES = 100 * 10**6
MIB = 2**20


class Clients:
    """All of them, in one event loop, and what they were answered."""

    def __init__(self, port: int, body: bytes) -> None:
        self.port, self.body, self.answers = port, body, Counter[str]()

    async def run(self, seconds: float) -> None:
        tasks = [
            asyncio.create_task(self._again_and_again(kind))
            for kind, count in CLIENTS.items()
            for _ in range(count)
        ]
        await asyncio.sleep(seconds)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _again_and_again(self, kind: str) -> None:
        client = {
            "asking": self._ask,
            "slow": self._ask_slowly,
            "breaking off": self._break_off,
            "nonsense": self._send_nonsense,
            "100 MB": self._send_much,
        }[kind]
        while True:
            writer = None
            try:
                reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
                await client(kind, reader, writer)
            except (OSError, asyncio.IncompleteReadError):
                self.answers[f"{kind}: closed"] += 1
            finally:
                if writer is not None:
                    writer.close()
            await asyncio.sleep(0 if kind == "asking" else PAUSE_S)

    def _head(self, size: int, close: bool = False) -> bytes:
        closing = "Connection: close\r\n" if close else ""
        return (
            f"POST /score HTTP/1.1\r\nHost: x\r\n{closing}Content-Length: {size}\r\n\r\n".encode()
        )

    async def _answer(self, kind: str, reader: asyncio.StreamReader) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        found = re.search(rb"content-length: (\d+)", head, re.I)
        await reader.readexactly(int(found[1]) if found else 0)
        self.answers[f"{kind}: {head[9:12].decode()}"] += 1

    async def _ask(self, kind: str, reader: Any, writer: Any) -> None:
        for _ in range(100):  # of one connection
            writer.write(self._head(len(self.body)) + self.body)
            await self._answer(kind, reader)

    async def _ask_slowly(self, kind: str, reader: Any, writer: Any) -> None:
        writer.write(self._head(len(self.body), close=True))
        answer = asyncio.create_task(self._answer(kind, reader))
        for byte in self.body:
            if answer.done():
                break
            writer.write(bytes([byte]))
            await asyncio.sleep(1)
        await answer

    async def _break_off(self, kind: str, reader: Any, writer: Any) -> None:
        """In the middle of a body, or before the answer."""
        self.answers[f"{kind}: left"] += 1
        part = self.body if self.answers[f"{kind}: left"] % 2 else self.body[: len(self.body) // 2]
        writer.write(self._head(len(self.body)) + part)
        await writer.drain()
        writer.transport.abort()

    async def _send_nonsense(self, kind: str, reader: Any, writer: Any) -> None:
        writer.write(self._head(9, close=True) + b'{"x": [1}' + b"\x00\xff" * 50)
        await self._answer(kind, reader)

    async def _send_much(self, kind: str, reader: Any, writer: Any) -> None:
        writer.write(self._head(LARGE_BYTES, close=True))
        answer = asyncio.create_task(self._answer(kind, reader))
        with suppress(OSError):  # the server may close before it has read everything
            for _ in range(LARGE_BYTES // MIB):
                if answer.done():
                    break
                writer.write(bytes(MIB))
                await writer.drain()
        await answer


async def _soak(server: psutil.Process, clients: Clients, minutes: float) -> list[dict[str, Any]]:
    began, rows = time.monotonic(), []
    running = asyncio.create_task(clients.run(60 * minutes))
    while not running.done():
        await asyncio.wait([running], timeout=60)
        memory = server.memory_info().rss
        rows.append(
            {
                "system": "trainmark",
                "minute": round((time.monotonic() - began) / 60, 1),
                "resident_mib": round(memory / MIB, 1),
                "answers": dict(sorted(clients.answers.items())),
            }
        )
        print(json.dumps(rows[-1]), flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--keep", action="store_true", help="the rows in results/serve_soak.json")
    chosen = parser.parse_args()
    run = str(chosen.folder / "run")
    if trainmark(["train", "dlrm-demo", *SMALL, "--output", run]) != 0:
        raise RuntimeError("the run that is to be served failed")
    line = [sys.executable, "-m", "trainmark", "serve", run, "--port", "0", "--device", "cpu"]
    with subprocess.Popen(
        line, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as server:
        assert server.stdout is not None
        found = None
        while found is None:
            found = re.search(r"http://127\.0\.0\.1:(\d+)", server.stdout.readline())
        with urlopen(f"http://127.0.0.1:{found[1]}/example") as answer:
            body = answer.read()
        clients = Clients(int(found[1]), body)
        rows = asyncio.run(_soak(psutil.Process(server.pid), clients, chosen.minutes))
        server.terminate()
    if chosen.keep:
        write_results("serve_soak", rows)
    first, last = rows[0]["resident_mib"], rows[-1]["resident_mib"]
    print(f"{last - first:+.1f} MiB between minutes {rows[0]['minute']} and {rows[-1]['minute']}")


if __name__ == "__main__":
    main()
