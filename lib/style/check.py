"""The checks of ``make style``: tools for Python files, and the rules that no tool has.

The rules concern whitespace of all text files, names in documents, and defconfigs.
"""

import re
import subprocess
from collections.abc import Iterator, Set
from dataclasses import dataclass
from pathlib import Path

from lib.config.dotconfig import list_defconfigs
from lib.config.layers import read_file
from lib.config.tree import KconfigTree
from lib.errors import ConfigError, Problem
from lib.project import python_module_command
from lib.runs.run_dir import RunDir

# Text files of the tree, as listed by git.


def tree_files(root: Path) -> list[Path]:
    """Return the files that git tracks or could add, without symlinks.

    Raises ConfigError if git cannot list the files.
    """
    command = ["git", "-C", str(root), "ls-files", "-z", "-co", "--exclude-standard"]
    listed = subprocess.run(
        command, capture_output=True, encoding="utf-8", errors="replace", check=False
    )
    if listed.returncode:
        what = f"git cannot list the files: {listed.stderr.strip()}"
        raise ConfigError(Problem(what, code="git.failed"))
    paths = (root / name for name in sorted(set(listed.stdout.split("\0")) - {""}))
    return [path for path in paths if path.is_file() and not path.is_symlink()]


def text_files(root: Path) -> Iterator[tuple[Path, str]]:
    """Yield every UTF-8 text file with its text; line endings are not translated."""
    for path in tree_files(root):
        data = path.read_bytes()
        if b"\0" not in data:
            yield path, data.decode("utf-8")


# Targets and variables of the Makefile.


_TARGETS = re.compile(r"^([a-z][a-z-]*):(?!=)", re.MULTILINE)
_SETTINGS = re.compile(r"^SETTINGS [:+]= (.*)$", re.MULTILINE)


def makefile_targets(makefile: str) -> set[str]:
    """Return the explicit targets, without pattern rules and generated targets."""
    return set(_TARGETS.findall(makefile))


def makefile_variables(makefile: str) -> set[str]:
    """Return the variables that a user may set."""
    return set(" ".join(_SETTINGS.findall(makefile)).split())


# Whitespace rules: no trailing whitespace, one final newline, tabs only in Kconfig and make.


_LEADING_BLANKS = re.compile(r"^(?: {8})+", re.MULTILINE)


def uses_tabs(path: Path) -> bool:
    """Return whether lines are indented with tabs: Kconfig files (as in Linux) and Makefiles."""
    return path.name.startswith(("Kconfig", "Makefile"))


def fix_whitespace(path: Path, text: str) -> str:
    """Return ``text`` with its whitespace corrected."""
    lines = [line.rstrip(" \t\r") for line in text.split("\n")]
    text = "\n".join(lines).rstrip("\n") + "\n" if text.strip() else ""
    if uses_tabs(path):
        return _LEADING_BLANKS.sub(lambda blanks: "\t" * (len(blanks[0]) // 8), text)
    return text.expandtabs(4) if path.suffix == ".py" else text


def check_whitespace(path: Path, text: str) -> Iterator[Problem]:
    """Yield one problem for each line that ``fixed`` would change, and for the end of the file."""
    for number, line in enumerate(text.split("\n"), 1):
        where = f"{path}:{number}"
        if line != line.rstrip(" \t\r"):
            yield Problem("trailing whitespace", where, code="style.trailing-whitespace")
        if uses_tabs(path) and line.startswith(" " * 8):
            yield Problem("indented with spaces (expected tabs)", where, code="style.indentation")
        if path.suffix == ".py" and "\t" in line:
            yield Problem("tab character", where, code="style.tab")
    if text and text != text.rstrip("\n") + "\n":
        what = "missing final newline, or empty lines at the end"
        yield Problem(what, str(path), code="style.end-of-file")


# Check that names in documents exist: make targets and variables, symbols, files.
#
# Only code spans and code blocks of Markdown files are checked. Placeholders (NAME, <study>, *.py)
# are skipped.


_CODE = re.compile(r"^```.*?^```|`[^`\n]+`", re.DOTALL | re.MULTILINE)
# A make command, up to its end or to the two spaces before a remark.
_MAKE = re.compile(r"(?<![\w./-])make((?: (?:\w+=\"[^\"]*\"|[^\s`&|;#()]+))*)")
_SETTING = re.compile(r"(\w+)=")
_SYMBOL = re.compile(r"(?<![\w$/.<-])(?:CONFIG_)?([A-Z][A-Z0-9]*(?:_[A-Z0-9]+)+)(?![\w.>-])")
_WORD = re.compile(r"[^\s`\"'(),;:=|]+")
_SUFFIXES = (".py", ".md", ".txt", ".toml", ".json", ".jsonl", ".csv", ".yaml", "/")
_PLACEHOLDER = re.compile(r"\b(?:NAME|FRAG(?:MENT)?|DIR|PATH|PATTERN)\b|[<>*…]|\.\.\.")


@dataclass(frozen=True)
class KnownNames:
    """Names that a document may mention."""

    # make targets, except those for defconfigs and their combinations.
    targets: Set[str]
    # Defconfigs and fragments.
    configurations: Set[str]
    # Variables of make, environment variables, and Kconfig symbols.
    names: Set[str]
    # Files and folders of the tree (by path and by name), and the files of a run.
    paths: Set[str]
    # Generated files and folders; the contents of such folders are not checked.
    written: Set[str]


def check_names(path: Path, text: str, known: KnownNames) -> Iterator[Problem]:
    """Yield one problem for each name that does not exist."""
    # Join continued lines into one command without changing the number of lines.
    text = re.sub(r"(?:.*\\\n)+.*", _joined, text)
    for code in _CODE.finditer(text):
        for number, line in enumerate(code[0].split("\n"), text.count("\n", 0, code.start()) + 1):
            where = f"{path}:{number}"
            for word in _variables(line, known):
                yield Problem(f"unknown make variable {word}", where, code="style.unknown-variable")
            for word in _targets(line, known):
                yield Problem(f"unknown make target {word}", where, code="style.unknown-target")
            for word in _symbols(line, known):
                what = f"unknown symbol or variable {word}"
                yield Problem(what, where, code="style.unknown-symbol")
            for word in _paths(line, known):
                yield Problem(f"no such file or folder {word}", where, code="style.unknown-path")


def _joined(continued: re.Match[str]) -> str:
    first, *others = continued[0].split("\\\n")
    return " ".join([first.rstrip(), *map(str.strip, others)]) + "\n" * len(others)


def _words(line: str) -> Iterator[str]:
    """Yield the arguments of every make command in ``line``."""
    for call in _MAKE.finditer(line):
        yield from re.findall(r"\w+=\"[^\"]*\"|\S+", call[1])


def _variables(line: str, known: KnownNames) -> Iterator[str]:
    settings = (match[1] for match in map(_SETTING.match, _words(line)) if match)
    return (name for name in settings if name not in known.names)


def _targets(line: str, known: KnownNames) -> Iterator[str]:
    for word in _words(line):
        if not _SETTING.match(word) and not word.startswith("-") and not _is_target(word, known):
            yield word


def _is_target(word: str, known: KnownNames) -> bool:
    if word in known.targets or _PLACEHOLDER.search(word):
        return True
    name = word.removeprefix("defconfig-")
    return name != word and set(name.split("+")) <= known.configurations


def _symbols(line: str, known: KnownNames) -> Iterator[str]:
    for symbol in _SYMBOL.finditer(line):
        if symbol[1] not in known.names:
            yield symbol[1]


def _paths(line: str, known: KnownNames) -> Iterator[str]:
    for word in map(str, _WORD.findall(line)):
        word = word.removeprefix("./").rstrip(".")
        is_path = word.endswith(_SUFFIXES) and not word.startswith(("/", "~", "-", "$", "+"))
        written = word.split("/")[0] in known.written or _PLACEHOLDER.search(word)
        if is_path and not written and word.rstrip("/") not in known.paths:
            yield word


# The tools that check Python files; their settings are in pyproject.toml.


TOOLS = {
    # Without --diff, which ignores the cache.
    "black": ("--check", "."),
    "ruff": ("check", "--quiet", "--output-format=concise"),
    "mypy": ("--no-error-summary",),
}


def run_tool(name: str, root: Path) -> str:
    """Run a tool over the tree and return its report, "" if there is no problem."""
    command = python_module_command(name, *TOOLS[name])
    done = subprocess.run(
        command, cwd=root, capture_output=True, encoding="utf-8", errors="replace", check=False
    )
    return (done.stdout + done.stderr).strip() if done.returncode else ""


# Names of Python, and environment variables of shells and tools, that documents may mention.
_ENVIRONMENT = {
    "TYPE_CHECKING",
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
_WRITTEN |= {
    "claims.tex",
    "claims.md",
    "claims.toml",
    "table.md",
    "table.csv",
    "verdicts.json",
    "check.json",
    "trackers",
    "trackio",
}
_WRITTEN |= {"report.html", "figures"}
_WRITTEN |= {"mutation-test.json", "mutation-baseline.json"}
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
        problems += check_whitespace(shown, text)
        problems += _vague_words(shown, text)
        if path.suffix == ".md":
            problems += check_names(shown, text, names)
    for listed in list_defconfigs(root):
        for defconfig in listed:
            shown = defconfig.path.relative_to(root)
            problems += read_file(defconfig.path, "defconfig", str(shown)).problems
            if not defconfig.summary:
                what = "the first line is not a comment with a summary"
                problems.append(Problem(what, str(shown), code="style.missing-summary"))
    return problems


def known_names(root: Path) -> KnownNames:
    """Return the names that the tree's documents may mention."""
    text = (root / "Makefile").read_text(encoding="utf-8")
    files = [path.relative_to(root) for path in tree_files(root)]
    links = [path.relative_to(root) for path in root.iterdir() if path.is_symlink()]
    folders = {folder for path in files for folder in path.parents}
    paths = {*files, *folders, *links}
    defconfigs, fragments = list_defconfigs(root)
    tree = KconfigTree(root)
    return KnownNames(
        targets=makefile_targets(text),
        configurations={defconfig.name for defconfig in (*defconfigs, *fragments)},
        names=makefile_variables(text) | _ENVIRONMENT | {s.name for s in tree.symbols()},
        paths={str(path) for path in paths} | {path.name for path in paths} | run_directory_names(),
        written=_WRITTEN,
    )


def run_directory_names() -> set[str]:
    """Return the names of the files and folders in a run's directory."""
    run = RunDir(Path())
    properties = (value for value in vars(RunDir).values() if isinstance(value, property))
    return {str(value.__get__(run)) for value in properties}


def _vague_words(path: Path, text: str) -> Iterator[Problem]:
    for number, line in enumerate(text.split("\n"), 1):
        if _VAGUE_WORD.search(line):
            what = "vague word; list what is covered"
            yield Problem(what, f"{path}:{number}", code="style.vague-word")
