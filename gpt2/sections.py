"""What the result table of GPT-2's runs has below it: keys read and gates, speed and memory.

Declared figures come from configurations, all others from the directories of finished runs; imports
no torch.
"""

import json
from collections.abc import Mapping, Sequence

from gpt2.config import Config
from gpt2.planning import Plan
from lib.analysis.results import Result, read_result
from lib.analysis.table import Section
from lib.files import read_json_lines
from lib.plan import Run
from lib.rundir import RunDir
from lib.telemetry.layers import Layers, over_layers

# Of the statistics that native sparse attention tells of itself, and their headings.
_GATES = {
    "nsa/gate_moved": "gates moved",
    "nsa/gate_entropy": "gate entropy",
    "nsa/share_cmp": "compressed",
    "nsa/share_sel": "selected",
    "nsa/share_win": "window",
    "nsa/chosen": "free blocks",
    "nsa/distance": "distance",
}


def sections(plan: Plan) -> list[Section]:
    """Those that have something to say of the plan's finished runs."""
    done = [run for run in plan.runs if isinstance(read_result(run), Result)]
    combined = plan.sweep is not None or plan.base.study.mode == "test_matrix_mode"
    found = [_attention(done), _speed(done) if combined else None]
    return [section for section in found if section]


def _attention(runs: Sequence[Run[Config]]) -> Section | None:
    """Pairs and reads where runs differ in them, and how the gates of branches stand at the end."""
    if len({run.config.model.pairs_per_token() for run in runs}) < 2:
        return None
    told = [_statistics(RunDir(run.path)) for run in runs]
    names = [name for name in _GATES if any(name in values for values in told)]
    rows = []
    for run, values in zip(runs, told, strict=True):
        model = run.config.model
        cells = [f"{values[name]:.3f}" if name in values else "-" for name in names]
        rows.append((_name(run), f"{model.pairs_per_token():.1f}", str(model.reads()), *cells))
    note = "Pairs: query-key pairs of a head for a token, on average; reads: of the last token.\n"
    if names:
        note += (
            "Gates at the last statistics, means over heads, tokens and layers: how far from their "
            "start,\nentropy and share of each branch; blocks that were not forced, and how many "
            "tokens back.\n"
        )
    header = ("run", "pairs", "reads", *(_GATES[name] for name in names))
    return Section("Keys read", header, rows, note)


def _speed(runs: Sequence[Run[Config]]) -> Section | None:
    """Step time, speed, what ran, the most memory held, and the code and device of each run."""
    if not runs:
        return None
    rows = []
    for run in runs:
        directory = RunDir(run.path)
        timing = json.loads(directory.summary.read_text())["timing"]
        manifest = json.loads(directory.manifest.read_text())
        code, hardware = manifest["code"], manifest["hardware"]
        commit = (code["git_sha"] or "unknown")[:12] + " edited" * (code["dirty_tree"] is True)
        rows.append(
            (
                _name(run),
                f"{1000 * timing['mean_step_seconds']:.1f}",
                f"{timing['tokens_per_second']:,.0f}",
                manifest["attention"]["kernel"],
                f"{_most_reserved(directory):,.0f}",
                commit,
                hardware["gpu_name"] or hardware["cpu_model"],
            )
        )
    header = ("run", "step ms", "tok/s", "backend", "reserved MiB", "commit", "device")
    note = "MiB: the most that one process held at a log line; on a CPU, of resident memory.\n"
    return Section("Speed", header, rows, note)


def _most_reserved(run: RunDir) -> float:
    beats = (beat for path in run.heartbeats().values() for beat in read_json_lines(path))
    return max((float(beat["mem_reserved_mib"]) for beat in beats), default=0.0)


def _statistics(run: RunDir) -> Mapping[str, float]:
    """The last that the run told of its mechanisms, over the layers that have a value."""
    told: Layers = {}
    for row in read_json_lines(run.metrics):
        told = row["values"] if row["kind"] == "statistics" else told
    return over_layers(told)


def _name(run: Run[Config]) -> str:
    return f"{run.variant.slug} s{run.seed}"
