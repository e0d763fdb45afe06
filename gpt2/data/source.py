"""What the configuration chooses: the source of the text, and the folder its tokens lie in."""

import hashlib
from pathlib import Path

from gpt2.data import custom, hub
from gpt2.data.corpus import PACKAGED, Corpus
from gpt2.data.options import DataConfig
from gpt2.data.tokenizer import digest as tokenizer_digest
from lib.errors import DataError, Problem
from lib.files import canonical_json

# Part of every data set's name: raise it when the same source gives other tokens or another split.
PREPARATION = 2

# Where documents or, for BinCorpus, tokens come from.
Source = Corpus | custom.BinCorpus | hub.HubCorpus


def given_split(corpus: Source) -> bool:
    """Whether the source says itself what is held out; else the hash of each text does."""
    return isinstance(corpus, custom.BinCorpus) or bool(
        isinstance(corpus, custom.Files) and corpus.held_out
    )


def data_folder(config: DataConfig, build_dir: Path) -> Path:
    """DATA_DIR; a relative one starts at ``build_dir``."""
    return build_dir / config.data_dir


def downloads_folder(config: DataConfig, build_dir: Path) -> Path:
    """Where the wheels are kept."""
    return data_folder(config, build_dir) / "downloads"


def choose(config: DataConfig, build_dir: Path) -> Source:
    """The source of the text. DataError when it is absent; the hub is not asked."""
    if config.dataset in PACKAGED:
        return PACKAGED[config.dataset]
    if config.dataset == "custom":
        if not config.custom_path:
            raise DataError(Problem("CUSTOM_PATH is empty", next="type: make menuconfig"))
        path = build_dir / config.custom_path
        val_path = build_dir / config.custom_val_path if config.custom_val_path else None
        return custom.find(path, config.custom_format, config.custom_text_field, val_path)
    return hub.find(config, build_dir)


def dataset_folder(config: DataConfig, build_dir: Path) -> Path:
    """``DATA_DIR/<dataset>-<tokenizer>-<hash8>``, the hash over all that decides the content.

    That is the source's digests, the tokenizer, the split and the way of preparing; a custom
    source is read for it. Raises DataError as ``choose`` does.
    """
    return folder_of(choose(config, build_dir), config, build_dir)


def folder_of(corpus: Source, config: DataConfig, build_dir: Path) -> Path:
    """``dataset_folder`` where the source is known already."""
    identity = {
        "preparation": PREPARATION,
        "source": [type(corpus).__name__, corpus.identity()],
        "tokenizer": tokenizer_digest(config.tokenizer),
        "val_fraction": None if given_split(corpus) else config.val_fraction,
    }
    hash8 = hashlib.sha256(canonical_json(identity).encode()).hexdigest()[:8]
    return data_folder(config, build_dir) / f"{config.dataset}-{config.tokenizer}-{hash8}"
