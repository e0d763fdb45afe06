"""Run a module in one process per rank, for a measurement. Imports no torch."""

import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

from lib.env.ranks import rank_environment


def run_ranks(
    command: Sequence[str],
    variables: Mapping[str, str],
    ranks: int,
    text: str = "",
    seconds: float | None = None,
) -> tuple[int, str]:
    """Run ``command`` as ``ranks`` processes with ``text`` on stdin.

    ``variables`` are the environment. Returns exit code and output of rank 0, after which the other
    ranks are killed. Raises subprocess.TimeoutExpired after ``seconds``.
    """
    with tempfile.TemporaryDirectory() as name, ExitStack() as started:
        folder, processes = Path(name), list[subprocess.Popen[str]]()
        (folder / "stdin").write_text(text, encoding="utf-8")
        for rank in range(ranks):
            process = subprocess.Popen(
                command,
                env={**variables, **rank_environment(rank, ranks, folder / "rendezvous")},
                stdin=started.enter_context((folder / "stdin").open("rb")),
                stdout=subprocess.DEVNULL if rank else subprocess.PIPE,
                encoding="utf-8",
                errors="replace",
                # Ctrl-C reaches this process alone, which kills them.
                start_new_session=True,
            )
            started.enter_context(process)
            started.callback(process.kill)
            processes.append(process)
        output, _ = processes[0].communicate(timeout=seconds)
        return processes[0].returncode, output
