"""Training a given configuration beside the study it came from, to compare what comes of it."""

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

# Settings of a path; a relative one starts at the build folder.
_PATHS = ("CUSTOM_PATH", "DATASET_PATH", "INIT_FROM")


def scratch_plan(config: Config, names: Sequence[str], folder: Path, build_dir: Path) -> Plan:
    """A plan that trains ``config`` once for each of ``names``, below ``folder``."""
    runs = [Run(folder.name, Variant(name), config.seed, config, folder / name) for name in names]
    return Plan(folder.name, folder, build_dir, config, runs)


class _Target(Gpt2Target):
    """Trains what no ``.config`` plans."""

    def __init__(self, plan: Plan, pool: Pool, known: Mapping[str, Setting]) -> None:
        # What matters is compared: every source file with the one that made the run.
        super().__init__(plan, pool, dirty=True)
        self._known = known

    def settings(self, run: Run[Config]) -> Mapping[str, Setting]:
        """As the run that is made again has them."""
        return self._known


def train_scratch(
    plan: Plan, settings: Mapping[str, Setting] | None = None, *, anew: bool = True
) -> int:
    """Train the runs of ``plan``; the exit code.

    ``settings`` says who set what, for the record. What was finished before is moved aside. What
    was begun is continued, unless ``anew``. Raises ConfigError and PreflightError before anything is
    trained.
    """
    for run in plan.runs:
        if run.path.exists() and (anew or is_done(RunDir(run.path)) or holds_another(run)):
            say("RERUN", f"{run.path.name}   kept as {move_aside(RunDir(run.path)).name}")
    pool = new_pool(plan)
    target = _Target(plan, pool, settings or {})
    return run_all(plan.runs, plan.folder, target, pool, Options(stale="rerun"))


def unobserved(values: Mapping[str, Value]) -> dict[str, Value]:
    """The same run without trackers and time limit, which change no bit of it."""
    quiet = {name: False for name in TRACKERS.symbols()}
    return {**values, **quiet, "RUN_TIME_LIMIT_SECONDS": 0}


def with_data(config: Config, data: str, folder: Path, build_dir: Path) -> tuple[Config, Path]:
    """The configuration that finds its data at ``data``, and the build folder to train it in.

    ``data`` is a data folder (what DATA_DIR names), or the text of a custom data set (what
    CUSTOM_PATH names). "" leaves both as they are. ConfigError where it is neither.
    """
    if not data:
        return config, build_dir
    place = Path(data).absolute()
    if not place.exists():
        raise ConfigError(Problem("no such file or folder", data, "type: make reproduce DATA=DIR"))
    custom = config.data.dataset == "custom"
    if custom and _is_data_folder(place) and not (build_dir / config.data.custom_path).exists():
        # Its name follows from the text, and so does what is to be read of it.
        what = f"a data folder, and the text {config.data.custom_path} of the run is not here"
        raise ConfigError(Problem(what, str(place), "type: make reproduce DATA=THE_TEXT"))
    if not custom or _is_data_folder(place):
        return Config.from_values({**config.values, "DATA_DIR": str(place)}), build_dir
    return _own_text(config, place, folder, build_dir)


def _is_data_folder(place: Path) -> bool:
    return (place / "downloads").is_dir() or any(place.glob("*/dataset.json"))


def _own_text(config: Config, place: Path, folder: Path, build_dir: Path) -> tuple[Config, Path]:
    """A build folder in which the run's relative paths lead where they have to."""
    given = config.data.custom_path
    if Path(given).is_absolute():
        what = f"the run reads {given}, an absolute path, and no other place"
        raise ConfigError(Problem(what, "DATA", f"put the text there: {place}"))
    inputs = folder / "inputs"
    for name in _PATHS:
        path = str(config.values[name])
        if not path or Path(path).is_absolute():
            continue
        target = place if name == "CUSTOM_PATH" else (build_dir / path).absolute()
        link = inputs / path
        link.parent.mkdir(parents=True, exist_ok=True)
        link.unlink(missing_ok=True)
        if target.exists():
            link.symlink_to(target)
    data_dir = str((build_dir / config.data.data_dir).absolute())
    return Config.from_values({**config.values, "DATA_DIR": data_dir}), inputs
