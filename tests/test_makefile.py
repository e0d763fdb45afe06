"""The Makefile: every target runs its script, and no value is ever expanded or executed."""

import json
import os
import re
import shutil
import subprocess
import time
import venv

import pytest

from lib.commands import COMMANDS
from lib.config.dotconfig import ConfigWorkspace, list_defconfigs, read_constants
from lib.kablate import call
from lib.project import ROOT
from tests import make_command
from tests.errors import error_of
from tests.make_command import make
from tests.source import MAKE_TARGETS, MAKE_VARIABLES

MAKEFILE = (ROOT / "Makefile").read_text()
# Each part would create a file "pwned" if make or a shell expanded it.
HOSTILE = "$(shell touch pwned) `touch pwned` $$(touch pwned) '\" ; touch pwned # é $HOME"


@pytest.fixture(autouse=True, scope="module")
def scripts_in_the_server(server):
    """Let make run the scripts of this tree without starting an interpreter for each."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(make_command, "interpreter", server.interpreter)
        yield


def planned(*words, **variables):
    """Return the commands that make would run."""
    done = make("-n", *words, **variables)
    assert done.returncode == 0, done.stderr
    return done.stdout


def constants(folder):
    """Return the values of the folder's config.py."""
    return read_constants(ConfigWorkspace(ROOT, folder))


@pytest.fixture(scope="module")
def build(tmp_path_factory):
    """Return a build folder with the quickstart configuration, in a path that needs quoting."""
    folder = tmp_path_factory.mktemp("it's a: build") / "out"
    done = make(f"O={folder}", "defconfig-gpt2-ratio-small", str(folder / "config.py"))
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture
def unconfigured(tmp_path):
    """Return an absent build folder in a path that needs quoting, for commands that only print."""
    return tmp_path / "it's a: build" / "out"


# Targets without a command of kablate, and a part of what they run.
ALONE = {
    "test": "-m pytest",
    "style": "scripts/fix_whitespace_issues.py --check",
    "setup": "-m lib.env.setup",
    "help": "-m lib.make_help",
    "completion": "-m lib.make_help --completion",
    "clean": "rm -f",
}


def test_each_target_reaches_its_command(unconfigured):
    """In one make: variables of several targets are not refused."""
    printed = planned(
        *sorted(MAKE_TARGETS), f"O={unconfigured}", "SYM=SEED", "RUNS=*", "SET=SEED=2"
    )
    commands = [name for name in MAKE_TARGETS if COMMANDS[name].run != "-"]
    assert [name for name in commands if f" -m lib.kablate {name} -O " not in printed] == []
    assert [text for text in ALONE.values() if text not in printed] == []


def test_the_makefile_has_the_commands_of_the_table():
    listed = re.findall(
        r"^(?:CONFIGURED|OPTIONAL|PLAIN|ALONE) := ((?:.*\\\n)*.*)", MAKEFILE, re.MULTILINE
    )
    names = " ".join(listed).replace("\\\n", " ").split()
    assert len(listed) == 4 and sorted(names) == sorted(MAKE_TARGETS)
    assert ALONE.keys() == {name for name in MAKE_TARGETS if COMMANDS[name].run == "-"}


def test_targets_without_a_command_have_their_packages_and_options():
    tests = planned("test", "FAST=1")
    assert '--extras "$EXTRAS dev datasets tensorboard trackio"' in tests and "--fast" in tests
    assert "--fast" not in planned("test", "FAST=N")
    assert '--extras "$EXTRAS dev"' in planned("style")


def test_settings_are_those_of_a_defconfig_and_not_of_the_quickstart_that_is_loaded_without(
    tmp_path,
):
    words = (f"O={tmp_path}", "DRY_RUN=1", "SET=SEED=3")
    done = make("plan", *words[::2], "STEPS=0")
    assert done.returncode == 0 and constants(tmp_path)["SEED"] != 3, done.stderr
    assert "gpt2-quickstart" in done.stderr and (tmp_path / ".config").exists()
    done = make("defconfig-gpt2-ratio-small", *words)
    assert done.returncode == 0, done.stderr
    assert (constants(tmp_path)["DRY_RUN"], constants(tmp_path)["SEED"]) == (True, 3)


def test_every_variable_of_the_table_is_frozen():
    """A value that make would expand has no effect; the Makefile finds the names in the table."""
    words = [f"{name}=$(error {name})" for name in sorted(MAKE_VARIABLES - {"V", "O", "PYTHON"})]
    done = make("help", "completion", "O=/nonexistent", *words)
    assert done.returncode == 0, done.stderr


@pytest.fixture
def nothing_is_expanded():
    yield
    left = [path for path in (ROOT / "pwned", ROOT / "scripts" / "pwned") if path.exists()]
    for path in left:
        path.unlink()
    assert left == []


@pytest.mark.usefixtures("nothing_is_expanded")
@pytest.mark.parametrize("how", ["command line", "environment", ".config"])
def test_a_value_is_text(build, tmp_path, how):
    quoted = HOSTILE.replace('"', '\\"')
    setting = f'SAMPLE_PROMPT="{quoted}"'
    words = [f"O={tmp_path}", "defconfig-gpt2-ratio-small", f"{tmp_path}/config.py"]
    if how == "command line":
        done = make(*words, f"SET={setting}")
    elif how == "environment":
        done = make(*words, SET=setting)
    else:
        text = re.sub("SAMPLE_PROMPT=.*", lambda m: setting, (build / ".config").read_text())
        (tmp_path / ".config").write_text(text)
        done = make(words[0], words[2])
    assert done.returncode == 0, done.stderr
    assert constants(tmp_path)["SAMPLE_PROMPT"] == HOSTILE


@pytest.mark.usefixtures("nothing_is_expanded")
@pytest.mark.parametrize(
    "words",
    [
        ["why", f"SYM={HOSTILE}"],
        ["setup", f"EXTRAS={HOSTILE}"],
        [f"defconfig-{HOSTILE.replace('=', '')}"],
        ["list-defconfigs", f"V={HOSTILE}", f"JSON={HOSTILE}"],
        ["setup", f"PYTHON={HOSTILE}"],
    ],
    ids=lambda words: " ".join(word.split("=")[0][:12] for word in words),
)
def test_an_argument_is_text(build, words):
    make(f"O={build}", *words)


@pytest.mark.usefixtures("nothing_is_expanded")
def test_the_folder_of_an_environment_is_text():
    done = make("setup", CONDA_PREFIX=f"/{HOSTILE}")
    assert re.search(r"\[env\.[a-z-]+\]", done.stderr) and done.returncode == 2


@pytest.mark.parametrize("words", [["-n", "help"], ["-j2", "clean", "help"], ["hlep"]])
def test_an_unknown_variable_is_an_error_of_a_dry_run_too(words):
    done = make(*words, "STEP=3")
    assert done.returncode == 2 and "[usage.unknown-variable]" in done.stderr
    assert re.search(r"\bSTEP\b.*\bSTEPS\b", done.stderr) and "Stop." not in done.stderr


@pytest.mark.parametrize(
    ("words", "answer"),
    [
        (["test-matrix"], "test-matrix: is gone: use make"),
        (["plan", "DIRTY=1"], "DIRTY: is gone: use ALLOW_DIRTY=y"),
    ],
)
def test_a_name_that_is_gone_names_what_to_use(words, answer):
    done = make(*words)
    assert done.returncode == 2 and f"{answer} (docs" in done.stderr
    assert "[usage.gone]" in done.stderr and "type: make help" not in done.stderr


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["hlep"], "usage.unknown-target"),
        # Names of folders and files.
        (["tests"], "usage.unknown-target"),
        (["plan", "README.md"], "usage.unknown-target"),
        (["plan", "JOBS=2"], "usage.unread-variable"),
        (["defconfig-gpt2-ratio-small", "DRY_RUN=maybe"], "usage.invalid-value"),
        (["clean", "RUNS=ra"], "usage.unread-variable"),
        (["setup", "STEPS=1"], "usage.unread-variable"),
        (["test", "FAST=perhaps"], "usage.invalid-value"),
        (["plan", "V=2x"], "usage.invalid-value"),
        (["check", "KCONFIG_CONFIG=nonesuch"], "config.missing"),
        (["plan", "O=README.md"], "usage.build-folder"),
    ],
    ids=" ".join,
)
def test_a_misuse_is_an_error_of_the_product(build, words, code):
    before = (build / ".config").read_bytes()
    folder = [] if any(word.startswith("O=") for word in words) else [f"O={build}"]
    done = make(*folder, *words)
    assert done.returncode == 2 and done.stdout == ""
    assert f"[{code}]" in done.stderr and "EXIT    code 2" in done.stderr
    # The command that helps.
    assert "\n        " in done.stderr
    assert "Traceback" not in done.stderr and (build / ".config").read_bytes() == before


@pytest.mark.parametrize(
    ("words", "code"),
    [
        ("plan --gpus two", "config.wrong-type"),
        ("plan --probe --gpu h100", "usage.conflict"),
        ("generate --run ra --samples 0", "usage.out-of-range"),
        ("randconfig --seed x", "usage.invalid-number"),
        ("why", "usage.missing-argument"),
        ("check --set DROPUOT=0.2", "config.unknown-symbol"),
        ("check --checks causl", "usage.unknown-check"),
        ("check --check-gpu-memory-gb 8 --gpu l4", "usage.conflict"),
        ("check --data maybe", "usage.invalid-value"),
        ("rerun", "usage.missing-argument"),
        ("prolong ra", "usage.missing-argument"),
        ("audit", "usage.missing-argument"),
        ("audit --runs ../..", "run.not-found"),
        ("ls --where N_LAYER==6", "usage.invalid-condition"),
        ("clean-runs", "usage.missing-argument"),
        ("all --dry-run --on-stale maybe", "usage.invalid-value"),
        ("all --dry-run --keep-going maybe", "usage.invalid-value"),
        ("verify-results --source wandbb", "usage.invalid-value"),
        ("plan --quant int8", "usage.invalid-argument"),
        ("plann", "usage.unknown-command"),
    ],
)
def test_a_misuse_of_a_command_is_an_error_too(build, words, code):
    call("constants", ["-O", str(build)])
    name, *options = words.split()
    error = error_of(call, name, [*options, "-O", str(build)])
    assert (error.exit_code, error.codes) == (2, [code])


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["plan", "SET=DROPUOT=0.2"], "config.unknown-symbol"),
        (["hlep"], "usage.unknown-target"),
    ],
)
def test_an_error_is_a_document_with_json(build, words, code):
    done = make(f"O={build}", *words, "JSON=1")
    document = json.loads(done.stdout)
    assert document["exit_code"] == 2 and f"[{code}]" in done.stderr
    assert [problem["code"] for problem in document["problems"]] == [code]


def test_a_python_that_is_none_is_an_error(tmp_path):
    done = make(f"O={tmp_path}", "plan", "PYTHON=/bin/ls")
    assert done.returncode == 2 and re.search(r"\[env\.[a-z-]+\]", done.stderr)


def test_make_in_another_folder_is_answered_by_what_to_type(tmp_path):
    done = make("-f", str(ROOT / "Makefile"), "plan", "STEPS=0", cwd=tmp_path)
    assert done.returncode == 2 and "unknown" not in done.stderr
    assert f'type: make -C "{ROOT}"' in done.stderr


def test_a_checkout_has_the_line_ends_of_others():
    """The scripts run on Windows' subsystem, and the digests of the sources are the same."""
    words = ["git", "check-attr", "text", "--", "Makefile", "scripts/hw_probe.py", "docs/README.md"]
    said = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert said.count("text: unset") == 3, said


def test_a_dry_run_of_make_starts_nothing(tmp_path):
    python, log = tmp_path / "python", tmp_path / "log"
    # make asks whether PYTHON runs as Python.
    python.write_text(f'#!/bin/sh\n[ "$1" = -ISc ] || echo "$@" >> {log}\n')
    python.chmod(0o755)
    for target in ("all", "plan", "check", "defconfig-gpt2-ratio-small", "menuconfig", "clean"):
        done = make("-n", target, f"O={tmp_path}/build", f"PYTHON={python}")
        assert done.returncode == 0 and (str(python) in done.stdout or target == "clean")
    assert not log.exists() and not (tmp_path / "build").exists()
    make("list-defconfigs", f"PYTHON={python}")
    assert "list-defconfigs" in log.read_text()


def test_a_variable_of_the_environment_is_named(build):
    done = make(f"O={build}", "plan", STEPS="0", RUNS="ra")
    assert done.returncode == 0 and done.stdout.count("ratio/") == 1
    named = [line.split()[1] for line in done.stderr.splitlines() if line.startswith("ENV ")]
    assert named == ["STEPS=0"]
    assert "ENV" not in make(f"O={build}", "plan", "STEPS=0").stderr


def test_help_summarizes_the_configured_runs_and_completion_lists_each_defconfig(build):
    # Help generates no config.py.
    call("constants", ["-O", str(build)])
    run = make("help", f"O={build}").stdout.split("Run\n")[1].split("\n")[0]
    assert "19" in run
    database = make("-npq", "__BASH_MAKE_COMPLETION__=1", ".DEFAULT").stdout
    for defconfig in list_defconfigs(ROOT)[0]:
        assert f"\ndefconfig-{defconfig.name}:" in database


def test_config_py_is_made_again_only_when_something_changed(build):
    target = build / "config.py"
    words = [f"O={build}", str(target)]
    make(*words)
    made = target.stat().st_mtime_ns
    assert make(*words).stderr == ""
    assert target.stat().st_mtime_ns == made
    later = time.time() + 1
    os.utime(build / ".config", (later, later))
    assert "-> " in make(*words).stderr
    assert target.stat().st_mtime_ns > made
    # Also for commands that find a run by its name.
    target.unlink()
    assert "lib.kablate constants" in make("-n", "reproduce", f"O={build}").stdout


def test_an_edited_config_py_is_neither_used_nor_replaced(build):
    target = build / "config.py"
    words = [f"O={build}", str(target)]
    assert make(*words).returncode == 0
    text = target.read_text()
    edited = text.replace("N_LAYER = 4", "N_LAYER = 5")
    assert edited != text
    target.write_text(edited)
    older = target.stat().st_mtime - 10
    os.utime(build / ".config", (older, older))
    used = make(f"O={build}", "plan")
    explained = make(f"O={build}", "why", "SYM=N_LAYER")
    later = time.time() + 1
    os.utime(build / ".config", (later, later))
    replaced = make(*words)
    for done in (used, explained, replaced):
        assert done.returncode == 2 and done.stdout == ""
        assert f"{target}: " in done.stderr and "[config.edited]" in done.stderr
    assert target.read_text() == edited
    target.unlink()
    assert make(*words).returncode == 0 and target.read_text() == text


def test_kconfig_config_names_the_configuration(tmp_path, monkeypatch):
    words = [f"O={tmp_path}", "KCONFIG_CONFIG=other", "defconfig-gpt2-124m"]
    assert make(*words, f"{tmp_path}/config.py").returncode == 0
    assert (tmp_path / "other").exists() and not (tmp_path / ".config").exists()
    with monkeypatch.context() as patch:
        patch.setenv("KCONFIG_CONFIG", "other")
        assert constants(tmp_path)["N_LAYER"] == 12
    # The same build folder with another file: config.py is newer, but not of that file.
    assert make(f"O={tmp_path}", "defconfig-gpt2-ratio-small").returncode == 0
    os.utime(tmp_path / ".config", (0, 0))
    assert make(f"O={tmp_path}", f"{tmp_path}/config.py").returncode == 0
    assert constants(tmp_path)["N_LAYER"] == 4


@pytest.mark.parametrize(
    ("given", "printed"), [("-j3", " JOBS=3 "), ("JOBS=2", None), ("-j", " JOBS= "), ("V=1", None)]
)
def test_parallel_make_is_jobs(unconfigured, given, printed):
    """JOBS is passed in the environment; the value of SET is not parsed as make options."""
    commands = " " + planned("all", f"O={unconfigured}", given, "SET=A=1 -j9")
    assert re.findall(r"(?m)^ ?JOBS=\S* ", commands) == ([printed[1:]] if printed else [])


def test_verbosity(build):
    words = ["list-defconfigs", f"O={build}"]
    quiet, full, why = (make(*words, *v) for v in ([], ["V=1"], ["V=2"]))
    assert "lib.kablate" not in quiet.stdout
    assert "lib.kablate list-defconfigs" in full.stdout
    assert "update target 'list-defconfigs'" in why.stdout
    json.loads(make(*words, "V=1", "JSON=1").stdout)


def test_missing_packages_of_an_active_environment_are_named_and_not_installed(tmp_path):
    venv.create(tmp_path, with_pip=False)
    before = sorted(tmp_path.rglob("*"))
    done = make("setup", CONDA_PREFIX=str(tmp_path))
    assert done.returncode == 2
    assert "lacks packaging" in done.stderr and "[env.missing-package]" in done.stderr
    pip = rf"install -r \S+requirements.txt .*-e {re.escape(str(ROOT))}$"
    assert re.search(pip, done.stderr, re.M)
    assert sorted(tmp_path.rglob("*")) == before
    done = make("setup", VIRTUAL_ENV=f"{tmp_path}/absent")
    assert done.returncode == 2 and "[env.no-interpreter]" in done.stderr
    assert f"{tmp_path}/absent/bin/python: " in done.stderr


def test_a_current_set_up_says_nothing_and_loads_nothing_large():
    """setup is a prerequisite of every other target, so it has to be fast and silent."""
    done = make("setup", PYTHONPROFILEIMPORTTIME="1")
    modules = {line.rsplit("|")[-1].strip() for line in done.stderr.splitlines()}
    assert done.returncode == 0 and done.stdout == "" and "lib.env.packages" in modules
    assert not modules & {"torch", "numpy", "pip", "kconfiglib"}


def test_clean_removes_what_was_generated_in_one_build_folder(tmp_path):
    """In a copy of the Makefile: clean would delete this tree's files."""
    shutil.copy(ROOT / "Makefile", tmp_path)
    build = tmp_path / "results/a build"
    for folder in ("gpt2", "lib/__pycache__", "scripts", "tests", "data", "results/a build"):
        (tmp_path / folder).mkdir(parents=True)
    shutil.copy(ROOT / "lib/commands.py", tmp_path / "lib")
    kept = {".config", ".config.old", ".config.origins"}
    for name in ("config.py", "defconfig", *kept):
        (tmp_path / name).touch()
        (build / name).touch()
    before = set(tmp_path.iterdir())
    assert make("clean", f"O={build}", cwd=tmp_path).returncode == 0
    assert {path.name for path in build.iterdir()} == kept
    assert set(tmp_path.iterdir()) == before
    assert make("clean", cwd=tmp_path).returncode == 0
    left = before - {tmp_path / "config.py", tmp_path / "defconfig"}
    assert set(tmp_path.iterdir()) == left and not (tmp_path / "lib/__pycache__").exists()
    assert build.exists()
