"""Latency of `trainmark serve` by rate of requests, beside onnxruntime behind FastAPI.

    python -m benchmarks.serve_load                     8 minutes, on two cores that do nothing else
    python -m benchmarks.serve_load --device cuda --rounds 1       3 minutes; serve_load_cuda.json
    python -m benchmarks.serve_load --only trainmark --rates 500,1000 --output DIR
    python -m benchmarks.serve_load --starts 5          a minute; serve_start.json: the starts alone

Rows are written as rounds end. What one row does wrong, such as a connection that its server
closes, ends that row alone; a system that cannot be started is told, and left out.

An open loop: requests have their times, drawn beforehand, and are sent then, whether or not earlier
ones have been answered. A request's latency counts from that time on, so what waits for a free
connection or a late generator is not hidden. Connections, and requests of a round, are bounded.

Both servers answer the same rows with the same model; they run one after the other within each
round and rate, so that a busy machine is in the way of both alike. Their model is a small run of
the demo's. `cpu_ms` is what the server's process used for a request, which other processes do not
change much. Generator and servers share the machine's cores.
"""

import itertools
import json
import os
import random
import selectors
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import numpy as np
import psutil

from benchmarks import common
from trainmark.cli import main as trainmark

TRAINED = ("--synthetic-rows", "40000", "--max-steps", "3", "--device", "cpu")
ROWS = 64
CONNECTIONS = 64
MOST_REQUESTS = 60_000
LATE_S = 5.0
"""After the last request's time, for answers."""
OVERLOADED_MS = 1000.0
"""A p99 beyond which no higher rate is tried."""
STARTED_S = 120.0
RATES = "150,300,500,750,1000,1250,1500,1750,2000,3000,4000,5000,6000"


SYSTEMS = ("trainmark", "fastapi")
Row = dict[str, Any]


# --- the load


@dataclass(frozen=True)
class Form:
    """How a system is asked."""

    system: str
    form: str
    port: int
    request: bytes


@dataclass
class Load:
    """Requests at their times, over a bounded number of connections.

    Plain sockets and `select`: its sleeps end within microseconds, where those of asyncio are
    whole milliseconds, and a request costs the cores that the servers need a third of the time.
    """

    form: Form
    latencies_s: list[float] = field(default_factory=list)
    statuses: Counter[str] = field(default_factory=Counter)

    def run(self, rate: float, seconds: float, seed: int) -> None:
        times = _times(rate, seconds, seed)
        with ExitStack() as stack, selectors.SelectSelector() as selector:
            idle = [stack.enter_context(Connection(self.form)) for _ in range(CONNECTIONS)]
            for connection in idle:
                selector.register(connection.socket, selectors.EVENT_READ, connection)
            begin = time.perf_counter() + 0.05
            unsent = deque(begin + at for at in times)
            end = unsent[-1] + LATE_S
            while self.statuses.total() < len(times) and (now := time.perf_counter()) < end:
                while idle and unsent and unsent[0] <= now:
                    idle.pop().ask(unsent.popleft())
                wait = unsent[0] - now if idle and unsent else 0.01
                for key, _ in selector.select(max(wait, 0.0)):
                    if status := key.data.answer():
                        self._answered(status, time.perf_counter() - key.data.due)
                        idle.append(key.data)
        self.statuses["no answer"] += len(times) - self.statuses.total()

    def _answered(self, status: str, latency_s: float) -> None:
        self.statuses[status] += 1
        if status == "200":
            self.latencies_s.append(latency_s)


class Connection:
    """One request at a time."""

    def __init__(self, form: Form) -> None:
        self.socket = socket.create_connection(("127.0.0.1", form.port))
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.due, self._request, self._received = 0.0, form.request, b""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()

    def ask(self, due: float) -> None:
        self.due = due
        self.socket.sendall(self._request)

    def answer(self) -> str | None:
        """The status of an answer that is here whole."""
        data = self.socket.recv(1 << 16)
        if not data:
            raise ConnectionError("the server closed a connection")
        self._received += data
        head, end, body = self._received.partition(b"\r\n\r\n")
        at = head.lower().find(b"content-length: ") + 16
        if not end or len(body) < int(head[at:].split(b"\r\n", 1)[0]):
            return None
        self._received = b""
        return head[9:12].decode()


def _times(rate: float, seconds: float, seed: int) -> list[float]:
    """Of requests that know nothing of each other: the gaps are exponential."""
    drawn, at = random.Random(seed), 0.0
    times: list[float] = []
    while at < seconds and len(times) < MOST_REQUESTS:
        times.append(at)
        at += drawn.expovariate(rate)
    return times


# --- the servers


def _forms(ports: dict[str, int]) -> list[Form]:
    drawn = np.random.default_rng(1)
    numbers = drawn.standard_normal((ROWS, 13)).astype(np.float32)
    ids = drawn.integers(0, 3, (ROWS, 26))
    as_json = json.dumps({"numerical": numbers.round(4).tolist(), "categorical": ids.tolist()})
    raw = numbers.tobytes() + ids.tobytes()
    inputs = [
        {"name": name, "datatype": kind, "shape": list(array.shape),
         "parameters": {"binary_data_size": array.nbytes}}
        for name, kind, array in (("numerical", "FP32", numbers), ("categorical", "INT64", ids))
    ]  # fmt: skip
    told = {"inputs": inputs, "parameters": {"binary_data_output": True}}
    header = json.dumps(told).encode()
    length = f"Inference-Header-Content-Length: {len(header)}\r\n"
    requests = [
        ("trainmark", "json", _request("/score", as_json.encode())),
        ("fastapi", "json", _request("/score", as_json.encode(), of_json=True)),
        ("trainmark", "binary", _request(INFER, header + raw, length)),
        ("fastapi", "binary", _request("/binary", raw)),
    ]
    return [
        Form(system, form, ports[system], asked)
        for system, form, asked in requests
        if system in ports
    ]


INFER = "/v2/models/dlrm-demo/infer"


def _request(path: str, body: bytes, more: str = "", *, of_json: bool = False) -> bytes:
    more += "Content-Type: application/json\r\n" if of_json else ""
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\n{more}Content-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


@contextmanager
def _started(words: list[str], port: int) -> Iterator[subprocess.Popen[bytes]]:
    line = [sys.executable, "-m", *words, "--port", str(port)]
    with subprocess.Popen(line, stdout=subprocess.DEVNULL) as server:
        try:
            yield server
        finally:
            server.terminate()


def _start(form: Form, server: subprocess.Popen[bytes]) -> Row:
    """What a server took until its first answer."""
    first_s = _first_answer_s(form, server)
    used = psutil.Process(server.pid)
    return {
        "system": form.system,
        "form": form.form,
        "first_answer_s": round(first_s, 2),
        "first_answer_cpu_s": round(_cpu_s(server), 2),
        "memory_mib": round(used.memory_info().rss / 2**20),
    }


def measure_starts(lines: Mapping[str, list[str]], count: int) -> list[Row]:
    """The medians of several starts of each system, in turns."""
    found: dict[str, list[Row]] = {}
    for _, (system, words) in itertools.product(range(count), lines.items()):
        port = free_port()
        with _started(words, port) as server:
            row = _start(_forms({system: port})[0], server)
        print(row, os.getloadavg()[0], flush=True)
        found.setdefault(system, []).append(row)
    numbers = ("first_answer_s", "first_answer_cpu_s", "memory_mib")
    return [
        rows[0]
        | {key: statistics.median(row[key] for row in rows) for key in numbers}
        | {"starts": count, "load": round(os.getloadavg()[0], 1)}
        for rows in found.values()
    ]


def _first_answer_s(form: Form, server: subprocess.Popen[bytes]) -> float:
    """Until a score comes back; a server that is not there yet is asked again."""
    began = time.perf_counter()
    while time.perf_counter() < began + STARTED_S and server.poll() is None:
        try:
            with socket.create_connection(("127.0.0.1", form.port), timeout=5) as client:
                client.sendall(form.request)
                if client.recv(65536).startswith(b"HTTP/1.1 200"):
                    return time.perf_counter() - began
        except OSError:
            pass
        time.sleep(0.01)
    raise RuntimeError(f"{form.system} does not answer")


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


# --- the measurement


def commands(folder: Path, device: str) -> dict[str, list[str]]:
    """What starts each system, with a model that lies in `folder`."""
    run = folder / "run"
    if not (run / "result.json").exists():
        assert trainmark(["train", "dlrm-demo", *TRAINED, "--output", str(run)]) == 0
    if not (run / "export-onnx").exists() and trainmark(["export", str(run), "--format", "onnx"]):
        print("fastapi has no model: export needs the extra `export`", flush=True)
    return {
        "trainmark": ["trainmark", "serve", str(run), "--values", "prepared", "--device", device],
        "fastapi": ["benchmarks.serve_peer", str(run / "export-onnx" / "model.onnx")],
    }


def measure(
    lines: Mapping[str, list[str]],
    rates: list[float],
    seconds: float,
    rounds: int,
    write: Callable[[list[Row]], None],
) -> list[Row]:
    """A row for each system, form and rate, and one for the start of each system.

    Args:
        lines: what starts each system.
        write: told all rows after each round.
    """
    ports = {system: free_port() for system in lines}
    forms, found = _forms(ports), dict[tuple[Form, float], list[Row]]()
    with ExitStack() as stack:
        starts, processes = [], {}
        for system, words in lines.items():
            process = stack.enter_context(_started(words, ports[system]))
            try:
                asked = next(form for form in forms if form.system == system)
                starts.append(_start(asked, process))
                processes[system] = process
            except RuntimeError as error:
                print(error, flush=True)
        forms = [form for form in forms if form.system in processes]
        _check_equal(forms)
        rows: list[Row] = []
        for number in range(rounds):
            for form, rate, row in _round(forms, processes, rates, seconds, number):
                found.setdefault((form, rate), []).append(row)
            rows = [_joined(form, rate, parts) for (form, rate), parts in found.items()]
            rows += starts
            write(rows)
    return rows


def _round(
    forms: list[Form],
    processes: Mapping[str, subprocess.Popen[bytes]],
    rates: list[float],
    seconds: float,
    number: int,
) -> Iterator[tuple[Form, float, Row]]:
    overloaded: set[Form] = set()
    for rate in rates:
        for form in forms:
            if form in overloaded:
                continue
            try:
                row = _measured(form, processes[form.system], rate, seconds, number)
            except (OSError, psutil.Error) as error:
                print(form.system, form.form, rate, repr(error), flush=True)
                overloaded.add(form)
                continue
            print(form.system, form.form, rate, row, flush=True)
            if row["p99_ms"] > OVERLOADED_MS or row["errors"]:
                overloaded.add(form)
            yield form, rate, row
            time.sleep(0.2)


def _measured(
    form: Form, process: subprocess.Popen[bytes], rate: float, seconds: float, seed: int
) -> Row:
    before = _cpu_s(process)
    load = Load(form)
    load.run(rate, seconds, seed)
    answered = len(load.latencies_s)
    cpu_s = _cpu_s(process) - before
    milliseconds = 1e3 * np.array(load.latencies_s or [np.inf])
    return {
        "requests": sum(load.statuses.values()),
        "errors": sum(load.statuses.values()) - answered,
        "p50_ms": float(np.percentile(milliseconds, 50)),
        "p99_ms": float(np.percentile(milliseconds, 99)),
        "cpu_ms": 1e3 * cpu_s / max(answered, 1),
        "load": os.getloadavg()[0],
    }


def _cpu_s(process: subprocess.Popen[bytes]) -> float:
    times = psutil.Process(process.pid).cpu_times()
    return float(times.user + times.system)


def _joined(form: Form, rate: float, parts: list[dict[str, Any]]) -> dict[str, Any]:
    """The medians of the rounds, and the least p99."""
    middle = {key: statistics.median(part[key] for part in parts) for key in parts[0]}
    return {
        "system": form.system,
        "form": form.form,
        "rows": ROWS,
        "rate": rate,
        "rows_per_s": ROWS * rate,
        "rounds": len(parts),
        "requests": sum(part["requests"] for part in parts),
        "errors": sum(part["errors"] for part in parts),
        **{key: round(middle[key], 3) for key in ("p50_ms", "p99_ms", "cpu_ms", "load")},
        "least_p99_ms": round(min(part["p99_ms"] for part in parts), 3),
    }


def _check_equal(forms: list[Form]) -> None:
    """Of both systems and all forms, the scores of the rows."""
    found = []
    for form in forms:
        with socket.create_connection(("127.0.0.1", form.port), timeout=60) as client:
            client.sendall(
                form.request.replace(b"Host: x\r\n", b"Host: x\r\nConnection: close\r\n")
            )
            body = b"".join(iter(lambda: client.recv(65536), b"")).partition(b"\r\n\r\n")[2]
        if form.form == "json":
            found.append(np.array(json.loads(body)["scores"], np.float32))
        else:
            found.append(np.frombuffer(body[-4 * ROWS :], np.float32))
    for scores in found[1:]:
        np.testing.assert_allclose(scores, found[0], atol=1e-4)


def best_rates(rows: list[dict[str, Any]], within_ms: float) -> dict[tuple[str, str], float]:
    """The highest rate of each system and form that it answered without errors and in time."""
    found: dict[tuple[str, str], float] = {}
    for row in rows:
        if "rate" in row and not row["errors"] and row["p99_ms"] <= within_ms:
            key = row["system"], row["form"]
            found[key] = max(found.get(key, 0.0), row["rate"])
    return found


def main(arguments: list[str] | None = None) -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--folder", type=Path, help="where the run is, or will be made")
    parser.add_argument("--rates", default=RATES)
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--starts", type=int, help="measure so many starts, and nothing else")
    parser.add_argument("--only", nargs="*", choices=SYSTEMS, default=list(SYSTEMS))
    parser.add_argument("--device", default="cpu", help="of trainmark; its peer has the CPU")
    chosen = parser.parse_args(arguments)
    if chosen.tiny:
        chosen.rates, chosen.seconds, chosen.rounds = "20,40", 0.2, 1
    rates = [float(rate) for rate in chosen.rates.split(",")]
    of_device = "" if chosen.device == "cpu" else f"_{chosen.device}"
    what = "serve_start" if chosen.starts else "serve_load"
    name = f"{what}_tiny" if chosen.tiny else f"{what}{of_device}"
    told = {"cores": len(os.sched_getaffinity(0))}
    devices = {"trainmark": chosen.device, "fastapi": "cpu"}

    def write(rows: list[Row]) -> None:
        complete = [row | {"device": devices[row["system"]]} | told for row in rows]
        common.write_results(
            name, complete, chosen.device, folder=chosen.output, commit=chosen.commit
        )

    with tempfile.TemporaryDirectory() as temporary:
        lines = commands(chosen.folder or Path(temporary), chosen.device)
        lines = {system: line for system, line in lines.items() if system in chosen.only}
        if chosen.starts:
            return write(measure_starts(lines, chosen.starts))
        rows = measure(lines, rates, chosen.seconds, chosen.rounds, write)
    for within_ms in (10, 25, 50, 100):
        print(within_ms, "ms:", best_rates(rows, within_ms))


if __name__ == "__main__":
    main()
