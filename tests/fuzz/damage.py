"""Damage to a file: operations, each a JSON list, so that a failure can be saved.

An operation is a name and its arguments. Positions are fractions of the file, because the files of
two studies have different sizes.
"""

import contextlib
import json
import os
import pickle
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

Operation = list[Any]

CANARY = "canary"
# Values that take the place of a JSON value; texts with @ stand for what JSON cannot carry.
VALUES: tuple[Any, ...] = (
    None, True, 0, -1, 0.5, 1e308, "", "x", "x" * 5000, "../../../etc/passwd", "/dev/zero",
    "\x1b[2J\x07", "\u0000", "１２", [], {}, [[]], {"a": 1}, "@deep", "@nan", "@1e999", "@huge",
    "@surrogate", "@delete",
)  # fmt: skip
_RAW = {
    "@deep": "[" * 20_000 + "]" * 20_000,
    "@nan": "NaN",
    "@1e999": "1e999",
    "@huge": "9" * 5000,
    "@surrogate": '"\\ud800"',
}
_PIECES = ("\0", "\r", "\r\n", "\ufeff", "\x1b[31m", "9" * 400, "{", '"', "\n\n", "é")
_NODES = ("folder", "fifo", "loop", "dangling", "device", "victim", "absent")


class Execute:
    """Object whose unpickling creates the canary."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (CANARY,)


_CODE = {
    "python": f"__import__('os').mkdir({CANARY!r})\n".encode(),
    "yaml": f"!!python/object/apply:os.mkdir [{CANARY!r}]\n".encode(),
    "pickle": pickle.dumps(Execute()),
}
# Heads of files are parsed: half of the positions are there.
_PLACE = st.floats(0, 1, exclude_max=True) | st.floats(0, 1, exclude_max=True).map(lambda x: x**8)
NODE = st.sampled_from(_NODES).map(lambda name: [[name]])
_BYTES = st.one_of(
    st.tuples(st.just("flip"), _PLACE, st.integers(0, 7)),
    st.tuples(st.sampled_from(("truncate", "double")), _PLACE),
    st.tuples(st.just("insert"), _PLACE, st.sampled_from(_PIECES)),
    st.tuples(st.just("digit"), _PLACE, st.integers(0, 9)),
    st.tuples(st.sampled_from(("utf-16", *_CODE))),
).map(list)


def operations(path: Path) -> st.SearchStrategy[list[Operation]]:
    """Return the strategy of one to three operations for the file at ``path``."""
    each = _BYTES
    if path.suffix in (".json", ".jsonl", ".yaml"):
        with contextlib.suppress(ValueError, RecursionError):
            text = path.read_text(encoding="utf-8")
            documents = text.splitlines() if path.suffix == ".jsonl" else [text]
            keys = [(i, key) for i, one in enumerate(documents) for key in _keys(json.loads(one))]
            if keys:
                edit = st.tuples(st.just("set"), st.sampled_from(keys), st.sampled_from(VALUES))
                each = edit.map(lambda drawn: ["set", *drawn[1], drawn[2]]) | _BYTES
    several = st.lists(each, min_size=1, max_size=3)
    # A node of another kind is one of eight.
    return st.integers(0, 7).flatmap(lambda n: several if n else NODE)


def _keys(value: Any) -> Iterator[list[Any]]:
    """Yield the key path of every value inside ``value``, and that of the whole."""
    yield []
    items = value.items() if isinstance(value, dict) else ()
    items = enumerate(value) if isinstance(value, list) else items
    for key, part in items:
        yield from ([key, *rest] for rest in _keys(part))


def apply(path: Path, operations: list[Operation], victim: Path) -> None:
    """Apply the operations to the file at ``path``; links lead to ``victim``."""
    for kind, *arguments in operations:
        if kind in _NODES:
            _replace(path, kind, victim)
        elif path.is_file() and not path.is_symlink():
            change = _edited if kind == "set" else _damaged
            path.write_bytes(change(path.read_bytes(), path, kind, *arguments))


def _replace(path: Path, kind: str, victim: Path) -> None:
    """Put something else in the place of a file or folder."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
    targets = {"loop": path, "dangling": path.with_name("nothing"), "device": Path("/dev/zero")}
    if kind == "folder":
        path.mkdir()
    elif kind == "fifo":
        os.mkfifo(path)
    elif kind != "absent":
        path.symlink_to(targets.get(kind, victim))


def _damaged(content: bytes, path: Path, kind: str, place: float = 0, new: Any = 0) -> bytes:
    """Return the bytes of a file after an operation at a place."""
    at = int(place * len(content))
    head, tail = content[:at], content[at:]
    match kind:
        case "flip":
            return head + bytes(byte ^ 1 << new for byte in tail[:1]) + tail[1:]
        case "truncate":
            return head
        case "double":
            return head + tail[: tail.find(b"\n") + 1] + tail
        case "insert":
            return head + new.encode() + tail
        case "digit":
            return head + re.sub(rb"\d", str(new).encode(), tail, count=1)
        case "utf-16":
            return content.decode("utf-8", "replace").encode("utf-16")
        case _:
            return _CODE[kind] + content


def _edited(content: bytes, path: Path, kind: str, line: int, keys: list[Any], value: Any) -> bytes:
    """Return a JSON document, or JSON lines, with one value replaced or removed."""
    parts = content.split(b"\n") if path.suffix == ".jsonl" else [content]
    try:
        document = whole = {"": json.loads(parts[line])}
        *way, last = ["", *keys]
        for key in way:
            document = document[key]
        if value == "@delete":
            del document[last]
        else:
            document[last] = value
    # An operation before it has removed the place.
    except (ValueError, LookupError, TypeError, RecursionError):
        return content
    text = json.dumps(whole.get("", {}))
    for mark, raw in _RAW.items():
        text = text.replace(json.dumps(mark), raw)
    parts[line] = text.encode()
    return b"\n".join(parts)
