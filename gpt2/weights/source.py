"""Folder of the ``INIT_FROM`` weights: location, download from the hub, and validation.

Does not import torch.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from gpt2.config import Config
from lib.console import log
from lib.errors import ConfigError, PreflightError, Problem
from lib.files import regular_path, sha256_file
from lib.json_files import RecordError, read_json_object
from lib.runs.record import JsonRecord, RunRecord
from lib.runs.run_dir import RunDir, State
from lib.units import first_of

CONFIG_FILE = "config.json"
WEIGHTS_FILE = "model.safetensors"
# model_type of config.json in an export with its own code.
NATIVE_TYPE = "kablate"
# Maps tensors to files if the weights are sharded.
_INDEX = "model.safetensors.index.json"
_DOWNLOAD_PATTERNS = [CONFIG_FILE, WEIGHTS_FILE, _INDEX, "model-*.safetensors"]


def weights_folder(config: Config, build_dir: Path) -> Path:
    """Return the folder of the ``INIT_FROM`` weights; a hub download may not exist yet.

    Of a run with an iteration, it is the folder of the checkpoint. Raises PreflightError unless exactly
    one finished run has the name, and ConfigError if it is damaged or did not keep the checkpoint.
    """
    init = config.init
    if init.is_hub:
        hub = config.data.folder(build_dir) / "downloads" / "hub"
        return hub / init.name.replace("/", "--")
    if init.is_path:
        folder = build_dir / Path(init.name).expanduser()
    else:
        folder = _run_folder(init.name, build_dir / config.study.output_dir)
    if not init.is_run:
        return folder
    run = RunDir(folder)
    if problem := RunRecord(run).unfinished:
        raise ConfigError(problem)
    if init.iteration is None:
        return folder
    require_kept(run, init.iteration, "INIT_FROM")
    return run.checkpoint(init.iteration)


def require_kept(run: RunDir, iteration: int, where: str) -> None:
    """Raise ConfigError, located at the variable ``where``, unless the run kept the checkpoint."""
    steps = run.checkpoint_steps
    if iteration in steps:
        return
    kept = f"expected one of {', '.join(map(str, steps))}" if steps else "it kept none"
    what = f"{run.path.name} has no checkpoint of iteration {iteration} ({kept})"
    advice = "make SET=CHECKPOINT_KEEP_FINISHED=y keeps those of further runs"
    raise ConfigError(Problem(what, where, advice, code="run.no-checkpoint"))


def run_of(folder: Path) -> RunDir:
    """Return the run whose weights are in a folder: its own directory, or that of a checkpoint."""
    is_checkpoint = folder.parent.name == RunDir(folder).checkpoints.name
    return RunDir(folder.parent.parent if is_checkpoint else folder)


def download_weights(config: Config, build_dir: Path) -> Path:
    """Return the folder of the weights, downloaded once if missing. Raises PreflightError."""
    path = weights_folder(config, build_dir)
    if not config.init.is_hub or _complete(path):
        return path
    # Imported here: the import is slow, and only downloads need it.
    from huggingface_hub import snapshot_download

    log("INIT", f"downloading {config.init.name} from the Hugging Face hub")
    advice = f"download {CONFIG_FILE} and {WEIGHTS_FILE} of {config.init.name} on a machine with "
    advice += "network access, copy them into a folder, and set INIT_FROM=hf:PATH"
    try:
        snapshot_download(config.init.name, allow_patterns=_DOWNLOAD_PATTERNS, local_dir=path)
    # Common base class of httpx errors and hub errors.
    except OSError as error:
        reason = str(error).splitlines()[0]
        what = f"cannot download {config.init.name} from the hub: {reason}"
        problem = Problem(what, "INIT_FROM", advice, code="hub.download-failed")
        raise PreflightError(problem) from None
    if not _complete(path):
        what = f"{config.init.name} has no {WEIGHTS_FILE} on the hub"
        raise PreflightError(Problem(what, "INIT_FROM", advice, code="weights.missing"))
    return path


def is_native(folder: Path) -> bool:
    """Return whether a folder has native weights: a run, or an export with its own code."""
    path = folder / CONFIG_FILE
    if not path.exists():
        return run_of(folder).resolved_config.exists()
    return read_settings(path).get("model_type") == NATIVE_TYPE


def weight_files(folder: Path) -> list[Path]:
    """Return the configuration and the weight files. Raises PreflightError if one is missing."""
    run = run_of(folder)
    if not (folder / CONFIG_FILE).exists() and run.resolved_config.exists():
        return [run.resolved_config, folder / run.weights.name]
    index = folder / _INDEX
    names = [WEIGHTS_FILE]
    if index.exists():
        # Drop directories: an index must not refer to files outside its folder.
        names = sorted({Path(n).name for n in read_settings(index).get("weight_map", {}).values()})
    paths = [folder / CONFIG_FILE, *(folder / name for name in names)]
    for path in (path for path in paths if not path.is_file()):
        advice = "set INIT_FROM=hf:PATH to a folder of save_pretrained or make export, or run:NAME"
        raise PreflightError(Problem("file not found", str(path), advice, code="weights.missing"))
    return paths


def _run_folder(name: str, output: Path) -> Path:
    """Return the directory of the finished run ``name``, or whose name begins with it."""
    ended = State.SUCCESS.word, State.DAMAGED.word
    paths = list(output.glob(f"*/{name}")) or [
        path for path in output.glob(f"*/{name}-*") if RunRecord(RunDir(path)).state in ended
    ]
    if len(paths) == 1:
        return paths[0]
    if paths:
        listed = first_of([path.name for path in sorted(paths)])
        what = f"{len(paths)} finished runs begin with {name!r}: {listed}"
    else:
        what = f"no finished run {name!r} below {output}"
    advice = "type: make ls, to list the runs"
    raise PreflightError(Problem(what, "INIT_FROM", advice, code="weights.missing"))


def require_recorded_weights(run: RunDir) -> None:
    """Raise PreflightError if the weights do not match the digest in the manifest."""
    try:
        recorded = JsonRecord.read(run.manifest).value(str, "artifacts", run.weights.name, "sha256")
        damaged = sha256_file(run.weights) != recorded
    except (RecordError, OSError) as error:
        what = f"the run is incomplete: {error}"
        raise PreflightError(Problem(what, str(run.path), code="run.incomplete")) from None
    if damaged:
        what, advice = "digest differs from the manifest", f"type: make rerun RUNS={run.path.name}"
        raise PreflightError(Problem(what, str(run.weights), advice, code="weights.damaged"))


def _complete(folder: Path) -> bool:
    return (folder / CONFIG_FILE).is_file() and any(
        (folder / n).is_file() for n in (WEIGHTS_FILE, _INDEX)
    )


def read_settings(path: Path) -> dict[str, Any]:
    try:
        return read_json_object(path)
    except RecordError as error:
        raise _damaged(path, error.problems[0].what) from None


@contextmanager
def opened_weights(path: Path, framework: str) -> Iterator[Any]:
    """Open a file of weights for tensors of ``framework``, pt or np."""
    try:
        with safe_open(regular_path(path), framework=framework) as weights:
            yield weights
    except (OSError, SafetensorError) as error:
        raise _damaged(path, str(error)) from None


def _damaged(path: Path, reason: str) -> PreflightError:
    return PreflightError(Problem(f"cannot be read: {reason}", str(path), code="weights.damaged"))
