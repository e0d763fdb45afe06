"""Which steps can be judged: those that predict the same text as the step they are compared with.

A study in which a step predicts another text is refused when it is planned, unless it claims nothing.
The cells of a matrix or a sweep are compared only with cells that predict the same text. Imports no
torch.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from gpt2.config import Config
from gpt2.data.options import STREAMED_DATASETS
from gpt2.study.step import Study
from lib.config.field import SymbolValue
from lib.errors import Problem
from lib.report.options import BITS_PER_BYTE
from lib.runs.run import RunVariant

# Symbols that determine the documents of a data set; a source that is another has other values of them.
_SOURCE = (
    *("DATASET_PATH", "DATASET_SUBSET", "DATASET_REVISION", "DATASET_TOKENS"),
    *("CUSTOM_PATH", "CUSTOM_FORMAT", "CUSTOM_TEXT_FIELD", "VAL_FRACTION"),
)
# Symbols that determine held-out documents with a path of their own: CUSTOM_PATH is training text.
_OWN_HELD_OUT = ("CUSTOM_VAL_PATH", "CUSTOM_FORMAT", "CUSTOM_TEXT_FIELD")
_REASONS = {
    "EVAL_TOKENS": "another part of the held-out text is evaluated",
    "EVAL_DOCUMENTS": "another part of the held-out text is evaluated",
    "BLOCK_SIZE": "the held-out text is cut into other windows",
    "TOKENIZER": "the predicted tokens are others",
}
_REMEDIES = {
    "CUSTOM_PATH": "hold out the documents of CUSTOM_VAL_PATH in all steps",
    "BLOCK_SIZE": "set EVAL_DOCUMENTS for all steps, in .config",
    "TOKENIZER": 'judge in bits per byte, with unit = "bits-per-byte" and EVAL_DOCUMENTS in .config',
}


def unit_of(study: Study | None, config: Config) -> str:
    """Return the unit of the losses of a study, or of a plan without one."""
    return (study.unit if study else "") or config.verdicts.unit


def predicted_text(config: Config, unit: str) -> dict[str, SymbolValue]:
    """Return the symbols, with their values, that determine what an evaluation predicts.

    That are the tokens, or in bits per byte the bytes.
    """
    data, values = config.data, config.values
    own = data.dataset == "custom" and data.custom_val_path
    text: dict[str, SymbolValue] = {
        # A data set that the default one stands in for is not read.
        "DATASET": data.dataset,
        **{name: values[name] for name in (_OWN_HELD_OUT if own else _SOURCE)},
        "TOKENIZER": data.tokenizer,
        "EVAL_DOCUMENTS": data.eval_documents,
    }
    if not data.eval_documents:
        return text | {"BLOCK_SIZE": config.model.shape.block_size, "EVAL_TOKENS": data.eval_tokens}
    # DATASET_TOKENS of a large data set counts tokens, so its documents depend on the tokenizer.
    if unit == BITS_PER_BYTE and data.dataset not in STREAMED_DATASETS:
        del text["TOKENIZER"]
    return text


def grouped_by_text(
    block: Sequence[tuple[RunVariant, Config]],
) -> list[tuple[RunVariant, Config]]:
    """Return the cells of a grid with the text that each predicts, if they predict several."""
    texts = [predicted_text(config, unit_of(None, config)) for _, config in block]
    named = dict.fromkeys(symbol for text in texts for symbol in text)
    symbols = [s for s in named if len({text.get(s) for text in texts}) > 1]
    return [
        (replace(variant, text=" ".join(f"{s}={_shown(text, s)}" for s in symbols)), config)
        for (variant, config), text in zip(block, texts, strict=True)
    ]


def unjudgeable(
    configs: Mapping[str, Config], baseline: str, study: Study | None = None
) -> Iterator[tuple[str, Problem]]:
    """Yield name and problem of each step that predicts another text than the baseline.

    ``configs`` are those of the steps of ``study``, or of the cells of a design.
    """
    if baseline not in configs or (study and not study.judge):
        return
    texts = {
        name: predicted_text(config, unit_of(study, config)) for name, config in configs.items()
    }
    for name, text in texts.items():
        expected = texts[baseline]
        symbol = next((s for s in {**expected, **text} if expected.get(s) != text.get(s)), "")
        if not symbol:
            continue
        what = (
            f"{symbol}: {_REASONS.get(symbol, 'other documents are held out')}, so no comparison can "
            f"judge the step (expected {_shown(expected, symbol)} as in {baseline}, "
            f"got {_shown(text, symbol)})"
        )
        where = study.where(study.step(name), symbol) if study else f"ABLATION_FEATURES {name}"
        remedy = _REMEDIES.get(symbol, f"set {symbol} for all steps, in .config")
        advice = f"{remedy}; a study of speed has judge = false in its file"
        yield name, Problem(what, where, advice, code="study.not-judgeable")


def _shown(text: Mapping[str, SymbolValue], symbol: str) -> str:
    return str(text.get(symbol, "")) or "nothing"
