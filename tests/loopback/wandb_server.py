"""A small W&B server on loopback that stores ``wandb sync`` uploads and serves ``wandb.Api``.

The server implements the operations used by this project's scripts and rejects every other one by
name, so that no test passes on an empty answer.

To try tracking and queries without an account, run ``python -m tests.loopback.wandb_server``; it
serves until Ctrl-C and stores nothing on disk.
"""

import json
import re
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

USER = "me"


@dataclass
class Stored:
    """A run as stored by the server."""

    project: str
    name: str
    display_name: str
    config: dict[str, Any] = field(default_factory=dict)
    # Lines of wandb-history.jsonl and wandb-events.jsonl, by line number.
    files: dict[str, dict[int, str]] = field(default_factory=dict)
    finished: bool = False
    number: int = 0

    @property
    def history(self) -> list[dict[str, Any]]:
        return self._rows("wandb-history.jsonl")

    @property
    def events(self) -> list[dict[str, Any]]:
        return self._rows("wandb-events.jsonl")

    @property
    def summary(self) -> dict[str, Any]:
        return {name: value for row in self.history for name, value in row.items()}

    def _rows(self, name: str) -> list[dict[str, Any]]:
        lines = self.files.get(name, {})
        return [json.loads(lines[at]) for at in sorted(lines)]


@dataclass
class WandbServer:
    """State of the server: stored runs, address and received requests."""

    url: str = ""
    runs: dict[tuple[str, str], Stored] = field(default_factory=dict)
    operations: list[str] = field(default_factory=list)
    # Paths and bodies in order of arrival.
    received: list[bytes] = field(default_factory=list)
    # HTTP status to answer every request with, such as 401 for a wrong key; 0 answers normally.
    refuse: int = 0

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """Return the data of one GraphQL request. Raises KeyError for an unknown operation."""
        named = re.search(r"(?:query|mutation)\s+(\w+)", request["query"])
        operation, variables = named[1] if named else "", request.get("variables") or {}
        self.operations.append(operation)
        return _OPERATIONS[operation](self, variables, request["query"])

    def stream(self, project: str, name: str, sent: dict[str, Any]) -> None:
        run = self.runs[project, name]
        for file, part in (sent.get("files") or {}).items():
            lines = run.files.setdefault(file, {})
            for at, line in enumerate(part["content"], part["offset"]):
                lines[at] = line
        run.finished |= bool(sent.get("complete"))


class _Server(ThreadingHTTPServer):
    """HTTP server that can stop like a machine that is switched off, with all its connections."""

    daemon_threads = True

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._connections: list[socket.socket] = []

    def get_request(self) -> tuple[socket.socket, Any]:
        connection, address = super().get_request()
        self._connections.append(connection)
        return connection, address

    def server_close(self) -> None:
        super().server_close()
        for connection in self._connections:
            # The client may already have closed the connection.
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore errors: a client may disconnect during an answer."""


@contextmanager
def serving(state: WandbServer | None = None) -> Iterator[WandbServer]:
    """Serve until the end of the block; ``state`` restores the runs of an earlier server."""
    state = state or WandbServer()
    server = _Server(("127.0.0.1", 0), _handler(state))
    state.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield state
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _handler(state: WandbServer) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            state.received += [self.path.encode(), body]
            if state.refuse:
                self._send(state.refuse, {"error": "refused"})
            elif self.path == "/graphql":
                self._graphql(json.loads(body))
            elif self.path.endswith("/file_stream"):
                _, _, _, project, name, _ = self.path.split("/")
                state.stream(project, name, json.loads(body))
                self._send(200, {})
            else:
                state.operations.append(self.path)
                self._send(404, {"error": "unknown"})

        def _graphql(self, request: dict[str, Any]) -> None:
            try:
                self._send(200, {"data": state.answer(request)})
            except KeyError as error:
                self._send(200, {"errors": [{"message": f"unsupported operation {error}"}]})

        def _send(self, code: int, document: dict[str, Any]) -> None:
            data = json.dumps(document).encode()
            self.send_response(code)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, format: str, *arguments: Any) -> None:
            """Quiet."""

    return Handler


def _viewer(server: WandbServer, variables: dict[str, Any], query: str) -> dict[str, Any]:
    edges = {"edges": []}
    user = {"id": "V", "entity": USER, "username": USER, "name": USER, "email": "me@localhost"}
    return {"viewer": {**user, "flags": "{}", "admin": False, "teams": edges, "apiKeys": edges}}


def _upsert(server: WandbServer, variables: dict[str, Any], query: str) -> dict[str, Any]:
    key = variables["project"], variables["name"]
    inserted = key not in server.runs
    run = server.runs.setdefault(key, Stored(*key, display_name=key[1], number=len(server.runs)))
    run.display_name = variables["displayName"] or run.display_name
    if variables["config"]:
        run.config |= json.loads(variables["config"])
    return {"upsertBucket": {"bucket": _fields(run), "inserted": inserted}}


def _resume(server: WandbServer, variables: dict[str, Any], query: str) -> dict[str, Any]:
    """Return the state of a run to resume; no bucket for a new run."""
    run = server.runs.get((variables["project"], variables["name"]))
    return {"model": {"bucket": None if run is None else _fields(run)}}


def _fields(run: Stored) -> dict[str, Any]:
    """Return what any operation selects of a run."""
    never = ("sweepName", "group", "jobType", "commit", "historyKeys")
    empty = ("description", "notes")
    return {
        **dict.fromkeys(never),
        **dict.fromkeys(empty, ""),
        **dict.fromkeys(("createdAt", "heartbeatAt"), "2000-01-01T00:00:00"),
        "id": f"B{run.number}",
        "projectId": "1",
        "name": run.name,
        "displayName": run.display_name,
        "state": "finished" if run.finished else "running",
        "config": json.dumps(run.config),
        "tags": [],
        "readOnly": False,
        "historyLineCount": len(run.history),
        "eventsLineCount": len(run.events),
        "logLineCount": 0,
        "historyTail": json.dumps([json.dumps(row) for row in run.history[-1:]]),
        "eventsTail": json.dumps([json.dumps(row) for row in run.events[-1:]]),
        "summaryMetrics": json.dumps(run.summary),
        "systemMetrics": "{}",
        "wandbConfig": json.dumps({"t": 1}),
        "project": {"id": "P", "name": run.project, "entity": {"id": "E", "name": USER}},
        "user": {"name": USER, "username": USER},
    }


def _files(server: WandbServer, variables: dict[str, Any], query: str) -> dict[str, Any]:
    return {"createRunFiles": {"runID": "B", "uploadHeaders": [], "files": []}}


def _runs(server: WandbServer, variables: dict[str, Any], query: str) -> dict[str, Any]:
    found = [run for run in server.runs.values() if run.project == variables["project"]]
    edges = [{"node": _fields(run), "cursor": str(run.number)} for run in found]
    page = {"hasNextPage": False, "endCursor": ""}
    project = {
        "internalId": "1",
        "runCount": len(found),
        "readOnly": False,
        "runs": {"edges": edges, "pageInfo": page, "totalCount": len(found)},
    }
    return {"project": project}


def _history_page(server: WandbServer, variables: dict[str, Any], query: str) -> dict[str, Any]:
    rows = _asked(server, variables).history
    low, high = variables.get("minStep", 0), variables.get("maxStep", 1 << 60)
    found = [json.dumps(row) for row in rows if low <= row["_step"] < high]
    return {"project": {"run": {"history": found}}}


def _keys(server: WandbServer, variables: dict[str, Any], query: str) -> dict[str, Any]:
    rows = _asked(server, variables).history
    keys = {
        key: {"typeCounts": [{"type": "number", "count": 1}], "monotonic": False}
        for row in rows
        for key in row
    }
    last = max((row["_step"] for row in rows), default=-1)
    return {"project": {"run": {"historyKeys": {"keys": keys, "lastStep": last, "sets": []}}}}


def _parquet(server: WandbServer, variables: dict[str, Any], query: str) -> dict[str, Any]:
    run = _asked(server, variables)
    wanted = variables.get("liveKeys")
    rows = [
        {key: value for key, value in row.items() if not wanted or key in wanted}
        for row in run.history
    ]
    return {"project": {"run": {"parquetHistory": {"liveData": rows, "parquetUrls": []}}}}


def _full(server: WandbServer, variables: dict[str, Any], query: str) -> dict[str, Any]:
    run = _asked(server, variables)
    rows, name = (run.events, "events") if "events(" in query else (run.history, "history")
    return {"project": {"run": {name: [json.dumps(row) for row in rows]}}}


def _nothing(server: WandbServer, variables: dict[str, Any], query: str) -> dict[str, Any]:
    return {"serverInfo": {"features": []}, "organization": None, "entity": None}


def _asked(server: WandbServer, variables: dict[str, Any]) -> Stored:
    names = (variables[key] for key in ("name", "runName", "run") if key in variables)
    return server.runs[variables["project"], next(names)]


_OPERATIONS = {
    "Viewer": _viewer,
    "GetDefaultEntity": _viewer,
    "RunResumeStatus": _resume,
    "UpsertBucket": _upsert,
    "CreateRunFiles": _files,
    "OrganizationCoreWeaveOrganizationID": _nothing,
    "Runs": _runs,
    "HistoryPage": _history_page,
    "RunHistoryKeys": _keys,
    "RunParquetHistory": _parquet,
    "RunFullHistory": _full,
}


if __name__ == "__main__":
    with serving() as served, suppress(KeyboardInterrupt):
        # Keys are not checked, but wandb requires at least forty characters.
        print(f"export WANDB_BASE_URL={served.url} WANDB_API_KEY={'0' * 40}", flush=True)
        threading.Event().wait()
