"""Results do not depend on folder, time, locale and other properties of the system."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

from lib.project import ROOT
from lib.runs.run_dir import RunDir
from tests.integration.conftest import IN_PROCESS, SINGLE

# Dropout, two layers, evaluations and checkpoints on the way.
TINY = {
    **SINGLE,
    "MAX_ITERS": 12,
    "EVAL_INTERVAL": 5,
    "CHECKPOINT_INTERVAL": 4,
    "EVAL_TOKENS": 100,
}


def trained(folder: Path, cwd: Path, umask: int, **variables: str) -> dict[str, bytes]:
    """Train in ``folder``; return the files that must not depend on the environment."""
    names = ("PATH", "HOME", "ALLOW_DIRTY", "OMP_NUM_THREADS")
    kept = {name: os.environ[name] for name in names}
    script, option = IN_PROCESS
    done = subprocess.run(
        [sys.executable, str(ROOT / script), option, "-O", str(folder)],
        cwd=cwd,
        env=kept | variables,
        umask=umask,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    (path,) = (folder / "results/single").glob("run-s1-*")
    run = RunDir(path)
    core = (run.metrics, run.per_query, run.weights, run.sample, run.resolved_config)
    return {file.name: file.read_bytes() for file in core}


def test_folder_locale_and_time_do_not_change_results(build, tmp_path):
    here = build(**TINY).path
    there = tmp_path / "elsewhere, ünder another näme"
    there.mkdir()
    for name in (".config", "config.py", ".config.origins", "data", "text"):
        source, copy = here / name, there / name
        shutil.copytree(source, copy) if source.is_dir() else shutil.copy(source, copy)
    first = trained(here, ROOT, 0o022, LC_ALL="C", TZ="UTC", PYTHONHASHSEED="0")
    second = trained(
        there,
        tmp_path,
        0o077,
        LC_ALL="C.UTF-8",
        LANG="tr_TR.UTF-8",
        TZ="Asia/Kathmandu",
        PYTHONHASHSEED="99",
        COLUMNS="20",
    )
    assert first == second
    assert [name for name in first if str(tmp_path).encode() in first[name]] == []
