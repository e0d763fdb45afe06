"""Removal of run directories, and archives of runs: one file with all that is needed to verify them.

An archive is a tar file whose first member lists every other member with size and digest. It
contains no checkpoints, no files of trackers, and no weights unless they are requested. Imports no
torch.
"""

import argparse
import gzip
import hashlib
import io
import os
import shutil
import tarfile
import tempfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path, PurePosixPath
from typing import IO, Any

from gpt2.records.listing import ListedRun, RunList, list_runs, select
from lib.console import confirm, log
from lib.errors import EXIT_DONE, EXIT_FAILED, ConfigError, Problem
from lib.files import (
    no_follow,
    pretty_json,
    sha256_file,
    size_bytes,
    temporary_path,
    write_atomic,
    write_json,
)
from lib.json_files import DamagedRecord, RecordError, read_json_object, typed
from lib.make_variables import require_value
from lib.report.render import json_document
from lib.runner.hooks import without_commands
from lib.runs.lease import DEFAULT_SECONDS, take_lease
from lib.runs.run_dir import RunDir
from lib.units import format_size

SCHEMA_VERSION = 1
LISTING = "archive.json"
CONFIG = ".config"
STUDY_FILE = "study.toml"
# Folders that no reader of results needs, beside hidden files.
_LEFT_OUT = ("checkpoints", "trackers")
_REMOVED = ".removed-"
_CHUNK_BYTES = 1 << 20
_MAX_LISTING_BYTES = 1 << 26


# Removal.


def remove_runs(runs: Sequence[ListedRun], folder: Path) -> list[str]:
    """Remove run directories below ``folder``; return a reason for each one that stays.

    A directory gets a hidden name first, so an interrupted removal never leaves a part of a run. The
    next removal removes such leftovers.
    """
    for leftover in folder.glob(f"*/{_REMOVED}*"):
        shutil.rmtree(leftover)
    reasons = []
    for run in runs:
        path = folder / run.run
        if path.is_symlink():
            reasons.append(f"{run.run}: a symbolic link; remove it by hand")
            continue
        try:
            with take_lease(RunDir(path), DEFAULT_SECONDS):
                hidden = path.with_name(f"{_REMOVED}{path.name}")
                path.rename(hidden)
        except ConfigError as error:
            reasons.append(f"{run.run}: {error.problems[0].what}")
            continue
        shutil.rmtree(hidden)
    return reasons


# Archives.


@dataclass(frozen=True)
class ArchivedFile:
    """Size and SHA-256 of a member."""

    bytes: int
    sha256: str


@dataclass(frozen=True)
class Archive:
    """Content of an archive: its runs, and its files by path ``<study>/<run>/<file>``."""

    runs: Sequence[str]
    # Names of required files that were left out of every run.
    without: Sequence[str]
    files: dict[str, ArchivedFile]
    # Runs that were not archived, with the reason.
    skipped: list[str] = field(default_factory=list)

    @property
    def bytes(self) -> int:
        """Return the size of all files, uncompressed."""
        return sum(file.bytes for file in self.files.values())


def write_archive(
    listed: RunList, path: Path, *, weights: bool, config: Path, study_file: Path | None = None
) -> Archive:
    """Write the runs, the files of their studies and the configuration to the new file ``path``.

    ``study_file`` is the file of an own study, which the configuration needs. Raises ConfigError if there is no run to archive, or the file exists.
    """
    if path.exists():
        raise ConfigError(Problem("exists", str(path), "type another OUT=", code="file.exists"))
    skipped = [f"{run.run}: running" for run in listed.runs if run.state == "running"]
    runs = [run.run for run in listed.runs if run.state != "running"]
    if not runs:
        what = f"no run to archive in {listed.folder}"
        raise ConfigError(Problem(what, next="type: make ls", code="run.none"))
    without = [] if weights else [RunDir(Path()).weights.name]
    members = dict(sorted(_members(listed.folder, runs, without, skipped)))
    if config.is_file():
        members[CONFIG] = config
    if study_file is not None and study_file.is_file():
        members[STUDY_FILE] = study_file
    files = {name: ArchivedFile(p.stat().st_size, sha256_file(p)) for name, p in members.items()}
    archive = Archive(runs, without, files, skipped)
    record = {"schema_version": SCHEMA_VERSION, **asdict(archive)}
    del record["skipped"]
    text = pretty_json(record).encode()
    with (
        _new_file(path) as stream,
        # Without the time of compression, equal runs give equal archives.
        gzip.GzipFile("", "wb", fileobj=stream, mtime=0) as packed,
        tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as tar,
    ):
        _add(tar, LISTING, io.BytesIO(text), len(text))
        for name, file in files.items():
            with open(members[name], "rb", opener=no_follow) as content:
                _add(tar, name, content, file.bytes)
    return archive


def _members(
    folder: Path, runs: Sequence[str], without: Sequence[str], skipped: list[str]
) -> Iterator[tuple[str, Path]]:
    """Yield name and path of the files of runs and of their studies; name what is left out."""
    for study in sorted({run.partition("/")[0] for run in runs}):
        yield from ((f"{study}/{p.name}", p) for p in _files(folder / study, skipped))
    for run in runs:
        for place, folders, _ in os.walk(folder / run):
            folders[:] = [name for name in folders if name not in _LEFT_OUT]
            for path in _files(Path(place), skipped):
                if path.name not in without:
                    yield path.relative_to(folder).as_posix(), path


def _files(folder: Path, skipped: list[str]) -> Iterator[Path]:
    for path in folder.iterdir():
        if path.is_symlink():
            skipped.append(f"{path}: a symbolic link")
        elif path.is_file() and not path.name.startswith("."):
            yield path


def _add(tar: tarfile.TarFile, name: str, content: IO[bytes], size: int) -> None:
    member = tarfile.TarInfo(name)
    member.size = size
    tar.addfile(member, content)


@contextmanager
def _new_file(path: Path) -> Iterator[IO[bytes]]:
    """Open a temporary file that becomes ``path`` at the end of the context without an error."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = temporary_path(path)
    try:
        with open(temporary, "wb", opener=no_follow) as stream:
            yield stream
        temporary.rename(path)
    finally:
        temporary.unlink(missing_ok=True)


@dataclass(frozen=True)
class Unpacked:
    """Result of unpacking: runs that are new here, runs that were here, and runs that differ."""

    new: list[str]
    same: list[str]
    # Runs whose directory here has another content, which stays.
    different: list[str]
    config: Path | None


def unpack(path: Path, folder: Path, config: Path) -> Unpacked:
    """Unpack an archive below ``folder``, and its configuration to ``config`` if there is none.

    Every member is verified before any run appears. A run that exists is not touched. Raises
    ConfigError for an archive that is damaged, or that has a member which is no file of a run.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".unpacked-", dir=folder) as place:
        root = Path(place)
        archive = _extract(path, root)
        unpacked = Unpacked([], [], [], None)
        for run in archive.runs:
            if archive.without:
                write_json(RunDir(root / run).unpacked, {"without": list(archive.without)})
            if not (folder / run).exists():
                (folder / run).parent.mkdir(exist_ok=True)
                (root / run).rename(folder / run)
                unpacked.new.append(run)
            else:
                same = _same_results(RunDir(root / run), RunDir(folder / run))
                (unpacked.same if same else unpacked.different).append(run)
        # Tables and reports of the study, which make report writes anew.
        for name in (n for n in archive.files if n.count("/") == 1):
            if not (folder / name).exists():
                (root / name).rename(folder / name)
        if CONFIG in archive.files:
            if config.exists():
                config = folder / f"{path.name.partition('.')[0]}.config"
            if not config.exists():
                text = (root / CONFIG).read_text(encoding="utf-8", errors="surrogateescape")
                text = without_commands(text)
                write_atomic(config, text.encode("utf-8", errors="surrogateescape"))
        study_file = config.parent / STUDY_FILE
        if STUDY_FILE in archive.files and not study_file.exists():
            (root / STUDY_FILE).rename(study_file)
            unpacked = Unpacked(unpacked.new, unpacked.same, unpacked.different, config)
    return unpacked


def _extract(path: Path, root: Path) -> Archive:
    """Write the members below ``root`` and return the listing; each member must match it."""
    try:
        with tarfile.open(path, "r:gz") as tar:
            first = tar.next()
            if first is None or first.name != LISTING or not first.isreg():
                raise _damaged(path, f"first member {LISTING}", first.name if first else "none")
            if first.size > _MAX_LISTING_BYTES:
                raise _damaged(path, f"a smaller {LISTING}", format_size(first.size))
            _write(tar, first, root / LISTING)
            archive = _listing(root / LISTING)
            expected = dict(archive.files)
            free = shutil.disk_usage(root).free
            if archive.bytes > free:
                what = f"needs {format_size(archive.bytes)}, {format_size(free)} are free"
                raise ConfigError(Problem(what, str(root.parent), code="disk.full"))
            while (member := tar.next()) is not None:
                file = expected.pop(member.name, None)
                if file is None or not member.isreg() or member.size != file.bytes:
                    raise _damaged(path, "the members that it lists", member.name)
                digest = _write(tar, member, root / member.name)
                if digest != file.sha256:
                    raise _damaged(path, f"{member.name} with SHA-256 {file.sha256}", digest)
            if expected:
                raise _damaged(path, f"a member {min(expected)}", "none")
            return archive
    except RecordError as error:
        raise _damaged(path, error.expected, error.actual) from None
    except (tarfile.TarError, zlib.error, EOFError, OSError, ValueError) as error:
        if isinstance(error, OSError) and error.errno:
            raise
        raise _damaged(path, "an archive of make archive", str(error)) from None


def _write(tar: tarfile.TarFile, member: tarfile.TarInfo, path: Path) -> str:
    """Write a member to a new file; return its SHA-256."""
    content, digest = tar.extractfile(member), hashlib.sha256()
    assert content is not None, member.name
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "xb") as stream:
        while chunk := content.read(_CHUNK_BYTES):
            digest.update(chunk)
            stream.write(chunk)
    return digest.hexdigest()


def _listing(path: Path) -> Archive:
    record = read_json_object(path)
    files: Any = record.get("files")
    if not isinstance(files, dict) or not all(isinstance(row, dict) for row in files.values()):
        raise DamagedRecord(path, "files by path", type(files).__name__)
    runs, without = (_names(path, record, name) for name in ("runs", "without"))
    typed_files = {
        name: typed(ArchivedFile, row, path, ("files", name)) for name, row in files.items()
    }
    # A path may lead nowhere but below the folder of its study.
    for name in (*runs, *typed_files):
        parts = PurePosixPath(name).parts
        hidden = any(part.startswith(".") for part in parts) and name != CONFIG
        if not parts or hidden or name.startswith("/"):
            raise DamagedRecord(path, "paths <study>/<run>/<file>", repr(name))
    for run in runs:
        if len(PurePosixPath(run).parts) != 2:
            raise DamagedRecord(path, "runs <study>/<run>", repr(run))
    return Archive(runs, without, typed_files)


def _names(path: Path, record: Mapping[str, Any], field_name: str) -> list[str]:
    values = record.get(field_name)
    if not isinstance(values, list) or not all(isinstance(text, str) for text in values):
        raise DamagedRecord(path, f"{field_name}: a list of names", f"{values!r:.80}")
    return values


def _damaged(path: Path, expected: str, found: str) -> ConfigError:
    what = f"expected {expected}, got {found}"
    advice = "nothing was unpacked; fetch the file again"
    return ConfigError(Problem(what, str(path), advice, code="archive.damaged"))


def _same_results(one: RunDir, other: RunDir) -> bool:
    """Return whether two directories contain the same records of the same training."""
    files = [(run.status, run.resolved_config, run.manifest, run.summary) for run in (one, other)]
    return all(_content(a) == _content(b) for a, b in zip(*files, strict=True))


def _content(path: Path) -> bytes | None:
    return path.read_bytes() if path.is_file() else None


# The commands of ``make clean-runs``, ``make archive`` and ``make unpack``.


def clean_command(args: argparse.Namespace, folder: Path) -> tuple[int, str]:
    """Log the selected runs with their sizes, and remove them after a confirmation.

    Returns the exit code and the text for stdout, as the other commands.
    """
    where = require_value(args.where, "WHERE", 'make clean-runs WHERE="state=failed"')
    listed = select(list_runs(folder, replaced=True), where)
    sizes = {run.run: size_bytes(folder / run.run) for run in listed.runs}
    for run in listed.runs:
        log("RUN", f"{format_size(sizes[run.run]):>12}  {run.state:11}  {run.run}")
    total = f"{len(sizes)} run{'s' * (len(sizes) != 1)}, {format_size(sum(sizes.values()))}"
    reasons: list[str] = []
    if listed.runs:
        confirm(f"remove {total} below {folder}?", args.yes)
        reasons = remove_runs(listed.runs, folder)
    text = f"removed: {total}; left out: {len(reasons)}\n"
    if args.json:
        text = json_document(SCHEMA_VERSION, {"runs": sizes, "kept": reasons})
    return _left_out(reasons), text


def archive_command(
    args: argparse.Namespace, folder: Path, config: Path, study_file: Path | None
) -> tuple[int, str]:
    """Write an archive of the selected runs."""
    path = Path(require_value(args.out, "OUT", "make archive OUT=study.tar.gz"))
    listed, weights = select(list_runs(folder), args.where), args.weights in ("1", "y")
    packed = write_archive(listed, path, weights=weights, config=config, study_file=study_file)
    kind = "" if not packed.without else ", without weights (WEIGHTS=1 includes them)"
    size = f"{format_size(packed.bytes)}, compressed {format_size(path.stat().st_size)}"
    text = f"{path}: {len(packed.runs)} runs, {len(packed.files)} files, {size}{kind}\n"
    if args.json:
        document = {"file": str(path), "runs": packed.runs, "without": packed.without}
        text = json_document(SCHEMA_VERSION, document)
    return _left_out(packed.skipped), text


def unpack_command(args: argparse.Namespace, folder: Path, config: Path) -> tuple[int, str]:
    """Add the runs of an archive."""
    path = Path(require_value(args.archive, "ARCHIVE", "make unpack ARCHIVE=study.tar.gz"))
    if not path.is_file():
        advice = "type: make unpack ARCHIVE=study.tar.gz"
        problem = Problem(f"no such file {str(path)!r}", "ARCHIVE", advice, code="archive.missing")
        raise ConfigError(problem)
    unpacked = unpack(path, folder, config)
    text = f"{len(unpacked.new)} runs added below {folder}, {len(unpacked.same)} were there\n"
    if unpacked.config and unpacked.config != config:
        text += f"to use its configuration: make KCONFIG_CONFIG={unpacked.config} report\n"
    if args.json:
        document = vars(unpacked) | {"config": unpacked.config and str(unpacked.config)}
        text = json_document(SCHEMA_VERSION, document)
    reasons = [f"{run}: another run has this name here" for run in unpacked.different]
    return _left_out(reasons), text


def _left_out(reasons: Sequence[str]) -> int:
    for reason in reasons:
        log("WARN", f"left out: {reason}")
    return EXIT_FAILED if reasons else EXIT_DONE
