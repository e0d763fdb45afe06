"""Folder of the ``INIT_FROM`` weights: location, download from the hub, and validation.

Does not import torch.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from gpt2.config import Config
from gpt2.data.dataset import data_folder
from gpt2.model_config import ModelConfig
from gpt2.records.files import read_resolved_config
from gpt2.weights import hf
from lib.console import log
from lib.errors import ConfigError, PreflightError, Problem
from lib.files import sha256_file
from lib.json_files import RecordError, read_json_object
from lib.runs.record import RunRecord, read_manifest
from lib.runs.run_dir import RunDir, State
from lib.units import first_of

CONFIG_FILE = "config.json"
WEIGHTS_FILE = "model.safetensors"
# model_type of config.json in an export with its own code.
NATIVE_TYPE = "kablate"
# Maps tensors to files if the weights are sharded.
_INDEX = "model.safetensors.index.json"
_DOWNLOAD_PATTERNS = [CONFIG_FILE, WEIGHTS_FILE, _INDEX, "model-*.safetensors"]
# Dtypes that convert to float32 without rounding.
_DTYPES = {"F32", "F16", "BF16"}


def weights_folder(config: Config, build_dir: Path) -> Path:
    """Return the folder of the ``INIT_FROM`` weights; a hub download may not exist yet.

    Of a run with an iteration, it is the folder of the checkpoint. Raises PreflightError unless exactly
    one finished run has the name, and ConfigError if it is damaged or did not keep the checkpoint.
    """
    init = config.init
    if not init.is_path and not init.is_run:
        return (
            data_folder(config.data, build_dir) / "downloads" / "hub" / init.name.replace("/", "--")
        )
    if init.is_path:
        folder = build_dir / Path(init.name).expanduser()
    else:
        folder = _run_folder(init.name, build_dir / config.study.output_dir)
    if init.is_run and (problem := RunRecord(RunDir(folder)).unfinished):
        raise ConfigError(problem)
    if init.iteration is None:
        return folder
    require_kept(RunDir(folder), init.iteration, "INIT_FROM")
    return RunDir(folder).checkpoint(init.iteration)


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
    """Return ``folder``; download the weights from the hub if they are missing.

    Downloaded weights are never updated, so later changes on the hub do not affect runs. Raises
    PreflightError if the hub is unreachable or the model does not exist.
    """
    path = weights_folder(config, build_dir)
    if config.init.is_path or config.init.is_run or _complete(path):
        return path
    # Imported here: the import is slow, and only downloads need it.
    from huggingface_hub import snapshot_download

    log("INIT", f"downloading {config.init.name} from the Hugging Face hub")
    advice = (
        f"download {CONFIG_FILE} and {WEIGHTS_FILE} of {config.init.name} on a machine with network access, "
        "copy them into a folder, and set INIT_FROM=hf:PATH"
    )
    try:
        snapshot_download(config.init.name, allow_patterns=_DOWNLOAD_PATTERNS, local_dir=path)
    # Common base class of httpx errors and hub errors.
    except OSError as error:
        reason = str(error).splitlines()[0]
        what = f"cannot download {config.init.name} from the hub: {reason}"
        raise PreflightError(
            Problem(what, "INIT_FROM", advice, code="hub.download-failed")
        ) from None
    if not _complete(path):
        what = f"{config.init.name} has no {WEIGHTS_FILE} on the hub"
        raise PreflightError(Problem(what, "INIT_FROM", advice, code="weights.missing"))
    return path


def is_native(folder: Path) -> bool:
    """Return whether a folder has native weights: a run, or an export with its own code."""
    path = folder / CONFIG_FILE
    if not path.exists():
        return run_of(folder).resolved_config.exists()
    return _read_json(path).get("model_type") == NATIVE_TYPE


def weight_files(folder: Path) -> list[Path]:
    """Return the configuration and the weight files. Raises PreflightError if one is missing."""
    run = run_of(folder)
    if not (folder / CONFIG_FILE).exists() and run.resolved_config.exists():
        return [run.resolved_config, folder / run.weights.name]
    index = folder / _INDEX
    names = [WEIGHTS_FILE]
    if index.exists():
        # Drop directories: an index must not refer to files outside its folder.
        names = sorted({Path(n).name for n in _read_json(index).get("weight_map", {}).values()})
    paths = [folder / CONFIG_FILE, *(folder / name for name in names)]
    for path in paths:
        if not path.is_file():
            advice = "set INIT_FROM=hf:PATH to a folder written by save_pretrained or make export"
            advice += ", or run:NAME"
            raise PreflightError(
                Problem("file not found", str(path), advice, code="weights.missing")
            )
    return paths


def weight_mismatches(folder: Path, model: ModelConfig) -> list[Problem]:
    """Return every mismatch between the weights of a folder and ``model``, without reading tensors.

    Raises PreflightError if files are missing or inconsistent with each other.
    """
    _, *weights = weight_files(folder)
    if is_native(folder):
        texts = _native_mismatches(model, read_resolved_config(run_of(folder)).model)
    else:
        theirs = hf.with_defaults(_read_json(folder / CONFIG_FILE))
        texts = hf.config_mismatches(model, theirs)
        if theirs["model_type"] == "gpt2":
            _check_tensors(folder, weights, theirs)
    problems = [Problem(what, str(folder), code="weights.config-mismatch") for what in texts]
    if problems:
        advice = "set these symbols to the values of the weights, or change INIT_FROM"
        problems[-1] = replace(problems[-1], next=advice)
    return problems


def _run_folder(name: str, output: Path) -> Path:
    """Return the directory of the finished run ``name``, or whose name begins with it."""
    exact = list(output.glob(f"*/{name}"))
    beginning = [path for path in output.glob(f"*/{name}-*") if not exact]
    ended = State.SUCCESS.word, State.DAMAGED.word
    paths = exact or [path for path in beginning if RunRecord(RunDir(path)).state in ended]
    if len(paths) == 1:
        return paths[0]
    if paths:
        listed = first_of([path.name for path in sorted(paths)])
        what = f"{len(paths)} finished runs begin with {name!r}: {listed}"
    else:
        what = f"no finished run {name!r} below {output}"
    advice = "type: make ls, to list the runs"
    raise PreflightError(Problem(what, "INIT_FROM", advice, code="weights.missing"))


def _native_mismatches(model: ModelConfig, theirs: ModelConfig) -> list[str]:
    """Return every mismatch with the model of another run; parts can be added, but not dropped."""
    ours, other = model.shape, theirs.shape
    a, b = model.attention, theirs.attention
    pairs: list[tuple[str, str | int, str | int]] = [
        ("N_LAYER", ours.n_layer, other.n_layer),
        ("N_HEAD", ours.n_head, other.n_head),
        ("N_EMBD", ours.n_embd, other.n_embd),
        ("BLOCK_SIZE", ours.block_size, other.block_size),
        ("TOKENIZER", f"{ours.vocab_size} tokens", f"{other.vocab_size} tokens"),
        ("ACTIVATION", model.mlp.activation.name, theirs.mlp.activation.name),
        ("ATTENTION_PROJECTION", a.projection.name, b.projection.name),
        ("POSITIONS", a.positions.name, b.positions.name),
        ("MLP_HIDDEN", _hidden(model), _hidden(theirs)),
    ]
    if b.pattern.cost(other, b.projection).params:
        pairs.append(("ATTENTION_PATTERN", a.pattern.name, b.pattern.name))
    mine, others = _part_names(model), _part_names(theirs)
    pairs += [(name.upper(), "off", "on") for name in sorted(others - mine)]
    return [
        f"{symbol}: {one} does not match the weights ({two})"
        for symbol, one, two in pairs
        if one != two
    ]


def _hidden(model: ModelConfig) -> str:
    return "/".join(map(str, model.hidden_widths()))


def _part_names(model: ModelConfig) -> set[str]:
    """Return the components of the kinds of which a model may have any number."""
    fields = (*vars(model.attention).values(), *vars(model.mlp).values())
    return {part.name for field in fields if isinstance(field, tuple) for part in field}


def require_recorded_weights(run: RunDir) -> None:
    """Raise PreflightError if the weights do not match the digest in the manifest."""
    try:
        recorded = read_manifest(run).value(str, "artifacts", run.weights.name, "sha256")
        damaged = sha256_file(run.weights) != recorded
    except (RecordError, OSError) as error:
        what = f"the run is incomplete: {error}"
        raise PreflightError(Problem(what, str(run.path), code="run.incomplete")) from None
    if damaged:
        raise PreflightError(
            Problem(
                "digest differs from the manifest",
                str(run.weights),
                f"type: make rerun RUNS={run.path.name}",
                code="weights.damaged",
            )
        )


def _complete(folder: Path) -> bool:
    return (folder / CONFIG_FILE).is_file() and any(
        (folder / n).is_file() for n in (WEIGHTS_FILE, _INDEX)
    )


def _check_tensors(folder: Path, weights: list[Path], theirs: dict[str, Any]) -> None:
    """Raise PreflightError unless the files have exactly the tensors described by config.json."""
    expected = hf.shapes(theirs)
    expected[hf.HEAD_NAME] = expected["wte.weight"]
    shapes, dtypes = _headers(weights)
    # Tied to wte; most files omit it.
    shapes.setdefault(hf.HEAD_NAME, expected[hf.HEAD_NAME])
    wrong = [
        f"{name} has shape {list(shapes[name])}, expected {list(shape)}"
        for name, shape in expected.items()
        if name in shapes and shapes[name] != shape
    ]
    wrong += [f"{name} is missing" for name in expected if name not in shapes]
    wrong += [f"{name} is unexpected" for name in shapes if name not in expected]
    wrong += [f"unsupported dtype {dtype}" for dtype in sorted(dtypes - _DTYPES)]
    if wrong:
        what = f"tensors do not match {CONFIG_FILE}: {first_of(wrong, 4)}"
        raise PreflightError(Problem(what, str(folder), code="weights.shape-mismatch"))


def _headers(weights: list[Path]) -> tuple[dict[str, tuple[int, ...]], set[str]]:
    """Return the shape of each tensor by native name, and the set of dtypes."""
    shapes: dict[str, tuple[int, ...]] = {}
    dtypes: set[str] = set()
    for path in weights:
        try:
            with safe_open(path, framework="np") as opened:
                for key in opened.keys():  # noqa: SIM118 - safe_open is not iterable
                    if name := hf.native_name(key):
                        header = opened.get_slice(key)
                        shapes[name] = tuple(header.get_shape())
                        dtypes.add(header.get_dtype())
        except (SafetensorError, OSError) as error:
            raise PreflightError(
                Problem(f"cannot be read: {error}", str(path), code="weights.damaged")
            ) from None
    return shapes, dtypes


def _read_json(path: Path) -> dict[str, Any]:
    try:
        return read_json_object(path)
    except RecordError as error:
        what = f"cannot be read: {error.problems[0].what}"
        raise PreflightError(Problem(what, str(path), code="weights.damaged")) from None
