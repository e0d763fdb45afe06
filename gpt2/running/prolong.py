"""Training that continues from the weights of a finished run: the command ``make prolong``."""

from pathlib import Path

from gpt2.ablation.resolve import resolve_config
from gpt2.config import Config
from gpt2.planning.plan import Plan
from gpt2.records.run_files import RunLookup, find_finished
from gpt2.records.trust import allowed_values, own_values
from gpt2.running.recorded_inputs import require_recorded_inputs
from lib.config.field import SymbolValue
from lib.config.layers import ConfigLayer
from lib.config.tree import KconfigTree
from lib.console import log
from lib.plan.run import RunVariant, build_runs
from lib.runs.record import RunRecord
from lib.runs.run_dir import RunDir

# The order of the data is drawn from the seed: the same seed would repeat the run's first batches.
SEED_STEP = 1000
STUDY = "prolonged"


def plan_prolonged(
    named: str,
    build_dir: Path,
    iterations: int,
    settings: list[ConfigLayer],
    *,
    seeds: str = "",
) -> Plan:
    """Plan ``iterations`` more of the finished run ``named``, as a run of its own.

    The run has the recorded settings that ``allowed_symbols`` lists, except for the budget, the
    initial weights and the seed, the others of ``.config``, and ``settings`` on top. ``seeds`` selects among the planned runs of a name. Raises
    ConfigError if the run is not finished or a setting has no effect.
    """
    run = find_finished(named, build_dir, RunLookup(seeds=seeds))
    record = RunRecord(run)
    values = allowed_values(record)
    own = own_values(build_dir)
    layers = [
        ConfigLayer.of("constants", str(build_dir), own),
        ConfigLayer.of("constants", str(run.resolved_config), values),
    ]
    output = build_dir / str(own["OUTPUT_DIR"])
    changes: dict[str, SymbolValue] = {
        "SINGLE_TRAINING": True,
        "BUDGET_ITERATIONS": True,
        "MAX_ITERS": iterations,
        "INIT_FROM": _source(run, output),
        "SEED": int(values["SEED"]) + SEED_STEP,
    }
    if values["INIT_STREAM"]:
        changes["INIT_STREAM"] = 0
    config = resolve_config(
        KconfigTree(), [*layers, ConfigLayer.of("command line", "ITERS", changes), *settings]
    )
    require_recorded_inputs(config, record, build_dir)
    slug = run.path.name.rsplit("-", 2)[0]
    done = record.summary.value(int, "final", "iterations")
    variant = RunVariant(slug, f"{slug} after {done:,} iterations")
    runs = build_runs(STUDY, output, {config.seed: [(variant, config)]})
    log("PROLONG", f"{run.path.name}: {done:,} it done; {_stated(config)}")
    return Plan(STUDY, output / STUDY, build_dir, config, runs)


def _source(run: RunDir, output: Path) -> str:
    """Return INIT_FROM for a run: by its name below the output folder, else by its path."""
    path = run.path.absolute()
    return f"run:{path.name}" if path.parent.parent == output.absolute() else f"run:{path}"


def _stated(config: Config) -> str:
    """Return the schedule of the new run in words."""
    schedule, count = config.schedule, config.train.max_iters
    return (
        f"{count:,} more with a schedule of their own: {schedule.warmup_steps:,} it warm-up, "
        f"{schedule.kind} from {schedule.learning_rate:g}; new optimizer state, "
        f"data order of SEED={config.seed}"
    )
