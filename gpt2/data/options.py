"""Data options: data set, tokenizer, folders, split, evaluation budget and loader."""

import os
from dataclasses import dataclass
from pathlib import Path

from lib.config.field import kconfig_field

# Vocabulary size of each tokenizer, including the end-of-text token.
TOKENIZER_VOCAB = {"byte": 257, "gpt2": 50257}
# Data sets of many gigabytes: repository on the hub and licence. DATASET_STAND_IN replaces them with
# the default corpus.
STREAMED_DATASETS = {
    "finewebedu": (
        "HuggingFaceFW/fineweb-edu",
        "ODC-By 1.0, and Common Crawl's terms of use; texts: their authors'",
    ),
    "openwebtext": ("Skylion007/openwebtext", "packaging: CC0 1.0; texts: their authors'"),
}


@dataclass(frozen=True)
class DataOptions:
    """Options of the data set, its tokenizer and split, the evaluation budget, and the loader."""

    # default, shakespeare, custom, finewebedu or openwebtext
    dataset: str = kconfig_field("DATASET")
    # Use the default corpus instead of a large data set; ``dataset`` is then set to default.
    stand_in: bool = kconfig_field("DATASET_STAND_IN", identity=False)
    # Source and size of a large data set: a local folder (relative to the build folder), or subset
    # and revision on the hub; budget in training tokens.
    dataset_path: str = kconfig_field("DATASET_PATH")
    dataset_subset: str = kconfig_field("DATASET_SUBSET")
    dataset_revision: str = kconfig_field("DATASET_REVISION")
    dataset_tokens: int = kconfig_field("DATASET_TOKENS")
    # byte or gpt2
    tokenizer: str = kconfig_field("TOKENIZER")
    data_dir: str = kconfig_field("DATA_DIR", identity=False)
    # Held-out share of the documents, selected by a hash of the text.
    val_fraction: float = kconfig_field("VAL_FRACTION", low=0.01, high=0.5)
    # Relative to the build folder.
    custom_path: str = kconfig_field("CUSTOM_PATH")
    # Held-out data instead of a share of CUSTOM_PATH; relative to the build folder.
    custom_val_path: str = kconfig_field("CUSTOM_VAL_PATH")
    # text, jsonl or bin
    custom_format: str = kconfig_field("CUSTOM_FORMAT")
    custom_text_field: str = kconfig_field("CUSTOM_TEXT_FIELD")
    # Budget of one evaluation in predicted tokens.
    eval_tokens: int = kconfig_field("EVAL_TOKENS")
    # Whole documents of one evaluation, in place of the budget; 0 for the budget.
    eval_documents: int = kconfig_field("EVAL_DOCUMENTS", off=0)
    loader_workers: int = kconfig_field("LOADER_WORKERS", identity=False)
    pin_memory: bool = kconfig_field("PIN_MEMORY", identity=False)
    # Micro-batches that each worker prefetches.
    prefetch_factor: int = kconfig_field("PREFETCH_FACTOR", identity=False)

    def __post_init__(self) -> None:
        if self.stand_in and self.dataset in STREAMED_DATASETS:
            object.__setattr__(self, "dataset", "default")

    def folder(self, build_dir: Path) -> Path:
        """Return DATA_DIR; a relative path is relative to ``build_dir``, ``~`` is the home folder."""
        return build_dir / os.path.expanduser(self.data_dir)
