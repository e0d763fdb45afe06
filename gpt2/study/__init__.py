"""Ablation studies. A study is a list of steps; a step sets Kconfig symbols on top of its parent."""

from pathlib import Path

from gpt2.config import StudyConfig
from gpt2.study.step import Study
from gpt2.study.study_file import read_study
from lib.errors import ConfigError, Problem

_HERE = Path(__file__).parent
# The keys are the members of the Kconfig choice ABLATION_STUDY, except OWN.
STUDIES: dict[str, Study] = {
    name: read_study(_HERE / f"studies/{name}.toml", is_own=False)
    for name in ("ratio", "mechanisms", "nsa", "quickstart")
}
RATIO = STUDIES["ratio"]
OWN = "own"
# Folders of results that are not those of a study.
_RESERVED = {*STUDIES, "matrix", "prolonged", "single", "sweep"}


def study_of(options: StudyConfig, build_dir: Path) -> Study:
    """Return the selected study; a file is relative to ``build_dir``.

    Raises ConfigError if the file of an own study is unreadable or wrong.
    """
    if options.study != OWN:
        return STUDIES[options.study]
    path = build_dir / Path(options.study_file).expanduser()
    study = read_study(path)
    if study.name in _RESERVED or study.name.startswith("prolonged-"):
        what = f"name: reserved (expected none of {', '.join(sorted(_RESERVED))})"
        raise ConfigError(Problem(what, str(path), code="study.reserved-name"))
    return study
