"""Environments made by hand, with stubs of the programs that usually create them."""

from dataclasses import replace

import pytest

from gpt2.study.resolve import resolve_config
from lib.config.layers import ConfigLayer
from lib.config.tree import KconfigTree
from lib.env.packages import current_interpreter

SYMBOLS = {"DEVICE_CPU": True, "CPU_THREADS": 1}
RESOLVED = resolve_config(KconfigTree(), [ConfigLayer.of("defconfig", "test", SYMBOLS)])
# The settings of a process on a CPU.
CPU = RESOLVED.machine
EXPLICIT = "# platform: linux-64\n@EXPLICIT\nhttps://localhost/python-3.13.1-0.conda\n"
HISTORY = "name: llmhe\nchannels:\n  - defaults\ndependencies:\n  - python=3.13\n"


@pytest.fixture
def config():
    """Return options that allow everything."""
    return RESOLVED.environment


@pytest.fixture
def conda_config(config):
    """Return the options of the fragment env-conda-llmhe."""
    return replace(config, policy="conda", name="llmhe", forbid_foreign=True)


@pytest.fixture
def program(tmp_path, monkeypatch):
    """Return a function that creates a stub program on PATH.

    ``answers`` maps a shell pattern of the arguments to the output or to an exit code.
    """
    folder = tmp_path / "programs"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")

    def make(name, answers, where=folder):
        cases = []
        for pattern, answer in answers.items():
            output = where / f"{name}-{len(cases)}.out"
            output.write_text(answer if isinstance(answer, str) else "")
            command = f"cat '{output}'" if isinstance(answer, str) else f"exit {answer}"
            cases.append(f"  {pattern}) {command} ;;")
        path = where / name
        path.write_text("\n".join(["#!/bin/sh", 'case "$*" in', *cases, "esac", ""]))
        path.chmod(0o755)
        return path

    return make


@pytest.fixture
def conda(program, tmp_path):
    """Return the interpreter of a folder that looks like the conda environment llmhe."""
    prefix = tmp_path / "envs" / "llmhe"
    for name in ("conda-meta", "bin"):
        (prefix / name).mkdir(parents=True)
    program(
        "conda",
        {
            "--version": "conda 26.1.0\n",
            f"'env export --from-history -p {prefix}'": HISTORY,
            f"'list --explicit -p {prefix}'": EXPLICIT,
        },
    )
    pip = {
        "*' --version'": "pip 26.0 from nowhere (python 3.13)\n",
        "*' freeze'": "# a comment\nnumpy==2.4.6\nmine @ file:///src\n-e git+https://a@b#egg=c\n",
        "*' check'": "No broken requirements found.\n",
    }
    python = program("python", pip, prefix / "bin")
    return current_interpreter(prefix, prefix, str(python))


@pytest.fixture(autouse=True)
def _torch_settings_restored(torch_as_before):
    pass
