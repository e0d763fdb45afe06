"""The source of text that a configuration selects."""

from pathlib import Path

from gpt2.data.hub import HubCorpus
from gpt2.data.options import DataOptions
from gpt2.data.own_files import OwnText, TokenFiles
from gpt2.data.packages import PACKAGED, PackagedCorpus
from lib.errors import DataError, Problem

Corpus = PackagedCorpus | OwnText | TokenFiles | HubCorpus


def select_corpus(config: DataOptions, build_dir: Path) -> Corpus:
    """Return the source of ``config`` without reading its texts or querying the hub.

    Raises DataError if local files of the source are missing or invalid.
    """
    if config.dataset in PACKAGED:
        return PACKAGED[config.dataset]
    if config.dataset != "custom":
        return HubCorpus.of(config, build_dir)
    if not config.custom_path:
        what = "CUSTOM_PATH: required for a custom data set, but empty"
        raise DataError(Problem(what, next="type: make menuconfig", code="config.missing-value"))
    path = build_dir / config.custom_path
    if config.custom_format == "bin":
        return TokenFiles.at(path)
    val_path = build_dir / config.custom_val_path if config.custom_val_path else None
    return OwnText.at(path, val_path, config.custom_format, config.custom_text_field)


def split_unit(corpus: Corpus, val_fraction: float) -> str:
    """Return what is held out: "document", "piece" of too few documents, given "paths" or "files"."""
    if isinstance(corpus, TokenFiles):
        return "files"
    return corpus.unit(val_fraction) if isinstance(corpus, OwnText) else "document"
