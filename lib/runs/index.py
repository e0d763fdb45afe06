"""Index of a study's ended runs: what a command read from their files, for the next call.

Like git's index, it is derived: an entry is used only while the folder of the run and every file that
was read have the same size, times and inode. It is a file in the user's cache, never in the study. A
missing, damaged or foreign index, or one of other code, is empty. Commands that decide whether runs
may be trusted (audit, claims, verify-results, reproduce, archive, verdicts) read the files.

The stamp of a command is derived in the same way from all its input files: while none has changed,
and its output files have the same content, the command is up to date. Imports no torch.
"""

import errno
import functools
import hashlib
import os
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from operator import attrgetter
from pathlib import Path
from typing import Any, Generic, TypeVar

from lib.console import is_verbose, log
from lib.errors import KablateError
from lib.files import canonical_json, no_follow, sha256_file, write_atomic
from lib.json_files import parse_json_line
from lib.project import ROOT
from lib.runs.run_dir import RunDir

T = TypeVar("T")

# Fewer new runs are not stored: reading their files takes less time than writing the index.
MIN_NEW_ENTRIES = 100
# A file changed so shortly before it was read may change again without a new time: file systems
# store times in steps of up to two seconds.
RACY_NS = 2_000_000_000
_MAX_BYTES = 1 << 28
_WRITABLE_BY_OTHERS = 0o022
# Of the folders of a study.
_MAX_DEPTH = 8
# Comparing a value with more of them takes longer than reading it.
MAX_SHARED = 64

# Digest of the folder and the files that were read, the names of the files, and the JSON fields.
_Entry = tuple[str, Sequence[str], Mapping[str, Any]]


class RunIndex(Generic[T]):
    """What one command reads from each run of a study, as JSON fields between the calls."""

    def __init__(
        self,
        folder: Path,
        command: str,
        encode: Callable[[T], Mapping[str, Any]],
        decode: Callable[[Mapping[str, Any]], T],
        *,
        shared: str = "",
        settings: str = "",
    ) -> None:
        """Load the index of a command for the study in ``folder``.

        ``encode`` and ``decode`` convert a value to JSON fields and back, without a loss. The field
        ``shared`` is equal for many runs and stored once. The values depend on ``settings``.
        """
        self._path = _cache_file(folder, command, settings)
        self._encode, self._decode, self._shared = encode, decode, shared
        self._new = 0
        self._entries: dict[str, _Entry] = {}
        document = _read_document(self._path)
        self._values: list[Any] = document.get("shared", [])
        for run, (signature, files, fields) in document.get("entries", {}).items():
            if shared:
                fields[shared] = self._values[fields[shared]]
            self._entries[run] = signature, files, fields

    def read(
        self, run: RunDir, names: Callable[[], Sequence[str]], read: Callable[[], tuple[T, bool]]
    ) -> T:
        """Return the value of a run: from the index if nothing has changed, else from ``read``.

        ``read`` returns the value and whether it may be stored: the run has ended, and no file is
        damaged. ``names`` are all files that it reads.
        """
        folder = str(run.path)
        entry = self._entries.get(folder)
        if entry is not None:
            signature = _signature(folder, entry[1])
            if signature is not None and signature[0] == entry[0]:
                return self._decode(entry[2])
            del self._entries[folder]
        files, now = names(), time.time_ns()
        before = _signature(folder, files)
        value, storable = read()
        is_settled = before is not None and before[1] < now - RACY_NS
        if storable and before is not None and is_settled and _signature(folder, files) == before:
            fields = dict(self._encode(value))
            if not self._shared or self._share(fields):
                self._entries[folder] = before[0], files, fields
                self._new += 1
                return self._decode(fields)
        return value

    def save(self) -> None:
        """Write the index if it has many new entries; with V=1, log why it cannot be written."""
        if self._new < MIN_NEW_ENTRIES:
            return
        entries = {k: entry for k, entry in self._entries.items() if os.path.isdir(k)}
        shared = {}
        if self._shared:
            values = [fields[self._shared] for _, _, fields in entries.values()]
            shared = {id(value): value for value in values}
        numbers = {key: number for number, key in enumerate(shared)}
        records = {
            folder: [signature, list(files), self._packed(fields, numbers)]
            for folder, (signature, files, fields) in entries.items()
        }
        if _write_document(self._path, {"entries": records, "shared": [*shared.values()]}):
            self._new = 0

    def _share(self, fields: dict[str, Any]) -> bool:
        """Replace the shared field by an equal value of another run; return False for one too many."""
        value = fields[self._shared]
        for known in reversed(self._values):
            if known == value:
                fields[self._shared] = known
                return True
        if len(self._values) == MAX_SHARED:
            return False
        self._values.append(value)
        return True

    def _packed(self, fields: Mapping[str, Any], numbers: Mapping[int, int]) -> Mapping[str, Any]:
        """Return the fields with the number of the shared value in its place."""
        return {
            name: numbers[id(value)] if name == self._shared else value
            for name, value in fields.items()
        }


class OutputStamp:
    """What a command printed and wrote, from one call to the next, while its inputs are unchanged."""

    def __init__(
        self,
        folder: Path,
        command: str,
        *,
        settings: str,
        facts: Any,
        inputs: Sequence[Path],
        outputs: Sequence[Path],
    ) -> None:
        """Create the stamp of a command for the study in ``folder``, before the inputs are read.

        The text depends on ``settings``, on ``facts``, which have a JSON form, on every file below
        the folders ``inputs`` except ``outputs``, on the code, and on the installed packages.
        """
        self._path = _cache_file(folder, command, settings)
        self._facts, self._inputs, self._outputs = facts, inputs, outputs
        self._began = time.time_ns()
        self._key = self._signature()

    def text(self) -> str | None:
        """Return the text of the call before, if inputs and outputs are those of that call."""
        stored = _read_document(self._path)
        unchanged = stored and self._key is not None and stored["key"] == self._key[0]
        return stored["text"] if unchanged and stored["outputs"] == self._digests() else None

    def save(self, text: str, runs: int) -> None:
        """Store the text of a study of many ``runs``.

        It is not stored if an input has changed since the stamp was created, or just before.
        """
        key = self._key
        if runs < MIN_NEW_ENTRIES or key is None or key[1] >= self._began - RACY_NS:
            return
        if self._signature() == key:
            document = {"key": key[0], "text": text, "outputs": self._digests()}
            _write_document(self._path, document)

    def _digests(self) -> list[str]:
        return [content_digest(path) for path in self._outputs]

    def _signature(self) -> tuple[str, int] | None:
        """Return a digest that changes with any input, and the newest time of a file.

        Return None if a folder or file cannot be read.
        """
        packages = os.stat(sysconfig.get_path("purelib"))
        facts = [self._facts, sys.version, packages.st_mtime_ns, *map(str, self._inputs)]
        digest, newest = hashlib.sha256(canonical_json(facts).encode()), 0
        without = {str(path) for path in self._outputs}
        try:
            for path in self._inputs:
                for names, modified in _tree_facts(str(path), without):
                    digest.update(names.encode())
                    newest = max(newest, modified)
        except OSError:
            return None
        return digest.hexdigest(), newest


def content_digest(path: Path) -> str:
    """Return the digest of a file's content, or the error in its place."""
    try:
        return sha256_file(path)
    except (OSError, KablateError) as error:
        return repr(error)


def _tree_facts(folder: str, without: Set[str], depth: int = 0) -> Iterator[tuple[str, int]]:
    """Yield, folder by folder, names and stat data of all files but ``without``, and the newest time.

    Raises OSError if a folder or file cannot be read, or folders are nested too deeply, as in a link
    to a folder above.
    """
    if depth > _MAX_DEPTH:
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), folder)
    facts: list[Any] = [folder]
    newest = 0
    with os.scandir(folder) as listed:
        entries = sorted(listed, key=attrgetter("name"))
    for entry in entries:
        if entry.is_dir():
            yield from _tree_facts(entry.path, without, depth + 1)
        elif entry.path not in without:
            s = entry.stat()
            facts.append((entry.name, s.st_size, s.st_mtime_ns, s.st_ctime_ns, s.st_ino))
            newest = max(newest, s.st_mtime_ns, s.st_ctime_ns)
    yield repr(facts), newest


def _signature(folder: str, files: Sequence[str]) -> tuple[str, int] | None:
    """Return a digest of what changes with the folder or a file, and the newest time.

    Return None if a file does not exist. The time of the folder changes with a new file in it.
    """
    try:
        stats = [os.stat(f"{folder}/{name}") for name in ("", *files)]
    except OSError:
        return None
    facts = [(s.st_size, s.st_mtime_ns, s.st_ctime_ns, s.st_ino) for s in stats]
    newest = max(max(modified, changed) for _, modified, changed, _ in facts)
    return hashlib.blake2b(repr(facts).encode(), digest_size=12).hexdigest(), newest


def _cache_file(folder: Path, command: str, settings: str) -> Path | None:
    """Return the file of a command in the user's cache; None if the user has no cache folder."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"))
    key = canonical_json([str(folder.absolute()), command, settings]).encode()
    name = f"{command}-{hashlib.sha256(key).hexdigest()[:16]}.json"
    return cache / "kablate" / "runs" / name if cache.is_absolute() else None


def _read_document(path: Path | None) -> Mapping[str, Any]:
    """Return the document that this code of this user wrote; an empty one in all other cases."""
    if path is None:
        return {}
    try:
        with open(path, "rb", opener=no_follow) as stream:
            info = os.fstat(stream.fileno())
            is_own = info.st_uid == os.geteuid() and not info.st_mode & _WRITABLE_BY_OTHERS
            content = stream.read(_MAX_BYTES) if is_own else b""
    except (OSError, KablateError):
        return {}
    digest, _, content = content.partition(b"\n")
    if not content or digest != _digest(content):
        return {}
    return parse_json_line(path, 2, content)


def _write_document(path: Path | None, document: Mapping[str, Any]) -> bool:
    """Write a document and return whether it was written; with V=1, log why it cannot be."""
    if path is None:
        return False
    content = canonical_json(document).encode()
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_atomic(path, _digest(content) + b"\n" + content, mode=0o600)
    except OSError as error:
        if is_verbose():
            log("NOTE", f"no index of the runs: {path}: {error.strerror}")
        return False
    return True


def _digest(content: bytes) -> bytes:
    """Return the digest of an index and of the code that reads and writes it, in hex."""
    return hashlib.sha256(_code_digest() + content).hexdigest().encode()


@functools.cache
def _code_digest() -> bytes:
    """Return the digest of this tree's modules: other code may read another value."""
    digest = hashlib.sha256()
    for path in sorted(path for part in ("gpt2", "lib") for path in (ROOT / part).rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.digest()
