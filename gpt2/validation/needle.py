"""``make needle``: does selection find what is far away?

Blocks of tokens tell values: a block has one key, and in a test every value stands in it once, at a
place that chance decides. After each block come questions for a key and a place. Where the answer
lies further back than the window and two blocks, nothing but a selected block leads there: a
compressed one is the mean of all values, whatever their order. The same model with blocks that are
drawn, and with the window alone, has to guess. A test counts what is asked late, when blocks are many:
few that are drawn hold the answer, and how few is known.

B batch, T tokens, K blocks told, l tokens of one, Q questions, V values, C n_embd.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from gpt2.ablation.resolve import resolve_config
from gpt2.attention.nsa.drawn import drawn_blocks
from gpt2.attention.nsa.options import NsaOptions
from gpt2.config import ModelConfig
from gpt2.model import GPT
from lib.binding import Value
from lib.kconfig import Layer, Tree

_BLOCK = 8
_BLOCKS = 16
# One layer, so that nothing can be handed on from window to window; one head; and an MLP too small to
# look anything up by itself.
MODEL: dict[str, Value] = {
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
_SELECTION: dict[str, Value] = {
    "NSA_COMPRESS_BLOCK": _BLOCK,
    "NSA_COMPRESS_STRIDE": _BLOCK,
    "NSA_SELECT_BLOCK": _BLOCK,
    "NSA_SELECT_COUNT": 4,
    "NSA_PHI_MEAN": True,
}
ARMS: dict[str, dict[str, Value]] = {
    "nsa": _SELECTION,
    "random blocks": {**_SELECTION, "NSA_SELECT_BY_RANDOM": True},
    "window only": {"NSA_BRANCH_COMPRESSED": False, "NSA_BRANCH_SELECTED": False},
}
# The window and two blocks.
_FAR = 3 * _BLOCK
# Told are triples of key, place and value; asked are key and place; then come the answers.
_TOLD = _BLOCKS * _BLOCK * _BLOCK
_ANSWERS = _TOLD + _BLOCKS * _BLOCK
_VOCAB = _ANSWERS + _BLOCK
STEPS = 400
_ROWS = 32
_LEARNING_RATE = 5e-3
_WARMUP = 20
# Learning rates fall over the last part of training.
_DECAY = 0.3
_TESTED = 512
# Of a test the questions in so many blocks count, the last.
_LATE = 2
# A line of progress comes this often.
_SECONDS = 5.0


@dataclass(frozen=True)
class Sequences:
    """Tokens BT; of each question, BQ, the value, and where it stands among all that are told."""

    idx_BT: Tensor
    values_BQ: Tensor
    places_BQ: Tensor


@dataclass(frozen=True)
class Found:
    """Shares of right answers to late questions.

    far    whose answers lie further back than the window and two blocks
    luck   far ones, of who sees the answer if a drawn block happens to hold it and guesses if not
    first  whose answers are in the first block, which is always selected
    """

    far: float
    luck: float
    first: float
    seconds: float


def draw(rows: int, generator: torch.Generator, *, test: bool = False) -> Sequences:
    """Fresh sequences: blocks of one key each and of any values, each before a block of questions.

    In a test every value stands once in a block, so that the mean of all says nothing. Training could
    not begin like that: attention that is spread evenly would have nothing to tell either.
    """
    keys_BK = torch.rand(rows, _BLOCKS, generator=generator).argsort(1)
    values_BKl = torch.randint(_BLOCK, (rows, _BLOCKS, _BLOCK), generator=generator)
    if test:
        values_BKl = torch.rand(rows, _BLOCKS, _BLOCK, generator=generator).argsort(2)
    within_l = torch.arange(_BLOCK)
    told_BKl = (keys_BK[..., None] * _BLOCK + within_l) * _BLOCK + values_BKl
    told_Q = (torch.arange(_BLOCKS * _BLOCK) // _BLOCK + 1) * _BLOCK
    places_BQ = (torch.rand(rows, len(told_Q), generator=generator) * told_Q).long()
    values_BQ = values_BKl.flatten(1).gather(1, places_BQ)
    keys_BQ = keys_BK.gather(1, places_BQ // _BLOCK)
    asked_BQ = _TOLD + keys_BQ * _BLOCK + places_BQ % _BLOCK
    idx_BT = torch.stack([told_BKl, asked_BQ.view_as(told_BKl)], 2).flatten(1)
    return Sequences(idx_BT, values_BQ, places_BQ)


def model_config(arm: str) -> ModelConfig:
    """Of one arm, with the task's vocabulary."""
    found = resolve_config(Tree(), [Layer.of("needle", "make needle", MODEL | ARMS[arm])]).model
    return replace(found, shape=replace(found.shape, vocab_size=_VOCAB))


def train(arm: str, steps: int, seed: int, tell: Callable[[str], None]) -> Found:
    """Train one arm on fresh sequences, and ask it."""
    model = GPT(model_config(arm))
    model.init_weights(seed)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=_LEARNING_RATE, betas=(0.9, 0.98), weight_decay=0.0
    )
    generator = torch.Generator().manual_seed(seed)
    started = told = time.monotonic()
    for step in range(1, steps + 1):
        rate = _LEARNING_RATE * min(1.0, step / _WARMUP, (steps - step + 1) / (_DECAY * steps))
        for group in optimizer.param_groups:
            group["lr"] = rate
        sequences = draw(_ROWS, generator)
        optimizer.zero_grad()
        logits_BQV = _answers(model, sequences)
        loss = F.cross_entropy(logits_BQV.flatten(0, 1), sequences.values_BQ.flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        now = time.monotonic()
        if now - told > _SECONDS or step == steps:
            left = (now - started) / step * (steps - step)
            tell(f"{arm}: step {step} of {steps}, loss {loss.item():.2f}, {left:.0f} s left")
            told = now
    found = ask(model, arm, draw(_TESTED, generator, test=True), time.monotonic() - started)
    tell(f"{arm}: {100 * found.far:.1f} % found, {100 * found.luck:.1f} % by luck")
    return found


@torch.no_grad()
def ask(model: GPT, arm: str, sequences: Sequences, seconds: float) -> Found:
    """What a model that was trained for ``seconds`` answers late in test sequences."""
    late = slice(-_LATE * _BLOCK, None)
    values_BQ, places_BQ = sequences.values_BQ[:, late], sequences.places_BQ[:, late]
    right_BQ = (_answers(model, sequences, _LATE).argmax(-1) == values_BQ).float()
    told_BQ = _token(places_BQ)
    asked_Q = _token(torch.arange(_BLOCKS * _BLOCK)[late]) + _BLOCK
    # The first block is always selected: what stands there is no needle.
    first_BQ = places_BQ < _BLOCK
    far_BQ = (asked_Q - told_BQ > _FAR) & ~first_BQ
    drawn = _draws(arm, asked_Q, told_BQ)[far_BQ].float().mean().item()
    return Found(
        far=right_BQ[far_BQ].mean().item(),
        luck=chance() + (1 - chance()) * drawn,
        first=right_BQ[first_BQ].mean().item(),
        seconds=seconds,
    )


def chance() -> float:
    """The share of right answers of who does not know."""
    return 1 / _BLOCK


def to_markdown(found: dict[str, Found]) -> str:
    """A row for each arm."""
    rows = [
        f"| {arm} | {100 * f.far:.1f} | {100 * f.luck:.1f} | {100 * f.first:.1f} | {f.seconds:.0f} |"
        for arm, f in found.items()
    ]
    head = [
        f"Right answers in percent, where the answer is over {_FAR} tokens back and in the first block.",
        f"By luck: chance, {100 * chance():.1f}, and the far answers that drawn blocks happen to hold.",
        "",
        f"| | over {_FAR} tokens | by luck | in the first block | seconds |",
        "|---|---:|---:|---:|---:|",
    ]
    return "\n".join([*head, *rows]) + "\n"


def _answers(model: GPT, sequences: Sequences, late: int = _BLOCKS) -> Tensor:
    """Logits of the values at every question of the last blocks, BQV."""
    hidden_BTC = model.hidden(sequences.idx_BT)
    asked_BQC = hidden_BTC.unflatten(1, (_BLOCKS, 2, _BLOCK))[:, -late:, 1].flatten(1, 2)
    return model.logits(asked_BQC)[..., _ANSWERS:]


def _token(places: Tensor) -> Tensor:
    """Where in the sequence a place among all that are told stands."""
    return 2 * _BLOCK * (places // _BLOCK) + places % _BLOCK


def _draws(arm: str, asked_Q: Tensor, told_BQ: Tensor) -> Tensor:
    """Whether token ``asked`` draws the block that token ``told`` is in, BQ."""
    options = model_config(arm).attention.pattern
    assert isinstance(options, NsaOptions)
    if not options.branch_selected or options.ranks:
        return torch.zeros_like(told_BQ, dtype=torch.bool)
    # Of the one layer and its one key head.
    blocks_Tn = drawn_blocks(options, 0, 1, 0, int(asked_Q[-1]) + 1, asked_Q.device)[0, 0]
    return (told_BQ[..., None] // _BLOCK == blocks_Tn[asked_Q]).any(-1)
