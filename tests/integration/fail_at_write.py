"""Run commands whose writes to one file fail, then again without the fault; run under write_faults.c.

``fail_at_write.py FOLDER NAME...`` prints one JSON line: for each named case the exit codes and messages
of both, the half-written files, and whether the results have the bytes of undisturbed commands.
"""

import errno
import json
import os
import shutil
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

from tests.fuzz.harness import Outcome, run_forked
from tests.integration.kill_at_write import DETERMINISTIC, Training

_RUN = "*/run-s1-????????"


@dataclass(frozen=True)
class Case:
    """A command, and the files that it cannot write from the call ``at`` on."""

    words: tuple[str, ...]
    path: str
    at: int = 1
    code: int = errno.ENOSPC


_TRAIN, _REPORT, _EXPORT = ("gpt2.train_ra_mla", "--in-process"), ("report",), ("export", "run")
_CONFIGURE = ("defconfig", "gpt2-ratio-small")
CASES: dict[str, Case] = {
    "checkpoint": Case(_TRAIN, "*/checkpoints/*", 9),
    "metrics": Case(_TRAIN, "*/metrics.jsonl", 9),
    "timing": Case(_TRAIN, "*/timing.jsonl", 4),
    "log": Case(_TRAIN, "*/logs.txt", 3),
    "status": Case(_TRAIN, f"{_RUN}/.status.json.*", 4),
    "manifest": Case(_TRAIN, f"{_RUN}/.manifest.json.*", 3),
    "weights": Case(_TRAIN, f"{_RUN}/.model.safetensors.*"),
    "per-document rows": Case(_TRAIN, f"{_RUN}/.per_query.csv.*"),
    "summary": Case(_TRAIN, f"{_RUN}/.summary.json.*"),
    "configuration of the run": Case(_TRAIN, f"{_RUN}/*resolved_config.yaml*"),
    "heartbeat": Case(_TRAIN, "*/heartbeat_rank0.jsonl", 2),
    "whole disk": Case(_TRAIN, "*/results/*", 60),
    "broken disk": Case(_TRAIN, "*/results/*", 60, errno.EIO),
    "read-only run": Case(_TRAIN, f"{_RUN}/*", 50, errno.EROFS),
    "read-only results": Case(_TRAIN, "*/results*", 1, errno.EROFS),
    "telemetry": Case(_TRAIN, "*/telemetry.jsonl"),
    "snapshot": Case(_TRAIN, "*/environment/*"),
    "whole disk under make": Case(("all",), "*/results/*", 60),
    "log under make": Case(("all",), "*/logs.txt", 2),
    "data": Case(("data",), "*/data/*", 3),
    "read-only data": Case(("data",), "*/data*", 1, errno.EROFS),
    "table": Case(_REPORT, "*/single/.table.md.*"),
    "report": Case(_REPORT, "*/single/.report.html.*"),
    "read-only report": Case(_REPORT, "*/single/*", 1, errno.EROFS),
    "export": Case(_EXPORT, "*.export.*", 2),
    "read-only export": Case(_EXPORT, "*export*", 1, errno.EROFS),
    ".config": Case(_CONFIGURE, "*/.config*"),
    "config.py": Case(("constants",), "*/.config.py*"),
    "read-only .config": Case(_CONFIGURE, "*/.config*", 1, errno.EROFS),
}


class Disturbed:
    """A trained folder, whose files are restored before each case."""

    def __init__(self, folder: Path) -> None:
        self.training = Training(folder, 1)
        self.tree = self.training.tree
        self._whole: dict[tuple[str, ...], dict[str, bytes]] = {}
        self.spare = folder / "spare"
        assert self.run(_TRAIN).code == 0
        assert self.run(_REPORT).code == 0
        shutil.copytree(self.tree, self.spare)

    def run(self, words: tuple[str, ...]) -> Outcome:
        """Run a command in a fork."""
        main = self.training.mains[words[0]]
        return run_forked(main, [*words, "-O", str(self.tree)], self.training.folder)

    def files(self) -> dict[str, bytes]:
        """Return the files that depend only on the configuration, without times."""
        paths = [p for p in self.tree.rglob("*") if p.is_file() and not self._varies(p)]
        return {str(path.relative_to(self.tree)): self._content(path) for path in paths}

    def _varies(self, path: Path) -> bool:
        inside = path.relative_to(self.tree).parts
        if inside[0] == "results" and len(inside) > 3:
            return inside[3] not in (*DETERMINISTIC, "export")
        # Table and report have the seconds of the runs; a report's stamp and index the times of files.
        return inside[0] in ("environment", "results") or path.name.startswith(
            ("report-", "results-")
        )

    def _content(self, path: Path) -> bytes:
        content = path.read_bytes()
        if path.name != "summary.json":
            return content
        return json.dumps(json.loads(content)["final"], sort_keys=True).encode()

    def leftovers(self) -> list[str]:
        """Return the temporary files of commands that have ended."""
        return [str(path.relative_to(self.tree)) for path in self.tree.rglob(".*.tmp*")]

    def check(self, case: Case) -> dict[str, object]:
        """Run the command with the fault and again without; return what happened."""
        self._begin(case)
        before = self.files()
        fault = {"FAIL_PATH": case.path, "FAIL_AT": str(case.at), "FAIL_ERRNO": str(case.code)}
        os.environ.update(fault)
        try:
            disturbed = self.run(case.words)
        finally:
            for name in fault:
                del os.environ[name]
        after, leftovers = self.files(), self.leftovers()
        status = [json.loads(p.read_text()) for p in self.tree.glob("results/single/*/status.json")]
        again = self.run(case.words)
        whole = self._undisturbed(case.words)
        return {
            "first": asdict(disturbed),
            "again": asdict(again),
            "state": status[0]["state"] if status else None,
            # Files that are neither those of before nor complete.
            "torn": [
                name
                for name, content in after.items()
                if content not in (before.get(name), whole.get(name)) and "metrics" not in name
            ],
            "leftovers": leftovers + self.leftovers(),
            "same": self.files() == whole,
        }

    def _begin(self, case: Case) -> None:
        shutil.rmtree(self.tree)
        shutil.copytree(self.spare, self.tree)
        if case.words[0] in (_TRAIN[0], "all"):
            shutil.rmtree(self.tree / "results")
            shutil.rmtree(self.tree / "environment")
        elif case.words[0] == "data":
            shutil.rmtree(self.tree / "data")

    def _undisturbed(self, words: tuple[str, ...]) -> dict[str, bytes]:
        """Return the files after a command on an undisturbed folder."""
        if words in self._whole:
            return self._whole[words]
        disturbed = self.tree.with_name("disturbed")
        self.tree.rename(disturbed)
        shutil.copytree(self.spare, self.tree)
        assert self.run(words).code == 0
        self._whole[words] = self.files()
        shutil.rmtree(self.tree)
        disturbed.rename(self.tree)
        return self._whole[words]


def main() -> None:
    """Run the command line."""
    folder = Disturbed(Path(sys.argv[1]))
    print(json.dumps({name: folder.check(CASES[name]) for name in sys.argv[2:] or CASES}))


if __name__ == "__main__":
    main()
