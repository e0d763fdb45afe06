"""The folder that ``INIT_FROM`` names: found, fetched from the hub, and looked at; imports no torch."""

import json
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from gpt2.config import Config, ModelConfig
from gpt2.data.source import downloads_folder
from gpt2.weights import layout
from lib.console import say
from lib.errors import PreflightError, Problem

CONFIG = "config.json"
WEIGHTS = "model.safetensors"
# Says which file has which tensor, where they are spread over several.
_INDEX = "model.safetensors.index.json"
_WANTED = [CONFIG, WEIGHTS, _INDEX, "model-*.safetensors"]
# All that a float32 parameter holds without rounding.
_DTYPES = {"F32", "F16", "BF16"}
_NAMED = 4


def folder(config: Config, build_dir: Path) -> Path:
    """Where the weights of ``INIT_FROM`` lie, or will when they have been fetched."""
    if config.init.is_path:
        return build_dir / Path(config.init.name).expanduser()
    return downloads_folder(config.data, build_dir) / "hub" / config.init.name.replace("/", "--")


def fetch(config: Config, build_dir: Path) -> Path:
    """``folder``, downloaded where it comes from the hub and is not there yet.

    Once it is there the hub is not asked again, so what it changes changes no run. PreflightError
    when the hub cannot be reached or has no such model.
    """
    place = folder(config, build_dir)
    if config.init.is_path or _complete(place):
        return place
    # Imported here: it takes a while, and nothing else of a run needs it.
    from huggingface_hub import snapshot_download

    say("INIT", f"downloading {config.init.name} from the Hugging Face hub")
    advice = (
        f"where there is a network, fetch {CONFIG} and {WEIGHTS} of {config.init.name}, "
        "put them into a folder, and set INIT_FROM=hf:PATH"
    )
    try:
        snapshot_download(config.init.name, allow_patterns=_WANTED, local_dir=place)
    # What httpx and the hub's own errors have in common.
    except OSError as error:
        reason = str(error).splitlines()[0]
        what = f"cannot download {config.init.name} from the hub: {reason}"
        raise PreflightError(Problem(what, "INIT_FROM", advice)) from None
    if not _complete(place):
        what = f"{config.init.name} has no {WEIGHTS} on the hub"
        raise PreflightError(Problem(what, "INIT_FROM", advice))
    return place


def files(place: Path) -> list[Path]:
    """config.json and the files with the weights. PreflightError when one is not there."""
    index = place / _INDEX
    names = [WEIGHTS]
    if index.exists():
        # Names, not paths: an index cannot point out of its folder.
        names = sorted({Path(n).name for n in _read_json(index).get("weight_map", {}).values()})
    found = [place / CONFIG, *(place / name for name in names)]
    for path in found:
        if not path.is_file():
            advice = "INIT_FROM=hf:PATH names a folder that save_pretrained or make export wrote"
            raise PreflightError(Problem("there is no such file", str(path), advice))
    return found


def mismatches(place: Path, model: ModelConfig) -> list[Problem]:
    """Every way in which the weights of a folder do not fit ``model``; reads no tensor.

    PreflightError when the folder is incomplete, or its files do not fit each other.
    """
    _, *weights = files(place)
    theirs = layout.with_defaults(_read_json(place / CONFIG))
    found = [Problem(what, str(place)) for what in layout.differences(model, theirs)]
    if theirs["model_type"] == "gpt2":
        _check_tensors(place, weights, theirs)
    if found:
        advice = "INIT_FROM takes weights as a whole: set these symbols to theirs, or other weights"
        found[-1] = Problem(found[-1].what, found[-1].where, advice)
    return found


def _complete(place: Path) -> bool:
    return (place / CONFIG).is_file() and any((place / n).is_file() for n in (WEIGHTS, _INDEX))


def _check_tensors(place: Path, weights: list[Path], theirs: dict[str, Any]) -> None:
    """PreflightError unless the files have exactly the tensors that config.json tells of."""
    expected = layout.shapes(theirs)
    expected[layout.HEAD] = expected["wte.weight"]
    found, dtypes = _headers(weights)
    # Tied to wte; most files leave it out.
    found.setdefault(layout.HEAD, expected[layout.HEAD])
    wrong = [
        f"{name} is {list(found[name])}, not {list(shape)}"
        for name, shape in expected.items()
        if name in found and found[name] != shape
    ]
    wrong += [f"{name} is missing" for name in expected if name not in found]
    wrong += [f"{name} is no weight of GPT-2" for name in found if name not in expected]
    wrong += [f"{dtype} would have to be rounded" for dtype in sorted(dtypes - _DTYPES)]
    if wrong:
        more = f" and {len(wrong) - _NAMED} more" if len(wrong) > _NAMED else ""
        what = f"the weights are not those of {CONFIG}: {', '.join(wrong[:_NAMED])}{more}"
        raise PreflightError(Problem(what, str(place)))


def _headers(weights: list[Path]) -> tuple[dict[str, tuple[int, ...]], set[str]]:
    """The shape of each tensor under our name, and all dtypes."""
    shapes: dict[str, tuple[int, ...]] = {}
    dtypes: set[str] = set()
    for path in weights:
        try:
            with safe_open(path, framework="np") as opened:
                for key in opened.keys():
                    if name := layout.plain_name(key):
                        header = opened.get_slice(key)
                        shapes[name] = tuple(header.get_shape())
                        dtypes.add(header.get_dtype())
        except (SafetensorError, OSError) as error:
            raise PreflightError(Problem(f"cannot be read: {error}", str(path))) from None
    return shapes, dtypes


def _read_json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise PreflightError(Problem(f"cannot be read: {error}", str(path))) from None
    if not isinstance(found, dict):
        raise PreflightError(Problem("holds no settings", str(path)))
    return found
