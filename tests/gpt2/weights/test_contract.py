"""The contract of transformers, on exports with their own code.

The cases are those of transformers' tests of its own models: an argument takes effect, or is refused
by name.
"""

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from gpt2.attention.config import GATES, PATTERNS, POSITIONS, PROJECTIONS, TERMS, TRANSFORMS
from gpt2.attention.projections import ZeroInitLinear
from gpt2.mlp.options import MECHANISMS
from gpt2.weights.hf import options_of
from tests.gpt2.weights.conftest import OWN_CODE, Exported, own_code

PADDING = 256
# Generated tokens.
NEW = 4
# Of a difference, as a fraction of the largest value.
TOLERANCE = 2e-5


def test_the_models_have_every_component(configure):
    built = {
        type(each).name
        for settings in OWN_CODE.values()
        for each in options_of(configure(**settings).model.attention)
        if "name" in vars(type(each))
    } | {
        type(each).name
        for settings in OWN_CODE.values()
        for each in configure(**settings).model.mlp.mechanisms
    }
    registries = (PROJECTIONS, PATTERNS, POSITIONS, TRANSFORMS, TERMS, GATES, MECHANISMS)
    assert {name for registry in registries for name in registry} <= built


def some_tokens(batch: int, length: int, seed: int = 0) -> Tensor:
    """Return random bytes [B, T]."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, PADDING, (batch, length), generator=generator)


def difference(found: Tensor, expected: Tensor) -> float:
    """Return the largest difference as a fraction of the largest expected value."""
    return float((found - expected).detach().abs().max() / expected.detach().abs().max())


Case = Callable[[Exported], float]
CASES: dict[str, Case] = {}


def case(function: Case) -> Case:
    """Add a case, which returns a difference from the expected values, 0 if it asserts all."""
    CASES[function.__name__] = function
    return function


def gradients(model: Any) -> Tensor:
    """Return all gradients as one vector, and remove them."""
    parts = [
        p.grad.flatten() if p.grad is not None else p.new_zeros(p.numel())
        for p in model.parameters()
    ]
    model.zero_grad()
    return torch.cat(parts)


@case
def accumulation(model: Exported) -> float:
    """Gradients of 8 sequences are those of one batch, as Trainer accumulates them."""
    theirs = model.theirs.train()
    labels_BT = some_tokens(8, 24)
    for row, length in enumerate((3, 24, 11, 24, 5, 20, 24, 9)):
        labels_BT[row, length:] = -100
    parameters = inspect.signature(theirs.forward).parameters.values()
    takes_items = vars(type(theirs)).get(
        "accepts_loss_kwargs", any(each.kind is each.VAR_KEYWORD for each in parameters)
    )
    found = []
    for steps in (1, 4, 8):
        loss = torch.zeros(())
        for part_BT in labels_BT.chunk(steps):
            inputs = {"input_ids": part_BT.clamp(min=0), "labels": part_BT}
            if takes_items:
                inputs["num_items_in_batch"] = (labels_BT[:, 1:] != -100).sum()
            part = theirs(**inputs).loss / (1 if takes_items else steps)
            part.backward()
            loss += part.detach()
        found.append((loss, gradients(theirs)))
    theirs.eval()
    assert found[0][1].any()
    return max(difference(a, b) for each in found[1:] for a, b in zip(each, found[0], strict=True))


LENGTHS = (5, 12, 9)


def padded(batch: int, side: str) -> tuple[Tensor, Tensor, Tensor]:
    """Return tokens, mask and positions of sequences padded to 14 tokens, one with a hole."""
    mask_BT = torch.zeros(batch, 14, dtype=torch.long)
    for row, length in enumerate(LENGTHS[:batch]):
        mask_BT[row, 14 - length if side == "left" else 0 : None if side == "left" else length] = 1
    if side == "hole":
        mask_BT[0] = torch.tensor([0, 0, 1, 1, 1, 0, 0, 0, 1, 1, 0, 1, 0, 0])
    idx_BT = some_tokens(batch, 14).where(mask_BT.bool(), torch.tensor(PADDING))
    return idx_BT, mask_BT, (mask_BT.cumsum(1) - 1).clamp(min=0)


def padding_on(model: Exported, side: str) -> float:
    """Return the difference of padded sequences from each alone."""
    worst = 0.0
    for batch in (1, 2, 3):
        idx_BT, mask_BT, position_BT = padded(batch, side)
        inputs = {"input_ids": idx_BT, "attention_mask": mask_BT}
        found = [
            model.theirs(**inputs).logits,
            model.theirs(**inputs, position_ids=position_BT).logits,
        ]
        with torch.no_grad():
            found += [model.theirs(**inputs, use_cache=on).logits for on in (False, True)]
        for row in range(batch):
            here_T = mask_BT[row].bool()
            expected_TV = model.ours(idx_BT[row, here_T][None])[0]
            for logits_BTV in found:
                assert torch.isfinite(logits_BTV).all()
                worst = max(worst, difference(logits_BTV[row, here_T], expected_TV))
    return worst


@case
def padding(model: Exported) -> float:
    """Padding on the left, on the right and between tokens, as of prompts, changes nothing."""
    return max(padding_on(model, side) for side in ("left", "right", "hole"))


@case
def arguments(model: Exported) -> float:
    """Each argument of GPT-2 takes effect or is refused by name."""
    theirs, idx_BT = model.theirs, some_tokens(2, 11)
    refused: list[tuple[str, dict[str, Any]]] = [
        ("position_ids", {"position_ids": torch.arange(11)[None] + 1}),
        ("output_attentions", {"output_attentions": True}),
        ("past_key_values", {"past_key_values": ((idx_BT, idx_BT),)}),
        ("attention_mask", {"attention_mask": torch.ones(2, 10)}),
        ("attention_mask", {"attention_mask": torch.full((2, 11), -1e9)}),
        ("attention_mask", {"attention_mask": torch.ones(2, 1, 11, 11)}),
        ("inputs_embeds", {"inputs_embeds": theirs.get_input_embeddings()(idx_BT)}),
        ("logits_to_keep", {"logits_to_keep": 2, "labels": idx_BT}),
        ("token_type_ids", {"token_type_ids": idx_BT}),
        ("head_mask", {"head_mask": torch.ones(3, 4)}),
        ("atention_mask", {"atention_mask": torch.ones(2, 11)}),
    ]
    for name, settings in refused:
        with pytest.raises((ValueError, TypeError), match=name):
            theirs(input_ids=idx_BT, **settings)
    with pytest.raises(ValueError, match="inputs_embeds"):
        theirs()
    with pytest.raises(ValueError, match="input_ids: 81 tokens"):
        theirs(input_ids=some_tokens(1, 81))
    whole = theirs(input_ids=idx_BT)
    assert whole.hidden_states is None and whole.loss is None and whole.past_key_values
    assert theirs(input_ids=idx_BT, use_cache=False).past_key_values is None
    last = theirs(input_ids=idx_BT, logits_to_keep=1).logits
    some = theirs(input_ids=idx_BT, logits_to_keep=torch.tensor([2, 5])).logits
    outputs = theirs(input_ids=idx_BT, return_dict=False, use_cache=False)
    assert type(outputs) is tuple and len(outputs) == 1
    assert last.shape == (2, 1, 257) and some.shape == (2, 2, 257)
    embedded = theirs(inputs_embeds=theirs.get_input_embeddings()(idx_BT)).logits
    pairs = [
        (last, whole.logits[:, -1:]),
        (some, whole.logits[:, [2, 5]]),
        (embedded, whole.logits),
        (outputs[0], whole.logits),
    ]
    return max(difference(*pair) for pair in pairs)


@case
def defaults_of_the_configuration(model: Exported) -> float:
    """The settings of config.json are those of calls; sizes of the weights cannot be changed."""
    theirs, idx_BT = model.theirs, some_tokens(1, 7)
    config = theirs.config
    config.use_cache, config.output_hidden_states, config.return_dict = False, True, False
    outputs = theirs(input_ids=idx_BT)
    config.use_cache, config.output_hidden_states, config.return_dict = True, False, True
    # Logits and hidden states.
    assert type(outputs) is tuple and len(outputs) == 2
    assert config.pad_token_id == config.eos_token_id == PADDING
    for name, value in (("hidden_size", 8), ("num_hidden_layers", 1), ("vocab_size", 9)):
        with pytest.raises(ValueError, match=name):
            own_code(model.folder, **{name: value})
    with pytest.raises(ValueError, match="tie_word_embeddings"):
        own_code(model.folder, tie_word_embeddings=False)
    with pytest.raises(ValueError, match="set_output_embeddings"):
        theirs.set_output_embeddings(torch.nn.Linear(3, 3))
    return 0.0


@case
def hidden_states(model: Exported) -> float:
    """Hidden states are the inputs of the blocks and of the head, with gradients."""
    theirs, idx_BT = model.theirs, some_tokens(2, 9)
    output = theirs(input_ids=idx_BT, output_hidden_states=True)
    states = output.hidden_states
    shape = model.ours.config.shape
    assert len(states) == shape.n_layer + 1
    assert all(state.shape == (2, 9, shape.n_embd) for state in states)
    states[0].retain_grad()
    states[-1].retain_grad()
    output.logits[0].mean().backward()
    assert states[0].grad[0].any() and states[-1].grad[0].any() and not states[0].grad[1].any()
    theirs.zero_grad()
    expected = model.ours.hidden(idx_BT)
    with torch.no_grad():
        padded_BT, mask_BT, _ = padded(2, "left")
        inputs = {"input_ids": padded_BT, "attention_mask": mask_BT, "output_hidden_states": True}
        cached, plain = (theirs(**inputs, use_cache=on).hidden_states for on in (True, False))
    return max(
        difference(states[-1], expected),
        *(difference(a, b) for a, b in zip(cached, plain, strict=True)),
    )


@case
def loss(model: Exported) -> float:
    """Labels are shifted, −100 is ignored, and the gradient is that of the trained model's loss."""
    theirs, labels_BT = model.theirs, some_tokens(3, 16)
    labels_BT[0, 5:9] = -100
    labels_BT[2, :] = -100
    idx_BT = labels_BT.clamp(min=0)
    found = theirs(input_ids=idx_BT, labels=labels_BT).loss
    found.backward()
    expected = model.ours(idx_BT[:, :-1], labels_BT[:, 1:])
    expected.backward()
    vocabulary = theirs.config.vocab_size
    ours = {name: p.grad for name, p in model.ours.named_parameters() if p.grad is not None}
    ours["wte.weight"] = ours["wte.weight"][:vocabulary]
    pairs = [
        (p.grad, ours[n.removeprefix("transformer.")])
        for n, p in theirs.named_parameters()
        if p.grad is not None
    ]
    assert len(pairs) == len(ours)
    worst = difference(
        *(torch.cat([g.flatten() for g in each]) for each in zip(*pairs, strict=True))
    )
    theirs.zero_grad()
    model.ours.zero_grad()
    return max(difference(found, expected), worst)


@case
def gradients_with_a_cache(model: Exported) -> float:
    """The cache, which generation reads, takes no gradient away; nor does a continuation."""
    theirs, idx_BT = model.theirs, some_tokens(2, 12)
    mask_BT = torch.ones(2, 12, dtype=torch.long)
    mask_BT[1, :4] = 0
    found = []
    for on in (False, True):
        logits = theirs(input_ids=idx_BT, attention_mask=mask_BT, use_cache=on).logits
        logits[:, -1].square().mean().backward()
        found.append(gradients(theirs))
    first = theirs(input_ids=idx_BT[:, :8], attention_mask=mask_BT[:, :8], use_cache=True)
    cache = first.past_key_values
    logits = theirs(input_ids=idx_BT[:, 8:], attention_mask=mask_BT, past_key_values=cache).logits
    logits[:, -1].square().mean().backward()
    found.append(gradients(theirs))
    return max(difference(each, found[0]) for each in found[1:])


@case
def gradient_checkpointing(model: Exported) -> float:
    """Recomputation gives the same gradients; its other forms are refused."""
    theirs, idx_BT = model.theirs.train(), some_tokens(2, 12)
    found = []
    for on in (False, True):
        if on:
            theirs.gradient_checkpointing_enable()
        assert theirs.is_gradient_checkpointing == on
        theirs(input_ids=idx_BT, labels=idx_BT).loss.backward()
        found.append(gradients(theirs))
    theirs.gradient_checkpointing_disable()
    assert not theirs.is_gradient_checkpointing
    with pytest.raises(ValueError, match="use_reentrant"):
        theirs.gradient_checkpointing_enable({"use_reentrant": True})
    theirs.eval()
    return difference(found[1], found[0])


@case
def continuation(model: Exported) -> float:
    """Tokens in several calls give the logits of one, with padding and in another order."""
    theirs = model.theirs
    idx_BT, mask_BT, _ = padded(3, "left")
    worst = 0.0
    with torch.no_grad():
        for mask in (None, mask_BT, torch.cat([mask_BT[:, :6], mask_BT[:, 6:].flip(1)], 1)):
            whole = theirs(input_ids=idx_BT, attention_mask=mask, use_cache=False).logits
            cache, parts = None, []
            for first, last in ((0, 6), (6, 7), (7, 13), (13, 14)):
                output = theirs(
                    input_ids=idx_BT[:, first:last],
                    attention_mask=None if mask is None else mask[:, :last],
                    past_key_values=cache,
                    use_cache=True,
                )
                cache = output.past_key_values
                parts.append(output.logits)
            assert cache.get_seq_length() == 14
            worst = max(worst, difference(torch.cat(parts, 1), whole))
            cache.reorder_cache(torch.tensor([2, 0, 0]))
            more = {"input_ids": idx_BT[[2, 0, 0], :3], "past_key_values": cache}
            after = theirs(**more).logits
            order = [2, 0, 0]
            longer = torch.cat([idx_BT[order], idx_BT[order, :3]], 1)
            wide = None if mask is None else torch.cat([mask[order], mask.new_ones(3, 3)], 1)
            expected = theirs(input_ids=longer, attention_mask=wide, use_cache=False).logits[:, -3:]
            worst = max(worst, difference(after, expected))
        with pytest.raises(ValueError, match="past_key_values"):
            other = 1 - torch.ones(3, 18).cumsum(1).eq(2).long()
            theirs(input_ids=idx_BT[:, :1], attention_mask=other, past_key_values=cache)
    return worst


@case
def generation(model: Exported) -> float:
    """Greedy decoding, sampling and beams are the same with and without a cache."""
    theirs = model.theirs
    idx_BT, mask_BT, _ = padded(3, "left")
    base = {"max_new_tokens": NEW, "eos_token_id": None, "attention_mask": mask_BT}
    for settings in (
        {"do_sample": False},
        {"do_sample": True, "top_k": 20},
        {"do_sample": False, "num_beams": 3, "num_return_sequences": 2},
    ):
        found = []
        for on in (True, False):
            torch.manual_seed(3)
            found.append(theirs.generate(idx_BT, use_cache=on, **base, **settings))
        assert torch.equal(*found), settings
        assert found[0].shape[1] == 14 + NEW
    greedy_BT = theirs.generate(idx_BT, do_sample=False, **base)
    embedded = theirs.get_input_embeddings()(idx_BT)
    found_BT = theirs.generate(inputs_embeds=embedded, do_sample=False, **base)
    assert torch.equal(found_BT[:, -NEW:], greedy_BT[:, 14:])
    for row, length in enumerate(LENGTHS):
        # Without the code of the export.
        alone = idx_BT[row, -length:]
        for _ in range(NEW):
            with torch.no_grad():
                alone = torch.cat([alone, model.ours(alone[None])[0, -1:].argmax(-1)])
        assert torch.equal(alone[-NEW:], greedy_BT[row, 14:])
    output = theirs.generate(
        idx_BT, do_sample=False, return_dict_in_generate=True, output_hidden_states=True, **base
    )
    more = {"max_new_tokens": 2, "eos_token_id": None, "do_sample": False}
    wide = torch.cat([mask_BT, mask_BT.new_ones(3, NEW)], 1)
    again = theirs.generate(
        output.sequences, past_key_values=output.past_key_values, attention_mask=wide, **more
    )
    assert torch.equal(again, theirs.generate(output.sequences, attention_mask=wide, **more))
    assert len(output.hidden_states) == NEW
    for name, settings in (
        ("max_tokens", {"max_tokens": 3}),
        ("stateful", {"prompt_lookup_num_tokens": 2}),
    ):
        with pytest.raises(ValueError, match=name):
            theirs.generate(idx_BT[:1, -5:], **settings)
    return 0.0


@case
def saving(model: Exported) -> float:
    """A saved model is the same in a new folder, and so is one with more tokens."""
    idx_BT = some_tokens(2, 10)
    theirs = own_code(model.folder)
    expected = theirs(input_ids=idx_BT).logits
    folder = model.folder.parent / "saved"
    theirs.save_pretrained(folder)
    again = own_code(folder)(input_ids=idx_BT).logits
    embedding = theirs.resize_token_embeddings(264)
    assert embedding.num_embeddings == theirs.config.vocab_size == 264
    more = theirs(input_ids=idx_BT + 7, labels=idx_BT)
    assert more.logits.shape == (2, 10, 264) and more.loss.isfinite()
    wide = theirs(input_ids=idx_BT).logits[..., :257]
    theirs.save_pretrained(folder)
    saved = own_code(folder)
    assert torch.equal(saved(input_ids=idx_BT + 7).logits, more.logits)
    saved.resize_token_embeddings(200)
    fewer = saved(input_ids=idx_BT.clamp(max=199)).logits
    assert torch.equal(
        fewer, own_code(model.folder)(input_ids=idx_BT.clamp(max=199)).logits[..., :200]
    )
    return max(difference(again, expected), difference(wide, expected))


@case
def half_precision(model: Exported) -> float:
    """A model in bf16 and in fp16 computes, generates and trains; it stays close to fp32."""
    idx_BT, mask_BT, _ = padded(2, "left")
    inputs = {"input_ids": idx_BT, "attention_mask": mask_BT}
    expected = model.theirs(**inputs).logits
    for dtype, tolerance in ((torch.bfloat16, 0.2), (torch.float16, 0.03)):
        theirs = own_code(model.folder, dtype=dtype)
        output = theirs(**inputs, labels=idx_BT)
        output.loss.backward()
        assert output.logits.dtype == dtype and gradients(theirs).isfinite().all()
        assert difference(output.logits.float(), expected) < tolerance
        assert theirs.generate(**inputs, max_new_tokens=3, eos_token_id=None).shape == (2, 17)
    return 0.0


@case
def initialization(model: Exported) -> float:
    """A new model of the configuration starts as a trained one does: new branches at zero."""
    new = type(model.theirs)(model.theirs.config)
    zeros = [each for each in new.modules() if type(each).__name__ == ZeroInitLinear.__name__]
    assert not any(each.weight.any() for each in zeros)
    assert new(input_ids=some_tokens(1, 5)).logits.isfinite().all()
    assert next(iter(inspect.signature(new.forward).parameters)) == "input_ids"
    return 0.0


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_an_export_keeps_the_contract(exported, name):
    assert CASES[name](exported) < TOLERANCE
