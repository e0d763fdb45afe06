"""Tests of the architecture's invariants; each failure lists the offenders."""

import ast
import dataclasses
import functools
import importlib
import re
import subprocess
import sys
import typing
from collections import defaultdict
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from gpt2 import lora, norm
from gpt2.attention import attention
from gpt2.attention import reference as attention_reference
from gpt2.config import Config
from gpt2.mlp import activations, mlp
from lib.config.check import definition_location, is_settable, prompt_node
from lib.config.field import kconfig_fields
from lib.config.registry import Registry
from lib.config.tree import KconfigTree, item_type
from lib.optim import build as optimizers
from lib.optim import reference as optim_reference
from lib.optim.options import AdamwpruneOptions
from lib.project import ROOT
from lib.pruning import pruners
from lib.pruning import reference as pruning_reference
from lib.pruning.options import NoneOptions
from lib.tracking import trackers
from lib.tracking.options import TRACKERS
from tests import names, rules
from tests.source import module_name, module_paths, modules, texts

# A choice that only sets the defaults of other symbols has no field.
PRESETS = {"MODEL_SIZE"}
CODE = re.compile(r"[a-z]+(-[a-z]+)*\.[a-z0-9]+(-[a-z0-9]+)*")


def offenders(rule):
    return [f"{path}:{what}" for path, tree in modules().items() for what in rule(tree)]


def loaded_by(path):
    """Return every name that importing ``path`` imports, directly or through modules of the tree."""
    seen, waiting = set(), [path]
    while waiting:
        found = rules.imports(modules()[waiting.pop()], at_import=True)
        # Importing a.b.c runs a and a.b first.
        found |= {name[: m.start()] for name in found for m in re.finditer(r"\.", name)}
        waiting += [module_paths()[name] for name in found - seen if name in module_paths()]
        seen |= found
    return seen


def test_i1_files_and_functions_are_short():
    limits = {
        path: rules.MAX_SCRIPT_LINES if path.startswith("scripts/") else rules.MAX_FILE_LINES
        for path in texts()
    }
    lines = {path: text.count("\n") for path, text in texts().items()}
    long = [f"{path}: {lines[path]} lines" for path in lines if lines[path] > limits[path]]
    assert long + offenders(rules.long_functions) == []


def test_i1_imports_have_no_cycle():
    graph = rules.import_graph({name: modules()[path] for name, path in module_paths().items()})
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))


def test_i1_public_class_names_are_unique():
    named = defaultdict(set)
    for path, tree in modules().items():
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                named[node.name].add(path)
    assert {name: paths for name, paths in named.items() if len(paths) > 1} == {}


def test_i2_imports_point_one_way():
    layers = {"lib": {"gpt2", "scripts"}, "gpt2": {"scripts"}}
    upward = [
        f"{path}: {name}"
        for path, tree in modules().items()
        for name in rules.imports(tree)
        if name.split(".")[0] in layers.get(path.split("/")[0], ())
    ]
    assert upward == []


def test_i2_options_load_no_torch_and_a_model_no_configuration():
    options = [path for path in modules() if path.endswith("/options.py")]
    heavy = {path: loaded_by(path) & {"torch", "transformers"} for path in options}
    assert {path: names for path, names in heavy.items() if names} == {}
    assert "gpt2.config" not in loaded_by("gpt2/model.py")
    reports = {name for name in loaded_by("gpt2/config.py") if name.startswith("lib.report.")}
    assert {name for name in reports if name in module_paths()} == {"lib.report.options"}


def test_i2_commands_run_without_torch(tmp_path):
    """Checked in a process, to include imports inside functions."""
    lines = ["import sys", "from lib.kablate import call"]
    words = (["defconfig", "gpt2-ratio-small"], ["constants"], ["why", "SEED"], ["plan"])
    for name, *more in (*words, ["status"], ["report"], ["ls"], ["watch"]):
        lines.append(f"assert call({name!r}, {[*more, '-O', str(tmp_path)]}) == 0, {name!r}")
    lines += ["import gpt2.records.verify", "import gpt2.running.trained_models"]
    lines.append("assert 'torch' not in sys.modules")
    done = subprocess.run(
        [sys.executable, "-c", "\n".join(lines)], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]


@functools.cache
def registries():
    """Return every registry of the tree."""
    names = (module_name(path) for path in modules() if " = Registry(" in texts()[path])
    values = [value for name in names for value in vars(importlib.import_module(name)).values()]
    return {value for value in values if isinstance(value, Registry)}


def test_i8_every_part_has_a_module_and_a_formula():
    """In the tables beside the modules and the references, by the type of the options."""
    parts = {registry.options(name) for registry in registries() for name in registry}
    # Trackers compute nothing, and a run without pruning has no scores.
    of_no_formula = {*map(TRACKERS.options, TRACKERS), NoneOptions}
    modules_of = [*attention.MODULES, *mlp.MODULES, *activations.FUNCTIONS, *optimizers.MODULES]
    modules_of += [*norm.MODULES, *lora.MODULES, *pruners.MODULES, *trackers.MODULES]
    formulas = (attention_reference, mlp, activations, norm, lora, optim_reference)
    formulas = (*formulas, pruning_reference)
    formulas_of = [part for module in formulas for part in module.REFERENCES]
    # AdamWPrune is its base.
    assert parts - {AdamwpruneOptions} == set(modules_of)
    assert parts - {AdamwpruneOptions} - of_no_formula == set(formulas_of)


def config_classes():
    """Return Config and every dataclass that one of its fields or a registry may contain."""
    found = {Config} | {r.options(name) for r in registries() for name in r}
    waiting = list(found)
    while waiting:
        hints = typing.get_type_hints(waiting.pop()).values()
        new = {hint for hint in hints if dataclasses.is_dataclass(hint)} - found
        found |= new
        waiting += new
    return found


@functools.cache
def readers():
    """Return the fields bound to each symbol and the registries it selects from.

    A field belongs to the class that declares it, because alternatives may inherit it.
    """
    found = defaultdict(set)
    for cls in config_classes():
        for field in kconfig_fields(cls):
            owners = [c for c in cls.__mro__ if field.name in vars(c).get("__annotations__", ())]
            found[field.metadata["symbol"]].add(f"{owners[-1].__qualname__}.{field.name}")
    for registry in registries():
        for name in registry.symbols():
            found[name].add(f"registry of {registry.kind}s")
    return found


def test_i3_every_symbol_is_read_once_and_every_field_has_one():
    symbols = {s.name for s in KconfigTree().items() if is_settable(s)}
    unread = symbols - set(readers()) - PRESETS
    twice = {name: sorted(who) for name, who in readers().items() if len(who) > 1}
    unknown = {name: sorted(who) for name, who in readers().items() if name not in symbols}
    assert (unread, twice, unknown) == (set(), {}, {})


def test_i3_every_symbol_has_help_a_default_and_bounds():
    incomplete = []
    for item in filter(is_settable, KconfigTree().items()):
        lacks = {
            "a name": not item.name,
            "help": not prompt_node(item).help,
            "a default": not item.defaults,
            "a range": item_type(item) == "int" and not item.ranges,
            "a supported type": item_type(item) not in ("choice", "bool", "int", "string"),
        }
        where = f"{definition_location(item)}: {item.name}"
        incomplete += [f"{where} has not {what}" for what, lacking in lacks.items() if lacking]
    assert incomplete == []


@pytest.mark.slow
def test_i11_no_shortcuts():
    vague = {"utils", "util", "common", "helpers", "misc"}
    named = [path for path in modules() if vague & {Path(path).stem, Path(path).parent.name}]
    assert offenders(rules.dynamic_attributes) + named == []


def command_lines():
    found = [path for path in modules() if re.match(r"scripts/[a-z]", path)]
    return [*found, "gpt2/train_ra_mla.py"]


def test_i12_every_script_is_documented():
    documents = "".join(text for path, text in texts().items() if path.endswith(".md"))
    lost = [path for path in command_lines() if path not in documents]
    assert lost == []


def test_i12_every_script_checks_its_interpreter_first():
    without = [p for p in command_lines() if "\nimport _start\n" not in texts()[p]]
    assert without == []


def test_i15_every_code_is_well_formed():
    """Most problems are raised in few of the tests, so that an assertion is not enough."""
    codes = [
        (path, word.value.value)
        for path, tree in modules().items()
        for call in rules.calls(tree)
        if isinstance(call.func, ast.Name) and call.func.id == "Problem"
        for word in call.keywords
        if word.arg == "code" and isinstance(word.value, ast.Constant)
    ]
    malformed = [f"{path}: {code}" for path, code in codes if not CODE.fullmatch(str(code))]
    assert len(codes) > 150 and malformed == []


def test_i15_ruff_finds_nothing():
    """Docstrings (I13), prints and code from data (I11) are its rules too.

    The worked example of a mechanism runs black and mypy on the same files.
    """
    command = [sys.executable, "-m", "ruff", "check", "--quiet", "--output-format=concise"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.stdout + done.stderr == ""


def test_i15_text_does_not_depend_on_the_locale():
    assert offenders(rules.locale_encodings) == []


@pytest.mark.slow
def test_documents_and_docstrings_mention_only_what_exists():
    assert names.wrong_names() == []


def test_whitespace_is_clean():
    command = [sys.executable, ROOT / "scripts" / "fix_whitespace_issues.py", "--check"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
