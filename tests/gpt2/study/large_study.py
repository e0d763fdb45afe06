"""A fabricated study of many finished runs."""

from functools import cache
from pathlib import Path
from typing import Any

from gpt2.study.plan import config_layers, make_plan
from lib.config.dotconfig import defconfig_layers
from lib.config.field import SymbolValue
from lib.env.gpu import cpu_model
from lib.files import sha256_file
from lib.project import ROOT
from lib.runs.code import NOT_TRAINING, installed_torch
from lib.runs.run_dir import RunDir
from tests.build_folder import write_build
from tests.lib.fabricated import MANIFEST, changed
from tests.lib.report.fabricated_study import write_planned


def write_large_study(
    folder: Path,
    seeds: int,
    *,
    steps: str = "all",
    iterations: int = 60,
    documents: int = 10,
    **settings: SymbolValue,
) -> list[RunDir]:
    """Write a build folder with steps of the study, finished with ``seeds`` seeds by this code."""
    folder.mkdir(parents=True)
    layers = defconfig_layers(ROOT, "gpt2-ratio-small")
    write_build(folder, {"DEVICE_CPU": True, **settings}, *layers)
    plan = make_plan(config_layers(folder), folder, steps=steps, seeds=f"1-{seeds}")
    manifest = changed(MANIFEST, origin=this_origin())
    for run in plan.runs:
        own = {**manifest, "run": {"hash8": run.config.hash8}}
        write_planned(run, iterations, documents, symbols=run.config.values, manifest=own)
    return [RunDir(run.path) for run in plan.runs]


@cache
def this_origin() -> dict[str, Any]:
    """Return the origin that a run of this code on this machine records."""
    files = [
        str(p.relative_to(ROOT)) for part in ("gpt2", "lib") for p in ROOT.glob(f"{part}/**/*.py")
    ]
    sources = {f: sha256_file(ROOT / f) for f in sorted(files) if not f.startswith(NOT_TRAINING)}
    return {"torch": installed_torch(), "device": cpu_model(), "sources": sources}
