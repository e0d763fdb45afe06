"""The contract of transformers, on exports with their own code.

The cases are those of transformers' tests of its own models: an argument takes effect, or is refused
by name. What depends on no component is tested on one model.
"""

import inspect
from typing import Any

import pytest
import torch
from torch import Tensor

from gpt2.attention.config import REGISTRIES
from gpt2.mlp.options import MECHANISMS
from gpt2.model_config import NORMS
from gpt2.weights.hf import options_of
from tests.gpt2.builders import needs_bitsandbytes
from tests.gpt2.weights.conftest import OWN_CODE, own_code

pytestmark = pytest.mark.slow
PADDING = 256
LENGTH = 14
# Generated tokens.
NEW = 3
# Of a difference, as a fraction of the largest value.
TOLERANCE = 2e-5


def on(model: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("exported", [model], indirect=True)


def test_the_models_have_every_component(configure):
    models = [configure(**settings).model for settings in OWN_CODE.values()]
    parts = [part for model in models for part in options_of(model)]
    built = {type(part).name for part in parts if "name" in vars(type(part))}
    assert {name for registry in (*REGISTRIES, MECHANISMS, NORMS) for name in registry} <= built


def some_tokens(batch: int, length: int = LENGTH) -> Tensor:
    """Return random bytes [B, T]."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, PADDING, (batch, length), generator=generator)


def difference(found: Tensor, expected: Tensor) -> float:
    """Return the largest difference as a fraction of the largest expected value."""
    return float((found - expected).detach().abs().max() / expected.detach().abs().max())


def assert_near(found: Tensor, expected: Tensor) -> None:
    assert difference(found, expected) < TOLERANCE


def gradients(model: Any) -> Tensor:
    """Return all gradients as one vector, and remove them."""
    parts = [
        p.grad.flatten() if p.grad is not None else p.new_zeros(p.numel())
        for p in model.parameters()
    ]
    model.zero_grad()
    return torch.cat(parts)


def padded(*rows: slice | list[int]) -> dict[str, Tensor]:
    """Return tokens and mask of sequences whose tokens are at the places ``rows``."""
    mask_BT = torch.zeros(len(rows), LENGTH, dtype=torch.long)
    for mask_T, places in zip(mask_BT, rows, strict=True):
        mask_T[places] = 1
    idx_BT = some_tokens(len(rows)).where(mask_BT.bool(), torch.tensor(PADDING))
    return {"input_ids": idx_BT, "attention_mask": mask_BT}


LEFT, RIGHT = slice(9, None), slice(0, 12)
HOLES = [2, 3, 4, 8, 9, 11]


@on("sliding")
def test_accumulated_gradients_are_those_of_one_batch(exported):
    theirs = exported.theirs.train()
    labels_BT = some_tokens(8, 24)
    for row, length in enumerate((3, 24, 11, 24, 5, 20, 24, 9)):
        labels_BT[row, length:] = -100
    assert type(theirs).accepts_loss_kwargs
    items = (labels_BT[:, 1:] != -100).sum()
    found = []
    for steps in (1, 4):
        for part_BT in labels_BT.chunk(steps):
            inputs = {"input_ids": part_BT.clamp(min=0), "labels": part_BT}
            theirs(**inputs, num_items_in_batch=items).loss.backward()
        found.append(gradients(theirs))
    theirs.eval()
    assert_near(found[1], found[0])


@pytest.mark.parametrize(
    "exported",
    [
        *OWN_CODE,
        "adapted-fp32",
        "adapted-int8",
        pytest.param("adapted-nf4", marks=needs_bitsandbytes),
    ],
    indirect=True,
)
def test_padding_changes_nothing(exported):
    """On the left, on the right and between tokens, with positions and a cache or without."""
    for rows in ([LEFT], [LEFT, RIGHT, HOLES, slice(None)]):
        inputs = padded(*rows)
        mask_BT = inputs["attention_mask"]
        positions_BT = (mask_BT.cumsum(1) - 1).clamp(min=0)
        found = [exported.theirs(**inputs, position_ids=positions_BT).logits]
        with torch.no_grad():
            found += [exported.theirs(**inputs, use_cache=use).logits for use in (False, True)]
        for row, mask_T in enumerate(mask_BT.bool()):
            expected_TV = exported.ours(inputs["input_ids"][row, mask_T][None])[0]
            for logits_BTV in found:
                assert torch.isfinite(logits_BTV).all()
                assert_near(logits_BTV[row, mask_T], expected_TV)


REFUSED: list[tuple[str, dict[str, Any]]] = [
    ("position_ids", {"position_ids": torch.arange(11)[None] + 1}),
    ("output_attentions", {"output_attentions": True}),
    ("past_key_values", {"past_key_values": ((some_tokens(2, 11), some_tokens(2, 11)),)}),
    ("attention_mask", {"attention_mask": torch.ones(2, 10)}),
    ("attention_mask", {"attention_mask": torch.full((2, 11), -1e9)}),
    ("attention_mask", {"attention_mask": torch.ones(2, 1, 11, 11)}),
    ("inputs_embeds", {"inputs_embeds": torch.zeros(2, 11, 32)}),
    ("inputs_embeds", {"input_ids": None}),
    ("logits_to_keep", {"logits_to_keep": 2, "labels": some_tokens(2, 11)}),
    ("token_type_ids", {"token_type_ids": some_tokens(2, 11)}),
    ("head_mask", {"head_mask": torch.ones(3, 4)}),
    ("atention_mask", {"atention_mask": torch.ones(2, 11)}),
    ("input_ids: 81 tokens", {"input_ids": some_tokens(1, 81)}),
]


@on("sliding")
@pytest.mark.parametrize(("name", "settings"), REFUSED)
def test_an_argument_without_effect_is_refused_by_name(exported, name, settings):
    with pytest.raises((ValueError, TypeError), match=name):
        exported.theirs(**({"input_ids": some_tokens(2, 11)} | settings))


@on("sliding")
def test_arguments_take_effect(exported):
    theirs, idx_BT = exported.theirs, some_tokens(2)
    whole = theirs(input_ids=idx_BT)
    assert whole.hidden_states is None and whole.loss is None and whole.past_key_values
    assert theirs(input_ids=idx_BT, use_cache=False).past_key_values is None
    outputs = theirs(input_ids=idx_BT, return_dict=False, use_cache=False)
    assert type(outputs) is tuple and len(outputs) == 1
    assert_near(outputs[0], whole.logits)
    assert_near(theirs(input_ids=idx_BT, logits_to_keep=1).logits, whole.logits[:, -1:])
    places = torch.tensor([2, 5])
    assert_near(theirs(input_ids=idx_BT, logits_to_keep=places).logits, whole.logits[:, places])
    embedded = theirs.get_input_embeddings()(idx_BT)
    assert_near(theirs(inputs_embeds=embedded).logits, whole.logits)
    assert next(iter(inspect.signature(theirs.forward).parameters)) == "input_ids"


@on("sliding")
def test_the_settings_of_the_configuration_are_those_of_calls(exported):
    theirs, config = exported.theirs, exported.theirs.config
    config.use_cache, config.output_hidden_states, config.return_dict = False, True, False
    outputs = theirs(input_ids=some_tokens(1))
    config.use_cache, config.output_hidden_states, config.return_dict = True, False, True
    # Logits and hidden states.
    assert type(outputs) is tuple and len(outputs) == 2
    assert config.pad_token_id == config.eos_token_id == PADDING
    with pytest.raises(ValueError, match="set_output_embeddings"):
        theirs.set_output_embeddings(torch.nn.Linear(3, 3))


@on("sliding")
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("hidden_size", 8),
        ("num_hidden_layers", 1),
        ("vocab_size", 9),
        ("tie_word_embeddings", False),
    ],
)
def test_what_the_weights_fix_cannot_be_changed(exported, name, value):
    with pytest.raises(ValueError, match=name):
        own_code(exported.folder, **{name: value})


@on("everything")
def test_hidden_states_are_the_inputs_of_blocks_and_head_with_gradients(exported):
    theirs, idx_BT = exported.theirs, some_tokens(2)
    output = theirs(input_ids=idx_BT, output_hidden_states=True)
    states = output.hidden_states
    shape = exported.ours.config.shape
    assert [state.shape for state in states] == [(2, LENGTH, shape.n_embd)] * (shape.n_layer + 1)
    states[0].retain_grad()
    states[-1].retain_grad()
    output.logits[0].mean().backward()
    assert states[0].grad[0].any() and states[-1].grad[0].any() and not states[0].grad[1].any()
    theirs.zero_grad()
    assert_near(states[-1], exported.ours.hidden(idx_BT))
    with torch.no_grad():
        inputs = padded(LEFT, RIGHT) | {"output_hidden_states": True}
        cached, plain = (theirs(**inputs, use_cache=use).hidden_states for use in (True, False))
    for found, expected in zip(cached, plain, strict=True):
        assert_near(found, expected)


def test_the_loss_and_its_gradient_are_those_of_training(exported):
    """Labels are shifted, and −100 is ignored."""
    theirs, labels_BT = exported.theirs, some_tokens(3)
    labels_BT[0, 5:9] = -100
    labels_BT[2, :] = -100
    idx_BT = labels_BT.clamp(min=0)
    found = theirs(input_ids=idx_BT, labels=labels_BT).loss
    found.backward()
    expected = exported.ours(idx_BT[:, :-1], labels_BT[:, 1:])
    expected.backward()
    assert_near(found, expected)
    ours = {name: p.grad for name, p in exported.ours.named_parameters() if p.grad is not None}
    for name in ours.keys() & {"wte.weight", "lm_head.weight"}:
        ours[name] = ours[name][: theirs.config.vocab_size]
    names = {n.removeprefix("transformer."): p.grad for n, p in theirs.named_parameters()}
    pairs = [(grad, ours.pop(name)) for name, grad in names.items() if grad is not None]
    assert not ours
    assert_near(*(torch.cat([g.flatten() for g in each]) for each in zip(*pairs, strict=True)))
    theirs.zero_grad()
    exported.ours.zero_grad()


@on("everything")
def test_a_cache_takes_no_gradient_away(exported):
    """Nor does a continuation."""
    theirs, inputs = exported.theirs, padded(slice(None), slice(4, None))
    found = []
    for use in (False, True):
        whole = theirs(**inputs, use_cache=use).logits
        whole[:, -1].square().mean().backward()
        found.append(gradients(theirs))
    first = {name: tensor[:, :8] for name, tensor in inputs.items()}
    cache = theirs(**first, use_cache=True).past_key_values
    inputs["input_ids"] = inputs["input_ids"][:, 8:]
    logits = theirs(**inputs, past_key_values=cache).logits
    assert_near(logits, whole[:, 8:])
    logits[:, -1].square().mean().backward()
    assert_near(found[1], found[0])
    assert_near(gradients(theirs), found[0])


@on("everything")
def test_recomputed_activations_give_the_same_gradients(exported):
    """Their other forms are refused."""
    theirs, idx_BT = exported.theirs.train(), some_tokens(2)
    found = []
    for recomputed in (False, True):
        if recomputed:
            theirs.gradient_checkpointing_enable()
        assert theirs.is_gradient_checkpointing == recomputed
        theirs(input_ids=idx_BT, labels=idx_BT).loss.backward()
        found.append(gradients(theirs))
    theirs.gradient_checkpointing_disable()
    assert not theirs.is_gradient_checkpointing
    with pytest.raises(ValueError, match="use_reentrant"):
        theirs.gradient_checkpointing_enable({"use_reentrant": True})
    theirs.eval()
    assert_near(found[1], found[0])


@torch.no_grad()
def test_tokens_in_several_calls_give_the_logits_of_one(exported):
    """With padding and in another order."""
    theirs = exported.theirs
    inputs = padded(LEFT, RIGHT, HOLES)
    idx_BT, order = inputs["input_ids"], [2, 0, 0]
    for mask in (None, inputs["attention_mask"]):
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
        assert cache.get_seq_length() == LENGTH
        assert_near(torch.cat(parts, 1), whole)
        cache.reorder_cache(torch.tensor(order))
        after = theirs(input_ids=idx_BT[order, :3], past_key_values=cache).logits
        longer = torch.cat([idx_BT[order], idx_BT[order, :3]], 1)
        wide = None if mask is None else torch.cat([mask[order], mask.new_ones(3, 3)], 1)
        expected = theirs(input_ids=longer, attention_mask=wide, use_cache=False).logits
        assert_near(after, expected[:, -3:])
    with pytest.raises(ValueError, match="past_key_values"):
        other = 1 - torch.ones(3, LENGTH + 4).cumsum(1).eq(2).long()
        theirs(input_ids=idx_BT[:, :1], attention_mask=other, past_key_values=cache)


GREEDY = {"max_new_tokens": NEW, "eos_token_id": None, "do_sample": False}


@torch.no_grad()
def test_greedy_decoding_is_that_of_the_model_without_the_code_of_the_export(exported):
    inputs = padded(LEFT, slice(2, None))
    found_BT = exported.theirs.generate(**inputs, **GREEDY)
    for row, mask_T in enumerate(inputs["attention_mask"].bool()):
        alone = inputs["input_ids"][row, mask_T]
        for _ in range(NEW):
            alone = torch.cat([alone, exported.ours(alone[None])[0, -1:].argmax(-1)])
        assert torch.equal(alone[-NEW:], found_BT[row, LENGTH:])


@on("sliding")
def test_generation(exported):
    """Beams without a cache, embeddings, and the continuation of what was generated."""
    theirs, inputs = exported.theirs, padded(LEFT, slice(2, None))
    beams = GREEDY | {"num_beams": 3, "num_return_sequences": 2}
    found = [theirs.generate(**inputs, **beams, use_cache=use) for use in (True, False)]
    assert torch.equal(*found) and found[0].shape == (4, LENGTH + NEW)

    more = {"return_dict_in_generate": True, "output_hidden_states": True}
    output = theirs.generate(**inputs, **GREEDY, **more)
    assert len(output.hidden_states) == NEW
    mask_BT = inputs["attention_mask"]
    embedded = theirs.get_input_embeddings()(inputs["input_ids"])
    from_embedded = theirs.generate(inputs_embeds=embedded, attention_mask=mask_BT, **GREEDY)
    assert torch.equal(from_embedded[:, -NEW:], output.sequences[:, LENGTH:])
    wide = torch.cat([mask_BT, mask_BT.new_ones(2, NEW)], 1)
    again = [
        theirs.generate(output.sequences, attention_mask=wide, past_key_values=cache, **GREEDY)
        for cache in (output.past_key_values, None)
    ]
    assert torch.equal(*again)
    for name, settings in (
        ("max_tokens", {"max_tokens": 3}),
        ("stateful", {"prompt_lookup_num_tokens": 2}),
    ):
        with pytest.raises(ValueError, match=name):
            theirs.generate(some_tokens(1), **settings)


@pytest.mark.parametrize("exported", ["sliding", "nsa"], indirect=True, ids=["tied", "untied"])
def test_a_saved_model_is_the_same_with_more_and_fewer_tokens(exported, tmp_path):
    idx_BT = some_tokens(2)
    theirs = own_code(exported.folder)
    expected = theirs(input_ids=idx_BT).logits
    theirs.save_pretrained(tmp_path)
    assert_near(own_code(tmp_path)(input_ids=idx_BT).logits, expected)
    embedding = theirs.resize_token_embeddings(264)
    assert embedding.num_embeddings == theirs.config.vocab_size == 264
    more = theirs(input_ids=idx_BT + 7, labels=idx_BT)
    assert more.logits.shape == (2, LENGTH, 264) and more.loss.isfinite()
    assert_near(theirs(input_ids=idx_BT).logits[..., :257], expected)
    theirs.save_pretrained(tmp_path)
    saved = own_code(tmp_path)
    assert torch.equal(saved(input_ids=idx_BT + 7).logits, more.logits)
    saved.resize_token_embeddings(200)
    few_BT = idx_BT.clamp(max=199)
    assert_near(saved(input_ids=few_BT).logits, theirs(input_ids=few_BT).logits[..., :200])


def test_half_precision(exported):
    """It computes, generates and trains, and stays close to fp32."""
    is_fp16 = exported.name == "sliding"
    dtype, tolerance = (torch.float16, 0.03) if is_fp16 else (torch.bfloat16, 0.2)
    inputs = padded(LEFT, slice(2, None))
    theirs = own_code(exported.folder, dtype=dtype)
    output = theirs(**inputs, labels=inputs["input_ids"])
    output.loss.backward()
    assert output.logits.dtype == dtype and gradients(theirs).isfinite().all()
    assert difference(output.logits.float(), exported.theirs(**inputs).logits) < tolerance
    assert theirs.generate(**inputs, max_new_tokens=3, eos_token_id=None).shape == (2, 17)


@on("nsa")
def test_a_new_model_starts_with_new_branches_at_zero(exported):
    new = type(exported.theirs)(exported.theirs.config)
    zeros = [each for each in new.modules() if type(each).__name__ == "ZeroInitLinear"]
    assert zeros and not any(each.weight.any() for each in zeros)
    assert new(input_ids=some_tokens(1)).logits.isfinite().all()
