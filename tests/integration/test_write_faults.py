"""Commands that cannot write one of their files: one error, nothing torn, and the next call goes on."""

import errno
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.integration.conftest import IN_PROCESS, SINGLE, Folder, set_up

SETTINGS = {"EVAL_INTERVAL": 4, "CHECKPOINT_INTERVAL": 2, "MAX_ITERS": 8, "TELEMETRY_INTERVAL": 10}
DETERMINISTIC = ("metrics.jsonl", "per_query.csv", "model.safetensors", "summary.json")
# Commands, and what they write anew.
TRAIN, MAKE, DATA, REPORT = IN_PROCESS, ("all",), ("data",), ("report",)
EXPORT, CONFIGURE, CONSTANTS = ("export", "run"), ("defconfig", "gpt2-ratio-small"), ("constants",)
REMOVED = {TRAIN: ("results", "environment"), MAKE: ("results", "environment"), DATA: ("data",)}
FULL, READ_ONLY, BROKEN = errno.ENOSPC, errno.EROFS, errno.EIO
# The files that a command cannot write, the error, and its first call that fails.
CASES = {
    "checkpoint": (TRAIN, "*/checkpoints/*", FULL, 9),
    "metrics": (TRAIN, "*/metrics.jsonl", FULL, 9),
    "timing": (TRAIN, "*/timing.jsonl", FULL, 4),
    "log": (TRAIN, "*/logs.txt", FULL, 3),
    "status": (TRAIN, "*/run-s1-????????/.status.json.*", FULL, 4),
    "manifest": (TRAIN, "*/run-s1-????????/.manifest.json.*", FULL, 3),
    "weights": (TRAIN, "*/run-s1-????????/.model.safetensors.*", FULL, 1),
    "per-document rows": (TRAIN, "*/run-s1-????????/.per_query.csv.*", FULL, 1),
    "summary": (TRAIN, "*/run-s1-????????/.summary.json.*", FULL, 1),
    "configuration of the run": (TRAIN, "*/run-s1-????????/*resolved_config.yaml*", FULL, 1),
    "heartbeat": (TRAIN, "*/heartbeat_rank0.jsonl", FULL, 2),
    "whole disk": (TRAIN, "*/results/*", FULL, 60),
    "broken disk": (TRAIN, "*/results/*", BROKEN, 60),
    "read-only run": (TRAIN, "*/run-s1-????????/*", READ_ONLY, 50),
    "read-only results": (TRAIN, "*/results*", READ_ONLY, 1),
    "telemetry": (TRAIN, "*/telemetry.jsonl", FULL, 1),
    "snapshot": (TRAIN, "*/environment/*", FULL, 1),
    "whole disk under make": (MAKE, "*/results/*", FULL, 60),
    "log under make": (MAKE, "*/logs.txt", FULL, 2),
    "data": (DATA, "*/data/*", FULL, 3),
    "read-only data": (DATA, "*/data*", READ_ONLY, 1),
    "table": (REPORT, "*/single/.table.md.*", FULL, 1),
    "report": (REPORT, "*/single/.report.html.*", FULL, 1),
    "read-only report": (REPORT, "*/single/*", READ_ONLY, 1),
    "export": (EXPORT, "*.export.*", FULL, 2),
    "read-only export": (EXPORT, "*export*", READ_ONLY, 1),
    ".config": (CONFIGURE, "*/.config*", FULL, 1),
    "config.py": (CONSTANTS, "*/.config.py*", FULL, 1),
    "read-only .config": (CONFIGURE, "*/.config*", READ_ONLY, 1),
}
SUITE = ("checkpoint", "metrics", "read-only run", "table", "config.py")
# Files without which a run goes on.
SPARED = {"telemetry"}
Prepare = Callable[[tuple[str, ...]], tuple[Folder, dict[str, bytes]]]
CAUSE = "No space left|Read-only file system|Input/output error"


@pytest.fixture
def prepared(shared_folder, server, tmp_path, tmp_path_factory, write_faults) -> Prepare:
    """Return a function: a folder for a command, and the files that it leaves without a fault."""
    if write_faults is None:
        pytest.skip("requires a C compiler")
    scratch = tmp_path_factory.mktemp("streams")

    def done(folder: Path, *words: str) -> None:
        assert Folder(folder, server, scratch).command(*words)[0] == 0

    def train(folder: Path) -> None:
        set_up(folder, **SINGLE, **SETTINGS)
        done(folder, *TRAIN)
        done(folder, *REPORT)

    def prepare(words: tuple[str, ...]) -> tuple[Folder, dict[str, bytes]]:
        trained = shared_folder("single", train)

        def undisturbed(folder: Path) -> None:
            begin(folder, trained, words)
            done(folder, *words)

        whole = files(shared_folder(f"undisturbed {words[0].replace('/', ' ')}", undisturbed))
        begin(tmp_path, trained, words)
        return Folder(tmp_path, server, scratch), whole

    return prepare


def begin(folder: Path, trained: Path, words: tuple[str, ...]) -> None:
    """Copy the trained folder without what the command writes anew."""
    shutil.copytree(trained, folder, dirs_exist_ok=True)
    for name in REMOVED.get(words, ()):
        shutil.rmtree(folder / name)


def files(tree: Path) -> dict[str, bytes]:
    """Return the files that depend only on the configuration, without times."""
    found = {}
    for path in tree.rglob("*"):
        inside = path.relative_to(tree).parts
        # Of a run; table and report have the seconds of the runs.
        varies = inside[3] not in (*DETERMINISTIC, "export") if len(inside) > 3 else True
        if path.is_file() and not (inside[0] in ("results", "environment") and varies):
            content = path.read_bytes()
            if path.name == "summary.json":
                content = json.dumps(json.loads(content)["final"], sort_keys=True).encode()
            found[str(path.relative_to(tree))] = content
    return found


def check(name: str, prepared: Prepare, library: Path) -> None:
    """Run the command with the fault, and again without; assert what every case promises."""
    words, pattern, error, call = CASES[name]
    folder, whole = prepared(words)
    before = files(folder.path)
    fault = {"FAIL_PATH": pattern, "FAIL_AT": str(call), "FAIL_ERRNO": str(error)}
    # For the processes that it starts: the server has the library.
    fault["LD_PRELOAD"] = str(library)
    code, printed, said = folder.command(*words, **fault)
    assert "Traceback" not in printed + said
    assert code in ((0,) if name in SPARED else (1, 3)), said
    lines = re.findall(f"^(?:ERROR|FAIL|WARN) .*(?:{CAUSE}).*$", said, re.MULTILINE)
    # The sampler is named, else the file or its folder.
    assert lines and all(str(folder.path) in line or name in SPARED for line in lines), said
    # Each file is that of before or complete.
    torn = {
        file
        for file, content in files(folder.path).items()
        if content not in (before.get(file), whole.get(file)) and "metrics" not in file
    }
    assert torn == set() and list(folder.path.rglob(".*.tmp*")) == []
    code, _, said = folder.command(*words)
    assert code == 0 and list(folder.path.rglob(".*.tmp*")) == [], said
    assert files(folder.path) == whole


@pytest.mark.slow
@pytest.mark.parametrize("name", SUITE)
def test_files_that_cannot_be_written(prepared, write_faults, name):
    check(name, prepared, write_faults)


@pytest.mark.long
@pytest.mark.parametrize("name", [name for name in CASES if name not in SUITE])
def test_more_files_that_cannot_be_written(prepared, write_faults, name):
    check(name, prepared, write_faults)
