"""Index of a study's ended runs: what a command read from their files, for the next call.

Like git's index, it is derived: an entry is used only while the folder of the run and every file that
was read have the same size, times and inode. It is a file in the user's cache, never in the study. A
missing, damaged or foreign index, or one of other code, is empty. Commands that decide whether runs
may be trusted (audit, claims, verify-results, reproduce, archive, verdicts) read the files. Imports
no torch.
"""

import functools
import hashlib
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Generic, TypeVar

from lib.console import is_verbose, log
from lib.errors import KablateError
from lib.files import canonical_json, no_follow, write_atomic
from lib.json_files import parse_json_line
from lib.project import ROOT
from lib.runs.run_dir import RunDir

T = TypeVar("T")

# Fewer new entries are not written: reading their files takes less time than writing the index.
MIN_NEW_ENTRIES = 100
# A file changed so shortly before it was read may change again without a new time: file systems
# store times in steps of up to two seconds.
RACY_NS = 2_000_000_000
_MAX_BYTES = 1 << 28
_WRITABLE_BY_OTHERS = 0o022
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
        key = canonical_json([str(folder.absolute()), command, settings]).encode()
        self._name = f"{command}-{hashlib.sha256(key).hexdigest()[:16]}.json"
        self._encode, self._decode, self._shared = encode, decode, shared
        self._new = 0
        self._entries: dict[str, _Entry] = {}
        self._values: list[Any] = []
        if self.path is not None:
            self._load(self.path)

    @property
    def path(self) -> Path | None:
        """Return the file of the index; None if the user has no cache folder."""
        cache = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"))
        return cache / "kablate" / "runs" / self._name if cache.is_absolute() else None

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
        path = self.path
        if path is None or self._new < MIN_NEW_ENTRIES:
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
        content = canonical_json({"entries": records, "shared": [*shared.values()]}).encode()
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            write_atomic(path, _digest(content) + b"\n" + content, mode=0o600)
        except OSError as error:
            if is_verbose():
                log("NOTE", f"no index of the runs: {path}: {error.strerror}")
            return
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

    def _load(self, path: Path) -> None:
        try:
            with open(path, "rb", opener=no_follow) as stream:
                info = os.fstat(stream.fileno())
                is_own = info.st_uid == os.geteuid() and not info.st_mode & _WRITABLE_BY_OTHERS
                content = stream.read(_MAX_BYTES) if is_own else b""
        except (OSError, KablateError):
            return
        digest, _, content = content.partition(b"\n")
        if not content or digest != _digest(content):
            return
        document = parse_json_line(path, 2, content)
        self._values = document["shared"]
        for folder, (signature, files, fields) in document["entries"].items():
            if self._shared:
                fields[self._shared] = self._values[fields[self._shared]]
            self._entries[folder] = signature, files, fields


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
