"""One benchmark training in a separate process, started like a worker. Imports no torch."""

import json
import os
import re
import subprocess
from typing import Any

from gpt2.config import Config
from lib.errors import Problem, RunError
from lib.files import canonical_json
from lib.machine.setup import environment
from lib.modules import module_command


def train_apart(name: str, config: Config, module: str, *arguments: str) -> dict[str, Any]:
    """Run ``module`` with the values of ``config`` on stdin and return the JSON figures it prints.

    Raises RunError with ``name``, the first reported error and the code of this error if the
    process fails.
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
        lines = done.stderr.strip().splitlines() or [f"no output, exit code {done.returncode}"]
        errors = [line.removeprefix("ERROR").strip() for line in lines if line.startswith("ERROR")]
        error = (errors or lines[-1:])[0]
        reported = re.search(r" \[([a-z]+\.[a-z-]+)\]$", error)
        what = error[: reported.start()] if reported else error
        code = reported[1] if reported else "process.failed"
        raise RunError(Problem(f"{name}: {what}", code=code))
    figures: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return figures
