"""Mutations of a file on a disk: a list of operations, each a JSON list, so that a failure can be saved.

An operation is a name and its arguments. Positions are fractions of the file, because the files of
two studies have different sizes.
"""

import contextlib
import json
import os
import pickle
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

Operation = list[Any]

CANARY = "canary"
# Values that take the place of a JSON value; texts stand for values that JSON cannot carry.
VALUES: tuple[Any, ...] = (
    None, True, 0, -1, 0.5, 1e308, "", "x", "x" * 5000, "../../../etc/passwd", "/dev/zero",
    "\x1b[2J\x07", "\u0000", "１２", [], {}, [[]], {"a": 1}, "@deep", "@nan", "@1e999", "@huge",
    "@surrogate",
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


# Heads of files are parsed: half of the positions are there.
_PLACE = st.floats(0, 1, exclude_max=True) | st.floats(0, 1, exclude_max=True).map(lambda x: x**8)
NODE = st.sampled_from(_NODES).map(lambda name: [[name]])
_DAMAGE = st.one_of(
    st.tuples(st.just("flip"), _PLACE, st.integers(0, 7)),
    st.tuples(st.sampled_from(("truncate", "line")), _PLACE),
    st.tuples(st.just("insert"), _PLACE, st.sampled_from(_PIECES)),
    st.tuples(st.just("digit"), _PLACE, st.integers(0, 9)),
    st.tuples(st.just("code"), st.sampled_from(("python", "yaml", "pickle"))),
    st.tuples(st.sampled_from(("utf-16", "empty"))),
).map(list)


def operations(path: Path) -> st.SearchStrategy[list[Operation]]:
    """Return the strategy of one to three operations for the file at ``path``."""
    each = _DAMAGE
    if path.suffix in (".json", ".jsonl", ".yaml"):
        with contextlib.suppress(ValueError, RecursionError):
            each = _values(path) | _DAMAGE
    several = st.lists(each, min_size=1, max_size=3)
    # A node of another kind is one of eight.
    return st.integers(0, 7).flatmap(lambda n: several if n else NODE)


def _values(path: Path) -> st.SearchStrategy[Operation]:
    """Return the strategy of another value, or none, in place of one in a document."""
    text = path.read_text(encoding="utf-8")
    documents = text.splitlines() if path.suffix == ".jsonl" else [text]
    keys = [(i, place) for i, each in enumerate(documents) for place in _places(json.loads(each))]
    return st.tuples(st.sampled_from(keys), st.sampled_from((*VALUES, "@delete"))).map(
        lambda drawn: (
            ["delete", *drawn[0]] if drawn[1] == "@delete" else ["set", *drawn[0], drawn[1]]
        )
    )


def _places(value: Any) -> Iterator[list[Any]]:
    """Yield the key path of every value inside ``value``, and that of the whole."""
    yield []
    items = value.items() if isinstance(value, dict) else ()
    items = enumerate(value) if isinstance(value, list) else items
    for key, part in items:
        yield from ([key, *rest] for rest in _places(part))


def apply(path: Path, operations: list[Operation], victim: Path) -> None:
    """Apply the operations to the file at ``path``; links lead to ``victim``."""
    for kind, *arguments in operations:
        if kind in _NODES:
            _replace_node(path, kind, victim)
        elif path.is_file() and not path.is_symlink():
            content = path.read_bytes()
            if kind in ("set", "delete"):
                content = _edited(content, path.suffix == ".jsonl", kind, *arguments)
            else:
                content = _damaged(content, kind, *arguments)
            path.write_bytes(content)


def _replace_node(path: Path, kind: str, victim: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
    targets = {"loop": path, "dangling": path.with_name("nothing"), "device": Path("/dev/zero")}
    match kind:
        case "folder":
            path.mkdir()
        case "fifo":
            os.mkfifo(path)
        case "absent":
            pass
        case _:
            path.symlink_to(targets.get(kind, victim))


def _damaged(content: bytes, kind: str, *arguments: Any) -> bytes:
    place = int(arguments[0] * len(content)) if arguments and kind != "code" else 0
    match kind:
        case "flip" if content:
            return (
                content[:place] + bytes([content[place] ^ 1 << arguments[1]]) + content[place + 1 :]
            )
        case "truncate":
            return content[:place]
        case "insert":
            return content[:place] + arguments[1].encode() + content[place:]
        case "digit":
            digits = [
                i
                for i in range(place, min(place + 2000, len(content)))
                if chr(content[i]).isdigit()
            ]
            new = str(arguments[1]).encode()
            return content[: digits[0]] + new + content[digits[0] + 1 :] if digits else content
        case "utf-16":
            return content.decode("utf-8", "replace").encode("utf-16")
        case "line":
            lines = content.splitlines(keepends=True)
            at = int(arguments[0] * len(lines))
            return b"".join(lines[:at] + lines[at : at + 1] * 2 + lines[at + 1 :])
        case "code":
            return {
                "python": f"__import__('os').mkdir({CANARY!r})\n".encode() + content,
                "yaml": f"!!python/object/apply:os.mkdir [{CANARY!r}]\n".encode(),
                "pickle": pickle.dumps(Execute()),
            }[arguments[0]]
        case _:
            return b""


def _edited(
    content: bytes, lines: bool, kind: str, line: int, keys: list[Any], *value: Any
) -> bytes:
    """Return a JSON document, or one line of JSON lines, with one value replaced or removed."""
    parts = content.split(b"\n") if lines else [content]
    try:
        document = json.loads(parts[line])
        target = document
        for key in keys[:-1]:
            target = target[key]
        if kind == "delete" and keys:
            del target[keys[-1]]
        elif keys:
            target[keys[-1]] = value[0]
        else:
            document = value[0] if value else {}
    # An operation before it has removed the place.
    except (ValueError, LookupError, TypeError, RecursionError):
        return content
    text = json.dumps(document)
    for mark, raw in _RAW.items():
        text = text.replace(json.dumps(mark), raw)
    parts[line] = text.encode()
    return b"\n".join(parts)
