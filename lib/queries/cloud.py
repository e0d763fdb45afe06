"""Runs on a W&B server: wandb.ai or the server in WANDB_BASE_URL."""

from collections.abc import Sequence
from typing import Any

from lib.errors import ConfigError, PreflightError, Problem
from lib.queries.contract import History, RunName, merged, plain

# The server downsamples longer streams; this is ten days at one sample per ten seconds.
_MAX_SYSTEM_SAMPLES = 100_000


class CloudSource:
    """Implementation of ``lib.queries.contract.Source`` for W&B servers.

    The API key is read from WANDB_API_KEY or from the file that ``wandb login`` writes.
    """

    advice = "choose another project: --project NAME, --entity NAME"

    def __init__(self, entity: str) -> None:
        """Connect as ``entity``, a user or team; "" selects the account's default entity.

        Raises PreflightError if the server is unreachable.
        """
        # Importing wandb takes half a second and only this source needs it.
        import wandb

        self._errors = (wandb.errors.Error, wandb.errors.CommError, ValueError)
        try:
            self._api = wandb.Api()
            self._entity = entity or self._api.default_entity
            self.place = f"{self._entity} at {self._api.settings['base_url']}"
        except self._errors as error:
            raise _unreachable(error) from error

    def names(self, project: str) -> Sequence[RunName]:
        """Return the runs of ``project``. Raises ConfigError if ``project`` is empty."""
        if not project:
            raise ConfigError(
                Problem(
                    "a server query needs a project",
                    next="add --project NAME",
                    code="usage.missing-argument",
                )
            )
        path = f"{self._entity}/{project}"
        try:
            return [RunName(project, run.name, run.id, run) for run in self._api.runs(path)]
        except self._errors as error:
            raise _unreachable(error) from error

    def config(self, run: RunName) -> dict[str, Any]:
        """Return the configuration stored on the server."""
        return plain(run.key.config)

    def history(self, run: RunName) -> History:
        """Return every row, scanned without downsampling."""
        rows = ((row["_step"], row) for row in run.key.scan_history())
        return merged(rows)

    def system(self, run: RunName) -> list[dict[str, float]]:
        """Return W&B's system samples from the server, with the names of the offline files."""
        rows = run.key.history(samples=_MAX_SYSTEM_SAMPLES, stream="system", pandas=False)
        return [
            {name.removeprefix("system."): value for name, value in plain(row).items()}
            for row in rows
        ]


def _unreachable(error: Exception) -> PreflightError:
    what = str(error).splitlines()[0] if str(error) else type(error).__name__
    return PreflightError(
        Problem(
            f"W&B is unreachable: {what}",
            next="set WANDB_API_KEY, or WANDB_BASE_URL",
            code="tracker.unreachable",
        )
    )
