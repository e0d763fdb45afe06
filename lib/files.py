"""Writing of files: atomic, so that a crash leaves no part of a file, and never through a link.

The folder of a run may be a stranger's: a symbolic link in it could name any file of the user.
"""

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import platform
import re
import shutil
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lib.errors import Problem, RunError


def no_follow(path: str | Path, flags: int) -> int:
    """Open a file and return its descriptor; an ``opener`` for ``open()``.

    Raises RunError if the file is a symbolic link.
    """
    try:
        # A pipe in place of a file is an error instead of a wait for its reader.
        return os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK, 0o644)
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        raise link_error(Path(path)) from None


def regular_file(path: str | Path, flags: int) -> int:
    """Open a file and return its descriptor; an ``opener`` for ``open()``.

    Raises OSError if the file is a pipe or a device, whose content may not end.
    """
    descriptor = os.open(path, flags | os.O_CLOEXEC | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return descriptor


def regular_path(path: Path) -> Path:
    """Return ``path``, for a library that opens it. Raises OSError like ``regular_file``."""
    os.close(regular_file(path, os.O_RDONLY))
    return path


def link_error(path: Path) -> RunError:
    """Return the error of a symbolic link in place of a file or folder to write."""
    what = f"symbolic link to {os.readlink(path)} (expected a file or folder of the run)"
    return RunError(Problem(what, str(path), "remove the link", code="file.symbolic-link"))


@contextmanager
def file_lock(path: Path, on_wait: Callable[[], object] = lambda: None) -> Iterator[None]:
    """Acquire the lock of the file ``path``, which is created; wait if another process has it.

    ``on_wait`` is called before a wait. The operating system releases the lock with the process.
    """
    with open(path, "a", encoding="utf-8", opener=no_follow) as stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            on_wait()
            fcntl.flock(stream, fcntl.LOCK_EX)
        yield


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Name the file ``path`` in an OSError of its temporary file or, as on a full disk, a descriptor."""
    try:
        yield
    except OSError as error:
        if error.filename is None or str(error.filename) == str(temporary_path(path)):
            error.filename = str(path)
        raise


# Part of temporary names: process ids are unique on one machine only, and folders may be shared.
_HOST = re.sub(r"\W", "_", platform.node())


def temporary_path(path: Path) -> Path:
    """Return the path of the temporary file or folder of this process beside ``path``."""
    return path.with_name(f".{path.name}.{_HOST}-{os.getpid()}.tmp")


def write_atomic(path: Path, content: bytes | str, mode: int = 0o666) -> None:
    """Write ``content`` to a temporary file beside ``path``, fsync, rename, fsync the folder.

    ``mode`` are the permissions of a new file, without those of the umask.
    """
    data = content.encode() if isinstance(content, str) else content
    temporary = temporary_path(path)
    with naming(path):
        try:
            # A leftover of a dead process with the same id, or a link.
            temporary.unlink(missing_ok=True)
            with open(
                temporary, "xb", opener=lambda name, flags: os.open(name, flags, mode)
            ) as stream:
                stream.write(data)
                stream.flush()
                os.fsync(stream.fileno())
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)
        fsync_directory(path.parent)


def remove_leftovers(folder: Path, pattern: str = f".*.{_HOST}-*.tmp") -> None:
    """Remove what dead processes of this machine left in ``folder``: temporary files and folders.

    Their names contain the process id between dots or dashes, such as ``.name.host-123.tmp``.
    """
    for path in folder.glob(pattern):
        number = re.search(r"[.-]([0-9]+)[.-][^.-]*$", path.name)
        if number is None or is_alive(int(number[1])):
            continue
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def is_alive(process: int) -> bool:
    """Return whether a process of this machine has not ended; an unused id belongs to none."""
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        return True
    return True


def size_bytes(folder: Path) -> int:
    """Return the bytes of all files below ``folder``; links are not followed.

    Files that another process removes meanwhile do not count.
    """
    size = 0
    for place, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                size += os.lstat(os.path.join(place, name)).st_size
    return size


def fsync_directory(folder: Path) -> None:
    """Make a rename inside ``folder`` durable across a power failure."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def canonical_json(value: Any) -> str:
    """Return the canonical JSON of ``value``: sorted keys, no spaces, no NaN.

    Raises TypeError if ``value`` has no JSON form, ValueError on a non-finite number.
    """
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)


def json_digest(value: Any) -> str:
    """Return the SHA-256, in hex, of the canonical JSON of ``value``."""
    return hashlib.sha256(canonical_json(value).encode()).hexdigest()


def pretty_json(value: Any) -> str:
    """Return ``value`` as indented JSON with sorted keys, without NaN, with a final newline."""
    return json.dumps(value, sort_keys=True, indent=2, allow_nan=False) + "\n"


def write_json(path: Path, value: Any) -> None:
    """Write ``value`` atomically as indented JSON with sorted keys and without NaN."""
    write_atomic(path, pretty_json(value))


def sha256_file(path: Path) -> str:
    """Return the hex SHA-256 of the file's content."""
    digest = hashlib.sha256()
    # The buffers of a stream and of hashlib.file_digest take longer than the digest of a small file.
    with open(path, "rb", buffering=0, opener=regular_file) as stream:
        size = min(os.fstat(stream.fileno()).st_size + 1, 1 << 20)
        while piece := stream.read(size):
            digest.update(piece)
    return digest.hexdigest()


def sha256_prefix(path: Path, size: int) -> str:
    """Return the hex SHA-256 of the first ``size`` bytes of the file."""
    digest = hashlib.sha256()
    with open(path, "rb", opener=regular_file) as stream:
        while size and (piece := stream.read(min(size, 1 << 20))):
            digest.update(piece)
            size -= len(piece)
    return digest.hexdigest()
