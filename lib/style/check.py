"""All checks of ``make style``, except formatting."""

import re
from collections.abc import Iterator
from pathlib import Path

from lib.errors import Problem
from lib.kconfig import Tree, list_defconfigs, read_file
from lib.rundir import RunDir
from lib.style import documents, makefile, whitespace
from lib.style.files import text_files, tree_files

# Environment variables of shells and tools that documents may mention.
_ENVIRONMENT = {
    "VIRTUAL_ENV",
    "CONDA_PREFIX",
    "CONDA_DEFAULT_ENV",
    "CUDA_VISIBLE_DEVICES",
    "HIP_VISIBLE_DEVICES",
    "OMP_NUM_THREADS",
    "HF_TOKEN",
    "WANDB_API_KEY",
    "WANDB_BASE_URL",
    "TRACKIO_DIR",
}
# Files written into the build folder, and result tables.
_WRITTEN = {".venv", ".config", ".config.old", "config.py", "defconfig", "data", "results"}
_WRITTEN |= {"table.md", "table.csv", "check.json", "trackers", "trackio"}
# Files written into the folder environment of a run.
_WRITTEN |= {"environment", "packages.txt", "python_version.txt", "interpreter.json", "hw.json"}
_WRITTEN |= {"nvidia_smi.txt", "rocm_smi.txt", "snapshot.json", "pip_freeze.txt", "uv_version.txt"}
_WRITTEN |= {"conda_version.txt", "pip_version.txt", "conda_list_explicit.txt"}
_WRITTEN |= {"reproduced", "determinism", "elsewhere.txt"}
# A vague word for "complete"; a text should list what it covers instead.
_VAGUE_WORD = re.compile(r"compre[h]ensive", re.IGNORECASE)


def style_problems(root: Path) -> list[Problem]:
    """Return every style problem of the tree's files; paths are relative to ``root``."""
    problems: list[Problem] = []
    names = known_names(root)
    for path, text in text_files(root):
        shown = path.relative_to(root)
        problems += whitespace.check(shown, text)
        problems += _vague_words(shown, text)
        if path.suffix == ".md":
            problems += documents.check(shown, text, names)
    for listed in list_defconfigs(root):
        for defconfig in listed:
            shown = defconfig.path.relative_to(root)
            problems += read_file(defconfig.path, "defconfig", str(shown)).problems
            if not defconfig.summary:
                what = "the first line is not a comment with a summary"
                problems.append(Problem(what, str(shown), code="style.missing-summary"))
    return problems


def known_names(root: Path) -> documents.Known:
    """Return the names that the tree's documents may mention."""
    text = (root / "Makefile").read_text(encoding="utf-8")
    files = [path.relative_to(root) for path in tree_files(root)]
    links = [path.relative_to(root) for path in root.iterdir() if path.is_symlink()]
    folders = {folder for path in files for folder in path.parents}
    paths = {*files, *folders, *links}
    defconfigs, fragments = list_defconfigs(root)
    tree = Tree(root)
    return documents.Known(
        targets=makefile.targets(text),
        configurations={defconfig.name for defconfig in (*defconfigs, *fragments)},
        names=makefile.settings(text) | _ENVIRONMENT | {s.name for s in tree.symbols()},
        paths={str(path) for path in paths} | {path.name for path in paths} | run_files(),
        written=_WRITTEN,
    )


def run_files() -> set[str]:
    """Return the names of the files and folders in a run's directory."""
    run = RunDir(Path())
    properties = (value for value in vars(RunDir).values() if isinstance(value, property))
    return {str(value.__get__(run)) for value in properties}


def _vague_words(path: Path, text: str) -> Iterator[Problem]:
    for number, line in enumerate(text.split("\n"), 1):
        if _VAGUE_WORD.search(line):
            what = "vague word; list what is covered"
            yield Problem(what, f"{path}:{number}", code="style.vague-word")
