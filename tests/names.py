"""Names that documents, docstrings and comments mention, and that do not exist.

Checked are the code spans and code blocks of Markdown files and of the prose of Python: make targets and
variables, symbols, files, tests. In Python, an identifier, quoted or spelled as one (CamelCase, snake_case),
is one of the tree's code. Placeholders (NAME, <study>, *.py) are skipped.
"""

import ast
import builtins
import io
import keyword
import re
import tokenize
from collections.abc import Set
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path, PurePosixPath

from lib.config.dotconfig import list_defconfigs
from lib.config.tree import KconfigTree
from lib.project import ROOT
from lib.runs.run_dir import RunDir
from tests.rules import nodes
from tests.source import MAKE_TARGETS, MAKE_VARIABLES, modules, texts

# Names of Python, and environment variables of shells and tools.
ENVIRONMENT = {
    *("TYPE_CHECKING", "VIRTUAL_ENV", "CONDA_PREFIX", "CONDA_DEFAULT_ENV", "CUDA_VISIBLE_DEVICES"),
    *("HIP_VISIBLE_DEVICES", "OMP_NUM_THREADS", "HF_TOKEN", "WANDB_API_KEY", "WANDB_BASE_URL"),
    "TRACKIO_DIR",
}
# Names of torch, transformers and GPT-2, products, values of choices, placeholders of usage lines.
WORDS = {
    *("fully_shard", "scaled_dot_product_attention", "param_names", "backward", "generate", "wpe"),
    *("create_block_mask", "AutoTokenizer", "trust_remote_code", "FakeTensorMode", "NumPy"),
    *("FlashAttention", "FlexAttention", "TensorBoard", "paper_repro", "maxout_speed"),
    *("BUILD_DIR", "RUN_DIRECTORY", "CONFIG_NAME", "NAME"),
    *vars(builtins),
    *keyword.kwlist,
}

_SPAN = re.compile(r"^```.*?^```|(?<!`)`[^`\n]+`(?!`)|``[^`\n]+``", re.DOTALL | re.MULTILINE)
# A make command, up to its end or to the two spaces before a remark.
_MAKE = re.compile(r"(?<![\w./-])make((?: (?:\w+=\"[^\"]*\"|[^\s`&|;#()]+))*)")
_SETTING = re.compile(r"(\w+)=")
_SYMBOL = re.compile(r"(?<![\w$/.<-])(?:CONFIG_)?([A-Z][A-Z0-9]*(?:_[A-Z0-9]+)+)(?![\w.>-])")
_WORD = re.compile(r"[^\s`\"'(),;:=|]+")
_SUFFIXES = (".py", ".md", ".txt", ".toml", ".json", ".jsonl", ".csv", ".yaml", "/")
_PLACEHOLDER = re.compile(r"\b(?:NAME|FRAG(?:MENT)?|DIR|PATH|PATTERN)\b|[<>*…]|\.\.\.")
# The whole span is an identifier, or a call.
_IDENTIFIER = re.compile(r"`+((?:[A-Za-z_]\w*\.)*[A-Za-z_]\w*)(?:\(.*\))?`+")
# CamelCase, or snake_case of at least three letters each, which excludes indices (p_ij).
_SPELLED = re.compile(
    r"(?<![\w/.$-])(?:[A-Z][a-z0-9]+(?:[A-Z][a-z0-9]+)+|[A-Za-z]\w{2,}(?:_[A-Za-z0-9]{3,})+)(?![\w/])"
)
# Where nodes of a syntax tree have names.
FIELDS = ("id", "attr", "arg", "name", "asname", "module")


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
    # Files and folders that the product writes; what is in such a folder is not checked.
    written: Set[str]
    # Functions and files of tests.
    tests: Set[str]
    # Names in the code of the product.
    identifiers: Set[str]


@cache
def known_names():
    """Return the names of this tree."""
    tree = (PurePosixPath(name) for name in (*texts(), "CODEX.md"))
    files = {part for path in tree for part in (path, *path.parents)}
    paths = {str(path) for path in files} | {path.name for path in files}
    run = RunDir(Path())
    of_runs = (
        value for value in vars(RunDir).values() if isinstance(value, property | cached_property)
    )
    code = [node for tree in modules().values() for node in nodes(tree)]
    strings = {n.value for n in code if isinstance(n, ast.Constant) and isinstance(n.value, str)}
    named = {name for n in code for name in map(vars(n).get, FIELDS) if isinstance(name, str)}
    # Keys and names, not the words of a message.
    words = " ".join(named | {text for text in strings if " " not in text} | modules().keys())
    sources = "".join(text for path, text in texts().items() if path.startswith("tests/"))
    tests = {PurePosixPath(name).stem for name in paths} | set(
        re.findall(r"def (test_\w+)", sources)
    )
    defconfigs, fragments = list_defconfigs(ROOT)
    symbols = {symbol.name for symbol in KconfigTree(ROOT).symbols()}
    return KnownNames(
        targets=MAKE_TARGETS,
        configurations={defconfig.name for defconfig in (*defconfigs, *fragments)},
        names=MAKE_VARIABLES | ENVIRONMENT | symbols,
        paths=paths | {str(value.__get__(run)) for value in of_runs},
        tests=tests,
        written=(strings | {".config.old"}) - paths,
        identifiers=tests | WORDS | set(re.findall(r"\w+", words)),
    )


def wrong_in_document(text, known):
    """Yield (line, kind, name) for each name in a code span that does not exist."""
    # Join continued lines into one command without changing the number of lines.
    text = re.sub(r"(?:.*\\\n)+.*", _joined, text)
    for span in _SPAN.finditer(text):
        first = text.count("\n", 0, span.start()) + 1
        for number, line in enumerate(span[0].split("\n"), first):
            for kind, name in _wrong_names(line, known):
                yield number, kind, name


def _joined(continued):
    first, *others = continued[0].split("\\\n")
    return " ".join([first.rstrip(), *map(str.strip, others)]) + "\n" * len(others)


def _wrong_names(line, known):
    for call in _MAKE.finditer(line):
        for word in re.findall(r"\w+=\"[^\"]*\"|\S+", call[1]):
            if setting := _SETTING.match(word):
                if setting[1] not in known.names:
                    yield "variable", setting[1]
            elif not word.startswith("-") and not _is_target(word, known):
                yield "target", word
    for symbol in _SYMBOL.finditer(line):
        if symbol[1] not in known.names:
            yield "symbol", symbol[1]
    for test in re.findall(r"`(test_\w+)`", line):
        if test not in known.tests:
            yield "test", test
    for word in map(str, _WORD.findall(line)):
        word = word.removeprefix("./").rstrip(".")
        is_path = word.endswith(_SUFFIXES) and not word.startswith(("/", "~", "-", "$", "+"))
        skipped = word.split("/")[0] in known.written or _PLACEHOLDER.search(word)
        if is_path and not skipped and word.rstrip("/") not in known.paths:
            yield "path", word


def _is_target(word, known):
    if word in known.targets or _PLACEHOLDER.search(word):
        return True
    name = word.removeprefix("defconfig-")
    return name != word and set(name.split("+")) <= known.configurations


def wrong_in_module(source, tree, known):
    """Yield (line, kind, name) for each name in a docstring or comment that does not exist."""
    exist = known.identifiers | known.names
    for first, text in _prose(source, tree):
        for number, kind, name in wrong_in_document(text, known):
            if kind != "symbol" or name not in exist:
                yield first + number - 1, kind, name
        spans = (_IDENTIFIER.fullmatch(span[0]) for span in _SPAN.finditer(text))
        quoted = [span[1] for span in spans if span and not span[1].endswith(_SUFFIXES)]
        unquoted = _SPAN.sub(lambda span: " " * len(span[0]), text)
        for name in quoted + _SPELLED.findall(unquoted):
            if not name.startswith("torch.") and name.rpartition(".")[2] not in exist:
                yield first + text.count("\n", 0, text.index(name)), "identifier", name


def _prose(source, tree):
    """Yield (line, text) of each docstring and comment."""
    documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    for node in nodes(tree):
        if isinstance(node, documented) and ast.get_docstring(node) is not None:
            yield node.body[0].lineno, node.body[0].value.value
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string


def wrong_names():
    """Return ``path:line: kind name`` for each wrong name in the documents and product modules."""
    known, wrong = known_names(), []
    for path, text in texts().items():
        if path.endswith(".md"):
            found = wrong_in_document(text, known)
        else:
            found = wrong_in_module(text, modules()[path], known) if path in modules() else ()
        wrong += [f"{path}:{line}: {kind} {name}" for line, kind, name in found]
    return wrong
