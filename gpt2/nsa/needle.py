"""``make needle-test``: a synthetic retrieval task that tests block selection over long distances.

A sequence alternates fact blocks and question blocks. A fact block assigns values to the positions
of one key; in test sequences every value occurs once per block, at a random position. A question
names a key and a position, and the answer is the value stored there. If the fact is further back
than the window and two blocks, only a selected block reaches it: a compressed block is the mean of
all its values, whatever their order. The same model with random selection, or with the window
alone, has to guess. Only the questions of the last blocks are scored: among many blocks, random
selection rarely covers the answer, and the hit rate of random selection is computed exactly.

B batch, T tokens, K fact blocks, l tokens per block, Q questions, V values, C n_embd.
"""

import argparse
import dataclasses
import time
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from gpt2.model import GPT
from gpt2.model_config import ModelConfig
from gpt2.nsa.options import NsaOptions
from gpt2.nsa.select import random_blocks
from gpt2.study.resolve import resolve_config
from lib.config.field import SymbolValue
from lib.config.layers import ConfigLayer
from lib.config.tree import KconfigTree
from lib.console import log
from lib.errors import ConfigError, Problem
from lib.report.render import json_document, markdown_table

_BLOCK = 8
_BLOCKS = 16
# One layer, so that information cannot travel from window to window; one head; and an MLP that is
# too small to memorize facts.
MODEL: dict[str, SymbolValue] = {
    "MODEL_SIZE_CUSTOM": True,
    "N_LAYER": 1,
    "N_HEAD": 1,
    "N_EMBD": 64,
    "N_KV_HEAD": 1,
    "BLOCK_SIZE": 2 * _BLOCK * _BLOCKS,
    "DROPOUT": "0.0",
    "MLP_SIZING_HIDDEN": True,
    "MLP_HIDDEN": 1,
    "TOKENIZER_BYTE": True,
    "ATTENTION_PROJECTION_GROUPED": True,
    "ATTENTION_PATTERN_NSA": True,
    "NSA_WINDOW": _BLOCK,
}
_SELECTION: dict[str, SymbolValue] = {
    "NSA_COMPRESS_BLOCK": _BLOCK,
    "NSA_COMPRESS_STRIDE": _BLOCK,
    "NSA_SELECT_BLOCK": _BLOCK,
    "NSA_SELECT_COUNT": 4,
    "NSA_PHI_MEAN": True,
}
VARIANTS: dict[str, dict[str, SymbolValue]] = {
    "nsa": _SELECTION,
    "random blocks": {**_SELECTION, "NSA_SELECT_BY_RANDOM": True},
    "window only": {"NSA_BRANCH_COMPRESSED": False, "NSA_BRANCH_SELECTED": False},
}
# Answers are far beyond the window and two blocks.
_FAR_DISTANCE = 3 * _BLOCK
# Vocabulary: fact tokens (key, position, value), question tokens (key, position), answer tokens.
_NUM_FACTS = _BLOCKS * _BLOCK * _BLOCK
_ANSWERS = _NUM_FACTS + _BLOCKS * _BLOCK
_VOCAB = _ANSWERS + _BLOCK
_BATCH_SIZE = 32
_LEARNING_RATE = 5e-3
_WARMUP = 20
# The learning rate decays linearly over this last fraction of training.
_DECAY_FRACTION = 0.3
_TEST_SEQUENCES = 512
# Number of question blocks, counted from the end, that a test scores.
_SCORED_BLOCKS = 2
_PROGRESS_INTERVAL_SECONDS = 5.0


@dataclass(frozen=True)
class NeedleSequences:
    """Tokens BT, and for each question (BQ) the value and the index of the fact among all facts."""

    idx_BT: Tensor
    values_BQ: Tensor
    places_BQ: Tensor


@dataclass(frozen=True)
class NeedleAccuracy:
    """Accuracy on the scored questions.

    far    facts further back than the window and two blocks
    luck   expected accuracy on the far facts of a model that sees the fact if a random block
           contains it, and guesses otherwise
    first  facts in the first block, which is always selected
    """

    far: float
    luck: float
    first: float
    seconds: float


def run(options: argparse.Namespace) -> str:
    """Train small models on long-range retrieval: with selected blocks, random blocks, and a window.

    kablate needle-test               all three arms, a few minutes on one core
    kablate needle-test --arms nsa    one arm
    kablate needle-test --iters 400   training iterations of each arm

    Native sparse attention solves the task if its selection works. With random blocks, or with the
    window only, the same model has to guess; the table includes the chance level of random blocks.
    Progress goes to stderr, the table to stdout.
    """
    arms = options.arms.split(",") if options.arms else list(VARIANTS)
    if unknown := [arm for arm in arms if arm not in VARIANTS]:
        what = f"unknown arm {unknown[0]!r} (expected {', '.join(VARIANTS)})"
        raise ConfigError(Problem(what, "--arms", code="usage.invalid-value"))
    torch.set_num_threads(1)
    results = {arm: train_and_evaluate(arm, options.iters, options.seed) for arm in arms}
    if not options.json:
        return to_markdown(results)
    records = {arm: dataclasses.asdict(result) for arm, result in results.items()}
    return json_document(1, {"chance": chance(), "arms": records})


def generate_sequences(
    rows: int, generator: torch.Generator, *, test: bool = False
) -> NeedleSequences:
    """Generate sequences of fact blocks, each followed by a block of questions.

    Every fact block has one key. In test sequences every value occurs once per block, so the block
    mean carries no information. Training on such sequences could not start, since uniform attention
    would carry no information either; training values are therefore drawn independently.
    """
    keys_BK = torch.rand(rows, _BLOCKS, generator=generator).argsort(1)
    values_BKl = torch.randint(_BLOCK, (rows, _BLOCKS, _BLOCK), generator=generator)
    if test:
        values_BKl = torch.rand(rows, _BLOCKS, _BLOCK, generator=generator).argsort(2)
    within_l = torch.arange(_BLOCK)
    facts_BKl = (keys_BK[..., None] * _BLOCK + within_l) * _BLOCK + values_BKl
    # Number of facts before each question.
    facts_Q = (torch.arange(_BLOCKS * _BLOCK) // _BLOCK + 1) * _BLOCK
    places_BQ = (torch.rand(rows, len(facts_Q), generator=generator) * facts_Q).long()
    values_BQ = values_BKl.flatten(1).gather(1, places_BQ)
    keys_BQ = keys_BK.gather(1, places_BQ // _BLOCK)
    questions_BQ = _NUM_FACTS + keys_BQ * _BLOCK + places_BQ % _BLOCK
    idx_BT = torch.stack([facts_BKl, questions_BQ.view_as(facts_BKl)], 2).flatten(1)
    return NeedleSequences(idx_BT, values_BQ, places_BQ)


def model_config(arm: str) -> ModelConfig:
    """Return the model configuration of one arm, with the vocabulary of the task."""
    model = resolve_config(
        KconfigTree(), [ConfigLayer.of("needle", "make needle-test", MODEL | VARIANTS[arm])]
    ).model
    return replace(model, shape=replace(model.shape, vocab_size=_VOCAB))


def train_and_evaluate(arm: str, steps: int, seed: int) -> NeedleAccuracy:
    """Train one arm on generated sequences and test it, with lines about its progress."""
    model = GPT(model_config(arm))
    model.init_weights(seed)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=_LEARNING_RATE, betas=(0.9, 0.98), weight_decay=0.0
    )
    generator = torch.Generator().manual_seed(seed)
    started = logged = time.monotonic()
    for step in range(1, steps + 1):
        rate = _LEARNING_RATE * min(
            1.0, step / _WARMUP, (steps - step + 1) / (_DECAY_FRACTION * steps)
        )
        for group in optimizer.param_groups:
            group["lr"] = rate
        sequences = generate_sequences(_BATCH_SIZE, generator)
        optimizer.zero_grad()
        logits_BQV = _answers(model, sequences)
        loss = F.cross_entropy(logits_BQV.flatten(0, 1), sequences.values_BQ.flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        now = time.monotonic()
        if now - logged > _PROGRESS_INTERVAL_SECONDS or step == steps:
            eta = (now - started) / step * (steps - step)
            log("NEEDLE", f"{arm}: step {step} of {steps}, loss {loss.item():.2f}, eta {eta:.0f} s")
            logged = now
    sequences = generate_sequences(_TEST_SEQUENCES, generator, test=True)
    accuracy = evaluate(model, arm, sequences, time.monotonic() - started)
    log(
        "NEEDLE",
        f"{arm}: accuracy {100 * accuracy.far:.1f} %, by chance {100 * accuracy.luck:.1f} %",
    )
    return accuracy


@torch.no_grad()
def evaluate(model: GPT, arm: str, sequences: NeedleSequences, seconds: float) -> NeedleAccuracy:
    """Score a model on the last questions of test sequences.

    ``seconds`` is the training time, stored in the result.
    """
    scored = slice(-_SCORED_BLOCKS * _BLOCK, None)
    values_BQ, places_BQ = sequences.values_BQ[:, scored], sequences.places_BQ[:, scored]
    right_BQ = (_answers(model, sequences, _SCORED_BLOCKS).argmax(-1) == values_BQ).float()
    facts_BQ = _fact_tokens(places_BQ)
    questions_Q = _fact_tokens(torch.arange(_BLOCKS * _BLOCK)[scored]) + _BLOCK
    # The first block is always selected, so facts in the first block do not test selection.
    first_BQ = places_BQ < _BLOCK
    far_BQ = (questions_Q - facts_BQ > _FAR_DISTANCE) & ~first_BQ
    drawn = _covers_by_chance(arm, questions_Q, facts_BQ)[far_BQ].float().mean().item()
    return NeedleAccuracy(
        far=right_BQ[far_BQ].mean().item(),
        luck=chance() + (1 - chance()) * drawn,
        first=right_BQ[first_BQ].mean().item(),
        seconds=seconds,
    )


def chance() -> float:
    """Return the accuracy of random guessing."""
    return 1 / _BLOCK


def to_markdown(found: dict[str, NeedleAccuracy]) -> str:
    """Return the results as a Markdown table, one row per arm."""
    rows = []
    for arm, f in found.items():
        percentages = [f"{100 * share:.1f}" for share in (f.far, f.luck, f.first)]
        rows.append((arm, *percentages, f"{f.seconds:.0f}"))
    header = ("", f"over {_FAR_DISTANCE} tokens", "by luck", "in the first block", "seconds")
    return (
        f"Accuracy in percent on facts over {_FAR_DISTANCE} tokens back and in the first block.\n"
        f"By luck: guessing (chance {100 * chance():.1f}), plus far facts in random blocks.\n\n"
        f"{markdown_table(header, rows)}"
    )


def _answers(model: GPT, sequences: NeedleSequences, blocks: int = _BLOCKS) -> Tensor:
    """Return the logits of the values at every question of the last ``blocks`` blocks, BQV."""
    hidden_BTC = model.hidden(sequences.idx_BT)
    questions_BQC = hidden_BTC.unflatten(1, (_BLOCKS, 2, _BLOCK))[:, -blocks:, 1].flatten(1, 2)
    return model.logits(questions_BQC)[..., _ANSWERS:]


def _fact_tokens(places: Tensor) -> Tensor:
    """Return the token positions in the sequence of facts given by index among all facts."""
    return 2 * _BLOCK * (places // _BLOCK) + places % _BLOCK


def _covers_by_chance(arm: str, questions_Q: Tensor, facts_BQ: Tensor) -> Tensor:
    """Return whether random selection of each question covers the block of its fact, BQ."""
    options = model_config(arm).attention.pattern
    assert isinstance(options, NsaOptions)
    if not options.branch_selected or options.ranks:
        return torch.zeros_like(facts_BQ, dtype=torch.bool)
    # The model has one layer and one key head.
    length = int(questions_Q[-1]) + 1
    blocks_Tn = random_blocks(options, 0, 1, 0, length, questions_Q.device)[0, 0]
    return (facts_BQ[..., None] // _BLOCK == blocks_Tn[questions_Q]).any(-1)
