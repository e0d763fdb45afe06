"""Mutations of a file on a disk: a list of operations, each a JSON list, so that a failure can be saved.

An operation is a name and its arguments. Positions are fractions of the file, because the files of
two studies have different sizes.
"""

import json
import os
import pickle
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

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
_BYTES = ("flip", "truncate", "insert", "digit", "utf-16", "empty", "line", "code")


class Execute:
    """Object whose unpickling creates the canary."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (CANARY,)


def draw(chance: random.Random, path: Path) -> list[Operation]:
    """Return one to three operations for the file at ``path``."""
    if chance.random() < 0.12:
        return draw_node(chance)
    documents = path.suffix in (".json", ".jsonl", ".yaml")
    return [
        _draw_value(chance, path) if documents and chance.random() < 0.6 else _draw_bytes(chance)
        for _ in range(chance.choice((1, 1, 1, 2, 3)))
    ]


def draw_node(chance: random.Random) -> list[Operation]:
    """Return an operation that replaces a file or directory by something else."""
    return [[chance.choice(_NODES)]]


def _draw_bytes(chance: random.Random) -> Operation:
    # Heads of files are parsed: half of the positions are there.
    place = chance.random() ** chance.choice((1, 8))
    match kind := chance.choice(_BYTES):
        case "flip":
            return [kind, place, chance.randrange(8)]
        case "truncate" | "line":
            return [kind, place]
        case "insert":
            return [kind, place, chance.choice(_PIECES)]
        case "digit":
            return [kind, place, chance.randrange(10)]
        case "code":
            return [kind, chance.choice(("python", "yaml", "pickle"))]
        case _:
            return [kind]


def _draw_value(chance: random.Random, path: Path) -> Operation:
    try:
        lines = path.read_text(encoding="utf-8").splitlines() if path.suffix == ".jsonl" else [""]
        line = chance.randrange(max(1, len(lines)))
        text = lines[line] if path.suffix == ".jsonl" else path.read_text(encoding="utf-8")
        keys = chance.choice(list(_places(json.loads(text))))
    except (ValueError, IndexError, RecursionError):
        return _draw_bytes(chance)
    if chance.random() < 0.2:
        return ["delete", line, keys]
    return ["set", line, keys, chance.choice(VALUES)]


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
