"""One training of a bench in a process of its own, started as a worker is; imports no torch."""

import json
import os
import subprocess
from typing import Any

from gpt2.config import Config
from lib.errors import RunError
from lib.files import canonical_json
from lib.machine.setup import environment
from lib.modules import module_command


def train_apart(name: str, config: Config, module: str, *arguments: str) -> dict[str, Any]:
    """What ``module``, which reads the values of ``config``, prints of its training.

    RunError with ``name`` and the first error where it fails.
    """
    done = subprocess.run(
        module_command(module, *arguments),
        input=canonical_json(dict(config.values)),
        env={**os.environ, **environment(config.machine)},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        said = done.stderr.strip().splitlines() or ["it says nothing"]
        errors = [line.removeprefix("ERROR").strip() for line in said if line.startswith("ERROR")]
        raise RunError(f"{name}: {(errors or said[-1:])[0]}")
    figures: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return figures
