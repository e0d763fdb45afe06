"""Index of a study's ended runs: what a command read from their files, for the next call.

Like git's index, it is derived: an entry is used only while the folder of the run and every file that
was read have the same size, times and inode. It is a file in the user's cache, never in the study. A
missing, damaged or foreign index, or one of other code, is empty. Commands that decide whether runs
may be trusted (audit, claims, verify-results, reproduce, verdicts) read the files.

The stamp of a command is derived in the same way from all its input files: while none has changed,
and its output files have the same content, the command is up to date. A file that changes after its
stat data were read has other stat data in the next call, so nothing is read twice to be sure. Imports
no torch.
"""

import errno
import functools
import hashlib
import os
import sys
import sysconfig
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
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

# Digest of stat data, and the newest time in them.
_Signature = tuple[str, int]
# Digest of the stat data of what was read, the names of the files, and the JSON fields.
_Entry = tuple[str, Sequence[str], Mapping[str, Any]]


class StudyFiles:
    """Stat data of every file of a study at one moment, by folder."""

    def __init__(self, folders: Sequence[Path], without: Set[str] = frozenset()) -> None:
        """Read the stat data of all files below ``folders`` except the paths ``without``."""
        self._without = without
        self._below: dict[str, _Signature | None] = {}
        parts = [self._read(str(folder)) for folder in folders]
        known = [part for part in parts if part is not None]
        # None if a folder or file cannot be read.
        self.signature = _combined(known) if len(known) == len(parts) else None

    def below(self, folder: str) -> _Signature | None:
        """Return what changes with any file below ``folder``: one of the folders, or directly in one.

        Return None if the folder is neither, or something in it cannot be read.
        """
        return self._below.get(folder)

    def _read(self, folder: str) -> _Signature | None:
        try:
            files, subfolders = _folder_facts(folder, self._without)
        except OSError:
            return None
        for subfolder in subfolders:
            self._below[subfolder] = tree_signature(subfolder, self._without)
        parts = [self._below[subfolder] for subfolder in subfolders]
        known = [part for part in parts if part is not None]
        whole = _combined([files, *known]) if len(known) == len(parts) else None
        self._below.setdefault(folder, whole)
        return whole


def tree_signature(folder: str, without: Set[str] = frozenset()) -> _Signature | None:
    """Return what changes with any file below ``folder`` but ``without``.

    Return None if a folder or file cannot be read, or folders are nested too deeply, as in a link to
    a folder above.
    """
    try:
        return _combined(_tree_facts(folder, without))
    except OSError:
        return None


class RunIndex(Generic[T]):
    """What one command reads from each run of a study, as JSON fields between the calls."""

    def __init__(
        self,
        folder: Path,
        command: str,
        encode: Callable[[T], Mapping[str, Any]],
        decode: Callable[[Mapping[str, Any]], T],
        *,
        shared: Sequence[str] = (),
        settings: str = "",
        files: StudyFiles | None = None,
        anew: bool = False,
    ) -> None:
        """Load the index of a command for the study in ``folder``, unless every run is read ``anew``.

        ``encode`` and ``decode`` convert a value to JSON fields and back, without a loss. The fields
        ``shared`` are equal for many runs; equal values are stored once. The values depend on
        ``settings``. With ``files``, the value of a run depends on all files below its folder.
        """
        self._path = _cache_file(folder, command, settings)
        self._encode, self._decode, self._files = encode, decode, files
        self._new = 0
        self._entries: dict[str, _Entry] = {}
        document = {} if anew else _read_document(self._path)
        stored = document.get("shared", {})
        self._shared = {name: _SharedValues(stored.get(name, [])) for name in shared}
        for run, (signature, names, fields) in document.get("entries", {}).items():
            for name, values in self._shared.items():
                fields[name] = values.items[fields[name]]
            self._entries[run] = signature, names, fields

    def read(
        self,
        run: RunDir,
        names: Callable[[], Sequence[str]] | None,
        read: Callable[[], tuple[T, bool]],
    ) -> T:
        """Return the value of a run: from the index if nothing has changed, else from ``read``.

        ``read`` returns the value and whether it may be stored: the run has ended, and no file is
        damaged. ``names`` are all files that it reads; None for those of ``files``.
        """
        folder = str(run.path)
        entry = self._entries.get(folder)
        if entry is not None:
            signature = self._signature(folder, entry[1])
            if signature is not None and signature[0] == entry[0]:
                return self._decode(entry[2])
            del self._entries[folder]
        read_names, now = names() if names else (), time.time_ns()
        before = self._signature(folder, read_names)
        value, storable = read()
        is_settled = before is not None and before[1] < now - RACY_NS
        if storable and before is not None and is_settled:
            after = tree_signature(folder) if self._files else _signature(folder, read_names)
            if after == before:
                fields = dict(self._encode(value))
                for name, values in self._shared.items():
                    fields[name] = values.known(fields[name])
                self._entries[folder] = before[0], read_names, fields
                self._new += 1
                return self._decode(fields)
        return value

    def save(self) -> None:
        """Write the index if it has many new entries; with V=1, log why it cannot be written."""
        if self._new < MIN_NEW_ENTRIES:
            return
        entries = {k: entry for k, entry in self._entries.items() if os.path.isdir(k)}
        used = {name: _SharedValues() for name in self._shared}
        records = {}
        for folder, (signature, names, fields) in entries.items():
            numbers = {name: values.number(fields[name]) for name, values in used.items()}
            records[folder] = [signature, list(names), {**fields, **numbers}]
        shared = {name: values.items for name, values in used.items()}
        if _write_document(self._path, {"entries": records, "shared": shared}):
            self._new = 0

    def _signature(self, folder: str, names: Sequence[str]) -> _Signature | None:
        return self._files.below(folder) if self._files else _signature(folder, names)


class _SharedValues:
    """JSON values without duplicates."""

    def __init__(self, items: Sequence[Any] = ()) -> None:
        self.items = list(items)
        # Most values are the object of another run, or have the JSON text of one.
        self._by_object = {id(item): number for number, item in enumerate(self.items)}
        self._by_text: dict[str, int] = {}

    def known(self, value: Any) -> Any:
        """Return the equal value, which is added if there is none."""
        return self.items[self.number(value)]

    def number(self, value: Any) -> int:
        """Return the number of the equal value, which is added if there is none."""
        if id(value) in self._by_object:
            return self._by_object[id(value)]
        if len(self._by_text) < len(self.items):
            self._by_text = {canonical_json(item): n for n, item in enumerate(self.items)}
        number = self._by_text.setdefault(canonical_json(value), len(self.items))
        if number == len(self.items):
            # The items are kept, so no other object gets their ids.
            self.items.append(value)
            self._by_object[id(value)] = number
        return number


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
        self._outputs = outputs
        self._began = time.time_ns()
        self.files = StudyFiles(inputs, {str(path) for path in outputs})
        packages = os.stat(sysconfig.get_path("purelib")).st_mtime_ns
        all_facts = [facts, sys.version, packages, *map(str, inputs), self.files.signature]
        self._key = hashlib.sha256(canonical_json(all_facts).encode()).hexdigest()

    def text(self) -> str | None:
        """Return the text of the call before, if inputs and outputs are those of that call."""
        stored = _read_document(self._path)
        unchanged = stored and self.files.signature and stored["key"] == self._key
        return stored["text"] if unchanged and stored["outputs"] == self._digests() else None

    def save(self, text: str) -> None:
        """Store the text for the inputs as they were at the beginning.

        It is not stored if one of them had just changed: a further change may not change its time.
        """
        files = self.files.signature
        if files is None or files[1] >= self._began - RACY_NS:
            return
        _write_document(self._path, {"key": self._key, "text": text, "outputs": self._digests()})

    def _digests(self) -> list[str]:
        return [content_digest(path) for path in self._outputs]


def content_digest(path: Path) -> str:
    """Return the digest of a file's content, or the error in its place."""
    try:
        return sha256_file(path)
    except (OSError, KablateError) as error:
        return repr(error)


def _tree_facts(folder: str, without: Set[str], depth: int = 1) -> Iterator[_Signature]:
    """Yield, folder by folder, names and stat data of all files but ``without``, and the newest time.

    Raises OSError if a folder or file cannot be read, or folders are nested too deeply.
    """
    if depth > _MAX_DEPTH:
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), folder)
    files, subfolders = _folder_facts(folder, without)
    yield files
    for subfolder in subfolders:
        yield from _tree_facts(subfolder, without, depth + 1)


def _folder_facts(folder: str, without: Set[str]) -> tuple[_Signature, list[str]]:
    """Return names and stat data of the files of one folder, and the subfolders. Raises OSError."""
    facts: list[Any] = [folder]
    times, subfolders = [0], []
    with os.scandir(folder) as listed:
        entries = sorted(listed, key=attrgetter("name"))
    for entry in entries:
        if entry.is_dir():
            subfolders.append(entry.path)
        elif entry.path not in without:
            s = entry.stat()
            facts += (entry.name, s.st_size, s.st_mtime_ns, s.st_ctime_ns, s.st_ino)
            times += (s.st_mtime_ns, s.st_ctime_ns)
    return (repr(facts), max(times)), subfolders


def _combined(parts: Iterable[_Signature]) -> _Signature:
    """Return the digest of the texts of ``parts``, and their newest time."""
    digest, newest = hashlib.blake2b(digest_size=16), 0
    for text, modified in parts:
        digest.update(text.encode("utf-8", "surrogateescape"))
        newest = max(newest, modified)
    return digest.hexdigest(), newest


def _signature(folder: str, files: Sequence[str]) -> _Signature | None:
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
