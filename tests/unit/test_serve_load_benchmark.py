"""The load generator is an open loop: what waits counts, and what fails is seen."""

import json
import socketserver
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from benchmarks import serve_load
from benchmarks.serve_load import Form, Load

ANSWER = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"
BUSY = b"HTTP/1.1 429 Too Many Requests\r\nContent-Length: 0\r\n\r\n"


def test_times_are_those_of_independent_requests() -> None:
    times = serve_load._times(500.0, 20.0, seed=1)
    gaps = np.diff(times)
    assert times == sorted(times)
    assert np.mean(gaps) == pytest.approx(1 / 500, rel=0.05)
    assert np.std(gaps) == pytest.approx(np.mean(gaps), rel=0.05)  # of an exponential
    assert serve_load._times(500.0, 20.0, seed=2) != times
    assert len(serve_load._times(1e6, 20.0, seed=1)) == serve_load.MOST_REQUESTS


def asked(answers: list[bytes], seconds: float, monkeypatch: pytest.MonkeyPatch) -> Load:
    """10 requests at once, to a server that takes its time for each, one after the other."""
    monkeypatch.setattr(serve_load, "CONNECTIONS", 2)
    monkeypatch.setattr(serve_load, "_times", lambda *_: [0.0] * 10)

    one_at_a_time = threading.Lock()

    class Serve(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            while self.request.recv(4):
                with one_at_a_time:
                    time.sleep(seconds)
                    self.request.sendall(answers.pop())

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Serve) as server:
        threading.Thread(target=server.serve_forever).start()
        load = Load(Form("a", "b", server.server_address[1], b"ask!"))
        load.run(1.0, 1.0, seed=0)
        server.shutdown()
    return load


def test_waiting_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    load = asked([ANSWER] * 10, 0.02, monkeypatch)
    assert load.statuses["200"] == 10
    assert sorted(load.latencies_s)[-1] >= 9 * 0.02  # though its answer took 0.02 s


def test_errors_are_no_latencies(monkeypatch: pytest.MonkeyPatch) -> None:
    load = asked([ANSWER, BUSY] * 5, 0.0, monkeypatch)
    assert load.statuses == {"200": 5, "429": 5, "no answer": 0}
    assert len(load.latencies_s) == 5


def test_the_best_rate_is_within_the_limit() -> None:
    rows = [
        {"system": "a", "form": "json", "rate": rate, "errors": errors, "p99_ms": p99}
        for rate, errors, p99 in [(1.0, 0, 5.0), (2.0, 0, 9.0), (3.0, 1, 9.0), (4.0, 0, 11.0)]
    ]
    rows.append({"system": "a", "form": "json", "first_answer_s": 1.0})
    assert serve_load.best_rates(rows, 10.0) == {("a", "json"): 2.0}


def test_both_systems_are_measured(tmp_path: Path) -> None:
    pytest.importorskip("fastapi")
    serve_load.main(["--tiny", "--output", str(tmp_path)])
    rows = json.loads((tmp_path / "serve_load_tiny.json").read_text())["rows"]
    rated = [row for row in rows if "rate" in row]
    assert len(rated) == 2 * 2 * 2  # systems, forms, rates
    assert not any(row["errors"] for row in rated)
    assert {row["system"] for row in rows if "first_answer_s" in row} == {"trainmark", "fastapi"}


def test_a_system_that_does_not_start_is_left_out(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    written: list[list[serve_load.Row]] = []
    lines = {"fastapi": ["benchmarks.no_such_peer"]}
    assert serve_load.measure(lines, [10.0], 0.1, 1, written.append) == []
    assert written == [[]]
    assert "fastapi does not answer" in capsys.readouterr().out


def test_starts_alone(tmp_path: Path) -> None:
    words = ["--tiny", "--starts", "1", "--only", "trainmark", "--output", str(tmp_path)]
    serve_load.main(words)
    (row,) = json.loads((tmp_path / "serve_start_tiny.json").read_text())["rows"]
    assert row["system"] == "trainmark"
    assert row["first_answer_s"] > 0
    assert row["first_answer_cpu_s"] > 0
    assert row["memory_mib"] > 0
