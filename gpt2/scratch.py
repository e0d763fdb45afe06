"""Standalone training: runs outside any plan of ``.config``, used to repeat and compare runs."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from gpt2.config import Config
from gpt2.launch import new_pool
from gpt2.planning import Plan
from gpt2.target import Gpt2Target
from lib.binding import Value
from lib.console import say
from lib.errors import ConfigError, Problem
from lib.kconfig.settings import Setting
from lib.plan import Run, Variant
from lib.rundir import RunDir
from lib.runner.decide import holds_another, move_aside
from lib.runner.pool import Pool
from lib.runner.runner import Options, run_all
from lib.status import is_done
from lib.tracking import TRACKERS

# Symbols whose values are paths, relative to the build folder unless absolute.
_PATH_SYMBOLS = ("CUSTOM_PATH", "DATASET_PATH", "INIT_FROM")


def scratch_plan(config: Config, names: Sequence[str], folder: Path, build_dir: Path) -> Plan:
    """Return a plan that trains ``config`` once for each of ``names``, below ``folder``."""
    runs = [Run(folder.name, Variant(name), config.seed, config, folder / name) for name in names]
    return Plan(folder.name, folder, build_dir, config, runs)


class _Target(Gpt2Target):
    """Training backend for runs that are not planned by ``.config``."""

    def __init__(self, plan: Plan, pool: Pool, recorded: Mapping[str, Setting]) -> None:
        # Uncommitted code is allowed: the caller compares every source file with the original run.
        super().__init__(plan, pool, dirty=True)
        self._recorded = recorded

    def settings(self, run: Run[Config]) -> Mapping[str, Setting]:
        """Return the recorded settings of the original run."""
        return self._recorded


def train_scratch(
    plan: Plan, settings: Mapping[str, Setting] | None = None, *, anew: bool = True
) -> int:
    """Train the runs of ``plan`` and return the exit code.

    ``settings`` are the recorded sources of the settings. Finished runs are moved aside. Started
    runs are resumed, unless ``anew``. ConfigError and PreflightError are raised before anything is
    trained.
    """
    for run in plan.runs:
        if run.path.exists() and (anew or is_done(RunDir(run.path)) or holds_another(run)):
            aside = move_aside(RunDir(run.path))
            say("RERUN", f"{run.path.name}   old run moved to {aside.name}")
    pool = new_pool(plan)
    target = _Target(plan, pool, settings or {})
    return run_all(plan.runs, plan.folder, target, pool, Options(stale="rerun"))


def unobserved(values: Mapping[str, Value]) -> dict[str, Value]:
    """Return ``values`` without trackers and time limit, which cannot change a bit of the result."""
    trackers_off = {name: False for name in TRACKERS.symbols()}
    return {**values, **trackers_off, "RUN_TIME_LIMIT_SECONDS": 0}


def with_data(config: Config, data: str, folder: Path, build_dir: Path) -> tuple[Config, Path]:
    """Return ``config`` adapted to the data at ``data``, and the build folder to train it in.

    ``data`` is a data folder (as in DATA_DIR) or the text of a custom data set (as in CUSTOM_PATH);
    "" changes nothing. Raises ConfigError if ``data`` is missing or does not match the run.
    """
    if not data:
        return config, build_dir
    path = Path(data).absolute()
    if not path.exists():
        what, advice = "no such file or folder", "type: make reproduce DATA=DIR"
        raise ConfigError(Problem(what, data, advice, code="data.missing"))
    custom = config.data.dataset == "custom"
    if custom and _is_data_folder(path) and not (build_dir / config.data.custom_path).exists():
        # The name of a custom data set is derived from its text, so the text is required.
        what = f"missing text {config.data.custom_path} of the run (expected a text, got a folder)"
        advice = "type: make reproduce DATA=THE_TEXT"
        raise ConfigError(Problem(what, str(path), advice, code="data.missing"))
    if not custom or _is_data_folder(path):
        return Config.from_values({**config.values, "DATA_DIR": str(path)}), build_dir
    return _with_custom_text(config, path, folder, build_dir)


def _is_data_folder(path: Path) -> bool:
    return (path / "downloads").is_dir() or any(path.glob("*/dataset.json"))


def _with_custom_text(
    config: Config, text: Path, folder: Path, build_dir: Path
) -> tuple[Config, Path]:
    """Create a build folder in which CUSTOM_PATH links to ``text``, and other paths still resolve."""
    custom_path = config.data.custom_path
    if Path(custom_path).is_absolute():
        what = f"the run requires its text at the absolute path {custom_path}"
        advice = f"copy {text} to {custom_path}"
        raise ConfigError(Problem(what, "DATA", advice, code="data.absolute-path"))
    inputs = folder / "inputs"
    for name in _PATH_SYMBOLS:
        path = str(config.values[name])
        if not path or Path(path).is_absolute():
            continue
        target = text if name == "CUSTOM_PATH" else (build_dir / path).absolute()
        link = inputs / path
        link.parent.mkdir(parents=True, exist_ok=True)
        link.unlink(missing_ok=True)
        if target.exists():
            link.symlink_to(target)
    data_dir = str((build_dir / config.data.data_dir).absolute())
    return Config.from_values({**config.values, "DATA_DIR": data_dir}), inputs
