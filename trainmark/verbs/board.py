"""`trainmark board`: the page of many runs, written to a file or served while runs end."""

from collections.abc import Sequence
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Lock

from trainmark.errors import InputError
from trainmark.files import write_atomically
from trainmark.progress import printable
from trainmark.report.board import Reader
from trainmark.report.board_page import FILE_NAME, page


def write(runs: Sequence[Path], output: Path | None) -> Path:
    """The page of all results in `runs`; returns its path."""
    target = output or Path(FILE_NAME)
    if target.is_dir():
        target /= FILE_NAME
    board = Reader(runs).board()
    if not board.entries and not board.problems:
        raise InputError(f"No result.json in {', '.join(map(str, runs))}: expected finished runs.")
    target.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(target, page(board, home=target.parent))
    return target


def serve(runs: Sequence[Path], host: str, port: int) -> None:
    """Serve the page until the process is told to stop; it shows new results as they come."""
    try:
        server = make_server(runs, host, port)
    except (OSError, OverflowError) as error:
        raise InputError(f"--host {host} --port {port}: cannot listen there ({error}).") from None
    with server:
        name = f"[{host}]" if ":" in host else host
        print(printable(f"http://{name}:{server.server_port}/ (Ctrl-C ends it)"), flush=True)
        server.serve_forever()


def make_server(runs: Sequence[Path], host: str, port: int) -> ThreadingHTTPServer:
    """A server of two things: the page at `/`, and at `/version` whether there is a newer one."""
    reader, lock = Reader(runs), Lock()
    reader.board()  # refuses a wrong path now

    def found(path: str) -> tuple[str, str] | None:
        with lock:
            if path == "/version":
                return "text/plain", reader.version()
            version = reader.version()  # first: what comes meanwhile is a newer one
            return ("text/html", page(reader.board(), version=version)) if path == "/" else None

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            try:
                answer = found(self.path)
            except (InputError, OSError):  # what is served was moved
                self.send_error(HTTPStatus.SERVICE_UNAVAILABLE)
                return
            if answer:
                self._answer(*answer)
            else:
                self.send_error(HTTPStatus.NOT_FOUND)

        def _answer(self, kind: str, text: str) -> None:
            content = text.encode()
            self.send_response(HTTPStatus.OK)
            self.send_header("Content-Type", f"{kind}; charset=utf-8")
            self.send_header("Content-Length", str(len(content)))
            self.send_header("Cache-Control", "no-store")
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: object) -> None:
            """Nothing: the page asks every three seconds."""

    return ThreadingHTTPServer((host, port), Handler)
