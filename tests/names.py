"""Names that documents, docstrings and comments mention, and that do not exist.

Checked are the code spans and code blocks of Markdown files: make targets and variables, symbols,
files, tests. In Python, a quoted identifier is defined or used in its module, in one that it imports, or in
its package, and the spelling of an unquoted word makes it an identifier of the tree (CamelCase,
snake_case). Placeholders (NAME, <study>, *.py) are skipped.
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
from tests.rules import imports, nodes
from tests.source import MAKE_TARGETS, MAKE_VARIABLES, module_paths, modules, texts

# Names of Python, and environment variables of shells and tools.
ENVIRONMENT = {
    *("TYPE_CHECKING", "VIRTUAL_ENV", "CONDA_PREFIX", "CONDA_DEFAULT_ENV", "CUDA_VISIBLE_DEVICES"),
    *("HIP_VISIBLE_DEVICES", "OMP_NUM_THREADS", "HF_TOKEN", "WANDB_API_KEY", "WANDB_BASE_URL"),
    "TRACKIO_DIR",
}
# Names of torch, transformers and GPT-2, products, values of choices, placeholders of usage lines.
WORDS = {
    *("fully_shard", "scaled_dot_product_attention", "param_names", "backward", "generate", "wpe"),
    "create_block_mask",
    *("AutoTokenizer", "trust_remote_code", "FakeTensorMode", "NumPy"),
    *("FlashAttention", "FlexAttention", "TensorBoard", "paper_repro", "maxout_speed"),
    *("BUILD_DIR", "RUN_DIRECTORY", "CONFIG_NAME", "NAME"),
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
_IDENTIFIER = re.compile(r"`+([A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*)(\(.*\))?`+")
# CamelCase, or snake_case of at least three letters each, which excludes indices (p_ij).
_SPELLED = re.compile(
    r"(?<![\w/.$-])(?:[A-Z][a-z0-9]+(?:[A-Z][a-z0-9]+)+|[A-Za-z]\w{2,}(?:_[A-Za-z0-9]{3,})+)(?![\w/])"
)
# Where nodes of a syntax tree have names.
FIELDS = ("id", "attr", "arg", "name")


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


@cache
def known_names():
    """Return the names of this tree."""
    tree = (PurePosixPath(name) for name in (*texts(), "CODEX.md"))
    paths = {part for path in tree for part in (path, *path.parents)}
    run = RunDir(Path())
    of_runs = (
        value for value in vars(RunDir).values() if isinstance(value, property | cached_property)
    )
    strings = {
        node.value
        for parsed in modules().values()
        for node in nodes(parsed)
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }
    sources = (text for path, text in texts().items() if path.startswith("tests/"))
    tests = {name for text in sources for name in re.findall(r"\bdef (test_\w+)", text)}
    names_of_tree = {str(path) for path in paths} | {path.name for path in paths}
    defconfigs, fragments = list_defconfigs(ROOT)
    return KnownNames(
        targets=MAKE_TARGETS,
        configurations={defconfig.name for defconfig in (*defconfigs, *fragments)},
        names=MAKE_VARIABLES
        | ENVIRONMENT
        | {symbol.name for symbol in KconfigTree(ROOT).symbols()},
        paths=names_of_tree | {str(value.__get__(run)) for value in of_runs},
        tests=tests | {PurePosixPath(name).stem for name in names_of_tree},
        written=(strings | {".config.old"}) - names_of_tree,
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


def wrong_in_module(source, tree, near, anywhere, known):
    """Yield (line, kind, name) for each name in a docstring or comment that does not exist.

    ``near`` are the identifiers of the module and its surroundings, ``anywhere`` those of the tree.
    """
    for first, text in _prose(source, tree):
        for number, kind, name in wrong_in_document(text, known):
            if kind != "symbol" or name not in near | WORDS:
                yield first + number - 1, kind, name
        for span in _SPAN.finditer(text):
            identifier = _IDENTIFIER.fullmatch(span[0])
            name = identifier[1] if identifier else ""
            called = name + "()" if identifier and identifier[2] else name
            if name and not name.endswith(_SUFFIXES) and not _is_identifier(called, near, known):
                yield first + text.count("\n", 0, span.start()), "identifier", name
        unquoted = _SPAN.sub(lambda span: " " * len(span[0]), text)
        for word in _SPELLED.finditer(unquoted):
            if not any(word[0] in names for names in (anywhere, known.names, WORDS)):
                yield first + text.count("\n", 0, word.start()), "identifier", word[0]


def _is_identifier(name, near, known):
    package, _, last = name.rpartition(".")
    word = last.removesuffix("()")
    if package.split(".")[0] in ("lib", "gpt2", "scripts"):
        path = module_paths().get(package)
        return name in module_paths() or (path is not None and last in identifiers(path))
    return (
        last in near
        or any(word in names for names in (known.names, WORDS, vars(builtins)))
        or name.startswith("torch.")
        or keyword.iskeyword(name)
    )


def _prose(source, tree):
    """Yield (line, text) of each docstring and comment."""
    for node in nodes(tree):
        if docstring := _docstring(node):
            yield docstring.lineno, docstring.value
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string


def _docstring(node):
    """Return the constant of a node's docstring, if any."""
    documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    if isinstance(node, documented) and ast.get_docstring(node) is not None:
        return node.body[0].value
    return None


@cache
def identifiers(path):
    """Return the identifiers in a module's code, with "()" those of functions too."""
    docstrings = {id(_docstring(node)) for node in nodes(modules()[path])}
    found = set(path.removesuffix(".py").split("/"))
    for node in nodes(modules()[path]):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            # Keys and names, not the words of a message.
            is_name = " " not in node.value and id(node) not in docstrings
            found |= set(re.findall(r"\w+", node.value)) if is_name else set()
        elif isinstance(node, ast.alias):
            found |= {*node.name.split("."), node.asname or "", f"{node.asname or node.name}()"}
        else:
            words = {name for name in map(vars(node).get, FIELDS) if isinstance(name, str)}
            callable_ = isinstance(node, ast.FunctionDef | ast.ClassDef)
            found |= words | ({f"{word}()" for word in words} if callable_ else set())
            if isinstance(node, ast.Call):
                found.add(ast.unparse(node.func).rpartition(".")[2] + "()")
    return found


@cache
def all_identifiers():
    """Return the identifiers of all product modules, and the names of test modules."""
    of_tests = {PurePosixPath(path).stem for path in texts() if path.startswith("tests/")}
    return of_tests.union(*map(identifiers, modules()))


def near_identifiers(path):
    """Return the identifiers of a module, of those that it imports, and of its package."""
    imported = {module_paths().get(name) for name in imports(modules()[path])} - {None}
    folder = str(PurePosixPath(path).parent)
    siblings = {p for p in modules() if "/" in folder and str(PurePosixPath(p).parent) == folder}
    return set().union(*map(identifiers, {path} | imported | siblings))


def wrong_names():
    """Return ``path:line: kind name`` for each wrong name in the documents and product modules."""
    known = known_names()
    wrong = []
    for path, text in texts().items():
        if path.endswith(".md"):
            wrong += [f"{path}:{n}: {kind} {x}" for n, kind, x in wrong_in_document(text, known)]
        elif path in modules():
            found = wrong_in_module(
                text, modules()[path], near_identifiers(path), all_identifiers(), known
            )
            wrong += [f"{path}:{n}: {kind} {x}" for n, kind, x in found]
    return wrong
