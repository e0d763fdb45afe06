"""Runs on a W&B server: wandb.ai, or the one that WANDB_BASE_URL names."""

from collections.abc import Sequence
from typing import Any

from lib.errors import ConfigError, PreflightError, Problem
from lib.queries.contract import History, RunName, merged, plain

# A server samples this stream by itself where it has more; ten days of one in ten seconds.
_MOST_SAMPLES = 100_000


class CloudSource:
    """Keeps ``lib.queries.contract.Source``. The key is in WANDB_API_KEY, or ``wandb login``'s."""

    advice = "name another: --project NAME, --entity NAME"

    def __init__(self, entity: str) -> None:
        """``entity`` is a user or a team; empty takes the account's own. PreflightError offline."""
        # Half a second, and only this source needs it.
        import wandb

        self._errors = (wandb.errors.Error, wandb.errors.CommError, ValueError)
        try:
            self._api = wandb.Api()
            self._entity = entity or self._api.default_entity
            self.place = f"{self._entity} at {self._api.settings['base_url']}"
        except self._errors as error:
            raise _unreachable(error) from error

    def names(self, project: str) -> Sequence[RunName]:
        """The runs of ``project``."""
        if not project:
            raise ConfigError(Problem("a server has many projects", next="add --project NAME"))
        path = f"{self._entity}/{project}"
        try:
            return [RunName(project, run.name, run.id, run) for run in self._api.runs(path)]
        except self._errors as error:
            raise _unreachable(error) from error

    def config(self, run: RunName) -> dict[str, Any]:
        """As the server has it."""
        return plain(run.key.config)

    def history(self, run: RunName) -> History:
        """Every row: scanned, never sampled."""
        rows = ((row["_step"], row) for row in run.key.scan_history())
        return merged(rows)

    def system(self, run: RunName) -> list[dict[str, float]]:
        """W&B's own samples, as many as the server keeps, in the names of its offline files."""
        rows = run.key.history(samples=_MOST_SAMPLES, stream="system", pandas=False)
        return [
            {name.removeprefix("system."): value for name, value in plain(row).items()}
            for row in rows
        ]


def _unreachable(error: Exception) -> PreflightError:
    what = str(error).splitlines()[0] if str(error) else type(error).__name__
    return PreflightError(
        Problem(f"W&B does not answer: {what}", next="set WANDB_API_KEY, or WANDB_BASE_URL")
    )
