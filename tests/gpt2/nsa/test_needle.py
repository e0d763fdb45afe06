"""A retrieval task that only block selection solves: facts beyond the window, asked for late.

A sequence alternates fact blocks and question blocks. A fact block assigns a value to each position
of one key, and a question names key and position. In a test every value occurs once per block, so
that the mean of a block says nothing. Training values are drawn independently: uniform attention
has to learn something first.
"""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from gpt2.model import GPT
from gpt2.nsa.select import random_blocks
from gpt2.study.resolve import resolve_config
from lib.config.layers import ConfigLayer
from lib.config.tree import KconfigTree

SIZE, BLOCKS = 8, 16
FACTS = BLOCKS * SIZE * SIZE
ANSWERS = FACTS + BLOCKS * SIZE
# One layer, so that nothing travels from window to window, and an MLP too small to memorize facts.
MODEL = {
    "MODEL_SIZE_CUSTOM": True,
    "N_LAYER": 1,
    "N_HEAD": 1,
    "N_EMBD": 64,
    "N_KV_HEAD": 1,
    "BLOCK_SIZE": 2 * SIZE * BLOCKS,
    "DROPOUT": "0.0",
    "TOKENIZER_BYTE": True,
    "MLP_SIZING_HIDDEN": True,
    "MLP_HIDDEN": 1,
    "ATTENTION_PROJECTION_GROUPED": True,
    "ATTENTION_PATTERN_NSA": True,
    "NSA_WINDOW": SIZE,
}
SELECTION = {
    "NSA_COMPRESS_BLOCK": SIZE,
    "NSA_COMPRESS_STRIDE": SIZE,
    "NSA_SELECT_BLOCK": SIZE,
    "NSA_SELECT_COUNT": 4,
    "NSA_PHI_MEAN": True,
}
ARMS = {
    "nsa": SELECTION,
    "random blocks": SELECTION | {"NSA_SELECT_BY_RANDOM": True},
    "window only": {"NSA_BRANCH_COMPRESSED": False, "NSA_BRANCH_SELECTED": False},
}
STEPS, RATE = 400, 5e-3


def sequences(rows, generator, test=False):
    """Return tokens BT, and of each question the value and the index of its fact, BQ."""
    keys_BK = torch.rand(rows, BLOCKS, generator=generator).argsort(1)
    values_BKl = torch.randint(SIZE, (rows, BLOCKS, SIZE), generator=generator)
    if test:
        values_BKl = torch.rand(rows, BLOCKS, SIZE, generator=generator).argsort(2)
    facts_BKl = (keys_BK[..., None] * SIZE + torch.arange(SIZE)) * SIZE + values_BKl
    earlier_Q = (torch.arange(BLOCKS * SIZE) // SIZE + 1) * SIZE
    places_BQ = (torch.rand(rows, len(earlier_Q), generator=generator) * earlier_Q).long()
    asked_BQ = FACTS + keys_BK.gather(1, places_BQ // SIZE) * SIZE + places_BQ % SIZE
    idx_BT = torch.stack([facts_BKl, asked_BQ.view_as(facts_BKl)], 2).flatten(1)
    return idx_BT, values_BKl.flatten(1).gather(1, places_BQ), places_BQ


def answers(model, idx_BT, blocks=BLOCKS):
    """Return the logits of the values at the questions of the last blocks, BQV."""
    hidden_BTC = model.hidden(idx_BT).unflatten(1, (BLOCKS, 2, SIZE))
    return model.logits(hidden_BTC[:, -blocks:, 1].flatten(1, 2))[..., ANSWERS:]


def accuracy(arm):
    """Train an arm; return its accuracy on far facts, and that of guesses and random blocks."""
    layers = [ConfigLayer.of("test", "test", MODEL | ARMS[arm])]
    config = resolve_config(KconfigTree(), layers).model
    config = replace(config, shape=replace(config.shape, vocab_size=ANSWERS + SIZE))
    model, generator = GPT(config), torch.Generator().manual_seed(0)
    model.init_weights(0)
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.98), weight_decay=0.0)
    for step in range(1, STEPS + 1):
        optimizer.param_groups[0]["lr"] = RATE * min(
            1.0, step / 20, (STEPS - step + 1) / (0.3 * STEPS)
        )
        idx_BT, values_BQ, _ = sequences(32, generator)
        optimizer.zero_grad()
        F.cross_entropy(answers(model, idx_BT).flatten(0, 1), values_BQ.flatten()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    idx_BT, values_BQ, places_BQ = sequences(512, generator, test=True)
    # Among many blocks, random ones rarely cover the answer.
    late = slice(-2 * SIZE, None)
    values_BQ, places_BQ = values_BQ[:, late], places_BQ[:, late]
    questions_Q = torch.arange(BLOCKS * SIZE)[late]
    questions_Q = 2 * SIZE * (questions_Q // SIZE) + questions_Q % SIZE + SIZE
    facts_BQ = 2 * SIZE * (places_BQ // SIZE) + places_BQ % SIZE
    # Beyond the window and two blocks; the first block is always selected.
    far_BQ = (questions_Q - facts_BQ > 3 * SIZE) & (places_BQ >= SIZE)
    with torch.no_grad():
        right_BQ = answers(model, idx_BT, 2).argmax(-1) == values_BQ
    luck, options = 0.0, config.attention.pattern
    if options.select_by == "random":
        drawn_Tn = random_blocks(options, 0, 1, 0, idx_BT.shape[1], idx_BT.device)[0, 0]
        covered_BQ = (facts_BQ[..., None] // SIZE == drawn_Tn[questions_Q]).any(-1)
        luck = covered_BQ[far_BQ].float().mean().item()
    return right_BQ[far_BQ].float().mean().item(), 1 / SIZE + (1 - 1 / SIZE) * luck


@pytest.mark.long
@pytest.mark.parametrize("arm", ARMS)
def test_selection_finds_what_chance_and_a_window_do_not(arm):
    found, luck = accuracy(arm)
    if arm == "nsa":
        assert found > 0.95
    else:
        # 6900 questions: 2 points are four standard errors.
        assert abs(found - luck) < 0.02 and found < 1 / SIZE + 0.05
