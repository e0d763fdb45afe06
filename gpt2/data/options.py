"""Options of the data: which text, which tokenizer, where it lies, how batches are read."""

from dataclasses import dataclass

from lib.binding import symbol

# Tokens of each tokenizer, the end-of-text token included.
TOKENIZER_VOCAB = {"byte": 257, "gpt2": 50257}
# Downloads of many gigabytes, which the default corpus can stand in for.
LARGE = ("finewebedu", "openwebtext")


@dataclass(frozen=True)
class DataConfig:
    """A data set, its tokenizer and split, the evaluation budget, and the loader."""

    # default, shakespeare, custom, finewebedu or openwebtext
    dataset: str = symbol("DATASET")
    # The default corpus in place of a large data set; ``dataset`` is then already the default.
    stand_in: bool = symbol("DATASET_STAND_IN", identity=False)
    # What a large data set is read from and how much of it is taken: a local folder (a relative path
    # starts at the build folder), or the hub's subset and revision; training tokens.
    dataset_path: str = symbol("DATASET_PATH")
    dataset_subset: str = symbol("DATASET_SUBSET")
    dataset_revision: str = symbol("DATASET_REVISION")
    dataset_tokens: int = symbol("DATASET_TOKENS")
    # byte or gpt2
    tokenizer: str = symbol("TOKENIZER")
    # A relative path starts at the build folder.
    data_dir: str = symbol("DATA_DIR", identity=False)
    # Share of the documents that is held out, by a hash of the document.
    val_fraction: float = symbol("VAL_FRACTION", low=0.01, high=0.5)
    # A relative path starts at the build folder.
    custom_path: str = symbol("CUSTOM_PATH")
    # What is held out, in place of a share of CUSTOM_PATH; a relative path as there.
    custom_val_path: str = symbol("CUSTOM_VAL_PATH")
    # text, jsonl or bin
    custom_format: str = symbol("CUSTOM_FORMAT")
    custom_text_field: str = symbol("CUSTOM_TEXT_FIELD")
    # Predicted tokens of one evaluation.
    eval_tokens: int = symbol("EVAL_TOKENS")
    loader_workers: int = symbol("LOADER_WORKERS", identity=False)
    pin_memory: bool = symbol("PIN_MEMORY", identity=False)
    persistent_workers: bool = symbol("PERSISTENT_WORKERS", identity=False)
    # Micro-batches that each worker keeps ready.
    prefetch_factor: int = symbol("PREFETCH_FACTOR", identity=False)

    def __post_init__(self) -> None:
        if self.stand_in and self.dataset in LARGE:
            object.__setattr__(self, "dataset", "default")


def vocab_size(tokenizer: str) -> int:
    """Tokens of ``tokenizer``, without loading it."""
    return TOKENIZER_VOCAB[tokenizer]
