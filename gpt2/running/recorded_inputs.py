"""Inputs that a recorded configuration names by their paths, and their recorded digests.

Does not import torch.
"""

from pathlib import Path
from typing import Any

from gpt2.config import Config
from gpt2.data.dataset import select_corpus
from gpt2.weights.source import download_weights, weight_files
from lib.errors import DataError, PreflightError, Problem
from lib.files import sha256_file
from lib.runs.record import RunRecord

_TEXTS = ("CUSTOM_PATH", "CUSTOM_VAL_PATH", "DATASET_PATH")
_INPUTS = (*_TEXTS, "INIT_FROM")


def require_recorded_inputs(config: Config, record: RunRecord, build_dir: Path) -> None:
    """Require that local texts and initial weights that ``config`` has from ``record`` are the run's.

    The folder of a run may be a stranger's, and could name any file of this machine. Raises DataError
    or PreflightError if a file is missing or differs from its recorded digest.
    """
    taken = [n for n in _INPUTS if config.values[n] and config.values[n] == record.symbols.get(n)]
    where = str(record.manifest.file)
    if texts := [name for name in _TEXTS if name in taken]:
        here = select_corpus(config.data, build_dir).provenance()
        known: Any = record.manifest.find("data", "sources")
        if not isinstance(known, list) or not all(each in known for each in here):
            path = str(config.values[texts[0]])
            what = f"{texts[0]}: {path} is not the recorded text of the run (expected the same digests)"
            advice = f"put the text of the run at {(build_dir / path).absolute()}"
            raise DataError(Problem(what, where, advice, code="data.mismatch"))
    if "INIT_FROM" in taken:
        _, *files = weight_files(download_weights(config, build_dir))
        recorded = {digest for name, digest in record.sources.items() if Path(name).is_absolute()}
        if not {sha256_file(path) for path in files} <= recorded:
            what = f"INIT_FROM: {config.init.init_from} differs from the initial weights of the run"
            raise PreflightError(Problem(what, where, "restore them", code="weights.mismatch"))
