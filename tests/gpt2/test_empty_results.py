"""Every command that reads results, in a build folder that has none yet."""

from pathlib import Path

import pytest

from lib.commands import COMMANDS
from lib.errors import EXIT_CONFIG, EXIT_DONE, EXIT_FAILED, KablateError
from lib.kablate import call

# Commands that read no results: they configure, prepare, train or measure.
OTHERS = {
    *("constants", "menuconfig", "list-defconfigs", "defconfig", "savedefconfig", "olddefconfig"),
    *("randconfig", "all", "data", "preflight", "check", "bench", "bench-nsa", "validate-machine"),
}
# What a command needs to get as far as the results.
WORDS = {
    "why": ["N_LAYER"],
    "rerun": ["absent"],
    "prolong": ["baseline", "--iters=2", "--seeds=4"],
    "clean-runs": ["--where=state=failed", "--yes"],
    "audit": ["--runs=*"],
    "compare": ["rope", "baseline", "--seeds=4"],
    "export": ["baseline", "--seeds=4"],
    **{name: ["--run=baseline", "--seeds=4"] for name in ("evaluate", "generate")},
    "reproduce": ["--run=baseline-s4"],
}
CLAIMS = """
[[claim]]
name = "rope"
text = "RoPE lowers the loss"
step = "rope"
field = "val_loss"
value = "2.5"
"""
NAMES = [name for name, c in COMMANDS.items() if c.run != "-" and name not in OTHERS]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("build")
    call("defconfig", [f"--build-dir={path}", "gpt2-quickstart"])
    return path


@pytest.mark.parametrize("name", NAMES)
def test_a_command_without_results_says_so(folder, name, capsys, monkeypatch):
    monkeypatch.chdir(folder)
    Path("claims.toml").write_text(CLAIMS)
    problems = []
    try:
        code = call(name, [f"--build-dir={folder}", *WORDS.get(name, [])])
    except KablateError as error:
        code, problems = error.exit_code, error.problems
    # A claim about a run that does not exist does not hold.
    assert code in ((EXIT_FAILED,) if name == "claims" else (EXIT_DONE, EXIT_CONFIG))
    assert "".join([*capsys.readouterr(), *(problem.what for problem in problems)]).strip()
    # A word that the command line refuses would not reach the command.
    assert not [problem for problem in problems if problem.code.startswith("usage.")]
    assert not list(folder.glob("results/*/*-s*"))
