"""Whole model: equal to transformers' GPT-2 and to the reference, causal, stateless."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from gpt2.loss import IGNORE_INDEX, LogitsChunks
from gpt2.mlp.options import ACTIVATIONS
from gpt2.model import GPT, Execution
from gpt2.reference import reference_gpt, reference_loss
from gpt2.weights.convert import to_hf
from gpt2.weights.hf import HEAD_NAME, PREFIX, config_json, convert_layout, their_name
from lib.optim.optimizers import parameter_groups
from lib.pruning.pruners import prunable_parameters
from tests.gpt2.builders import EVERYTHING, make_activation, make_model_config

GATE, CROSS, COUPLING, RACT = "mlp_attn_gate", "mlp_cross_token", "mlp_latent", "ra_cross_token"
# name → a model with every kind of mechanism at once, in each of its forms
EVERY: dict[str, dict[str, Any]] = {
    "everything": EVERYTHING,
    "everything, other options": EVERYTHING
    | {
        "pattern": "sliding",
        "parts": {
            GATE: {"pooled": True},
            CROSS: {"sparsity": "rms", "detach_weights": False},
            COUPLING: {"tying": "untied"},
            RACT: {"mode": "entropy", "apply": "weights"},
            "reciprocal": {"learnable": True, "window": 7},
        },
        "sinks": ("attention_sink",),
        "value_mixes": ("value_residual",),
    },
    "everything, third options": EVERYTHING
    | {
        "parts": {
            CROSS: {"sparsity": "none"},
            COUPLING: {"tying": "scalar"},
            RACT: {"mode": "rms", "head_average": True},
            "latent": {"shared_expansion": True},
        }
    },
    "dense": {"mechanisms": (CROSS, GATE), "norm": "rmsnorm", "activation": "swiglu"},
    "grouped": {
        "projection": "grouped",
        "gates": (RACT,),
        "parts": {RACT: {"mode": "max", "apply": "weights"}},
        "norm": "rmsnorm",
        "untied_head": True,
        "bias": False,
    },
    "sink": {"projection": "grouped", "pattern": "sliding", "sinks": ("attention_sink",)},
    "value residual": {
        "projection": "grouped",
        "value_mixes": ("value_residual",),
        "parts": {"value_residual": {"learnable": False}},
    },
    "rope": {
        "projection": "grouped",
        "untied_head": True,
        "positions": "rope",
        "terms": ("reciprocal",),
        "gates": (RACT,),
        "mechanisms": (CROSS, GATE),
        "parts": {"reciprocal": {"window": 2}, RACT: {"topk": 3}, CROSS: {"topk": 2}},
    },
    "nsa": {"projection": "grouped", "pattern": "nsa", "mechanisms": (GATE,)},
    "nsa, rope": {
        "projection": "grouped",
        "pattern": "nsa",
        "positions": "rope",
        "parts": {"nsa": {"shared_kv": True}},
    },
}
every = pytest.mark.parametrize("name", EVERY)


def drawn(config, dtype=torch.float64, seed=0):
    """Build a model with large random parameters."""
    model = GPT(config).to(dtype)
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.3)
    return model.eval()


def tokens(config, batch=2, length=8):
    """Return random token ids."""
    generator = torch.Generator().manual_seed(3)
    return torch.randint(0, config.shape.vocab_size, (batch, length), generator=generator)


def shifted(idx_BT):
    """Return next-token labels in transformers' convention, without one for the last token."""
    return torch.cat([idx_BT[:, 1:], torch.full_like(idx_BT[:, :1], IGNORE_INDEX)], 1)


CHUNKED = Execution(logits_chunks=LogitsChunks(chunk_bytes=2000, block_elements=150))


@pytest.mark.slow
@pytest.mark.parametrize("execution", [Execution(), CHUNKED], ids=["plain", "chunked"])
@pytest.mark.parametrize(
    ("activation", "its_name"),
    [(a.name, a.hf_names[0]) for a in map(make_activation, ACTIVATIONS) if a.hf_names],
)
@pytest.mark.parametrize("untied", [False, True], ids=["tied", "untied"])
def test_i8_the_baseline_is_the_gpt2_of_transformers(execution, activation, its_name, untied):
    config = make_model_config(activation=activation, untied_head=untied)
    model = drawn(config)
    model.set_execution(execution)
    theirs = transformers_model(model, its_name)
    idx_BT = tokens(config, length=16)

    mine_logits, mine_loss = model(idx_BT), model(idx_BT, shifted(idx_BT))
    its = theirs(input_ids=idx_BT, labels=idx_BT)
    # Their own loss is float32 whatever the model; gradients come from one that is not.
    its_loss = F.cross_entropy(its.logits[:, :-1].flatten(0, 1), idx_BT[:, 1:].flatten())
    mine_loss.backward()
    its_loss.backward()

    close = {"rtol": 1e-12, "atol": 1e-12}
    assert mine_logits.shape == (2, 16, config.shape.vocab_size)
    torch.testing.assert_close(mine_logits, its.logits, **close)
    torch.testing.assert_close(mine_loss, its_loss, **close)
    torch.testing.assert_close(mine_loss.float(), its.loss, rtol=1e-5, atol=1e-5)
    gradients = {name: p.grad for name, p in theirs.named_parameters()}
    for name, parameter in model.named_parameters():
        expected = convert_layout(name, gradients[their_name(name)])
        torch.testing.assert_close(parameter.grad[: len(expected)], expected, **close)
    for table in (model.wte.weight, model.head):
        assert not table.grad[config.shape.vocab_size :].any()


def test_gpt2_at_full_size_has_its_shapes():
    from transformers import GPT2Config, GPT2LMHeadModel

    config = make_model_config(n_layer=12, n_head=12, n_embd=768, block_size=1024, vocab_size=50257)
    with torch.device("meta"):
        model, theirs = GPT(config), GPT2LMHeadModel(GPT2Config())

    its = {name: p.shape for name, p in theirs.named_parameters()}
    for name, parameter in model.named_parameters():
        if name != "wte.weight":
            assert convert_layout(name, parameter).shape == its[PREFIX + name], name
    assert len(its) == len(list(model.parameters()))
    assert model.num_params() == 124_475_904


def transformers_model(model, activation):
    """Build a GPT2LMHeadModel with the same weights, without padding rows."""
    from transformers import GPT2Config, GPT2LMHeadModel

    shape = model.config.shape
    theirs = GPT2LMHeadModel(
        GPT2Config(
            vocab_size=shape.vocab_size,
            n_positions=shape.block_size,
            n_embd=shape.n_embd,
            n_layer=shape.n_layer,
            n_head=shape.n_head,
            activation_function=activation,
            tie_word_embeddings=not model.config.untied_head,
            bos_token_id=0,
            eos_token_id=0,
        )
    )
    weights = {name: p.detach() for name, p in model.named_parameters()}
    state = to_hf(weights, config_json(model.config, end_of_text=0))
    state.setdefault(HEAD_NAME, state["transformer.wte.weight"])
    theirs.to(model.wte.weight.dtype).load_state_dict(state)
    return theirs.eval()


@every
def test_i8_logits_and_gradients_equal_the_formulas_after_any_call(name):
    config = make_model_config(n_layer=3, **EVERY[name])
    model = drawn(config)
    idx_BT = tokens(config, length=7)
    parameters = dict(model.named_parameters())
    model.train()
    other_BT = tokens(config, batch=3, length=5)
    model(other_BT, other_BT).backward()
    model.eval()

    fast = model(idx_BT)
    slow = reference_gpt(idx_BT, parameters, config)

    torch.testing.assert_close(fast, slow, rtol=1e-10, atol=1e-10)
    weights = torch.randn_like(fast)
    mine = torch.autograd.grad((fast * weights).sum(), list(parameters.values()))
    its = torch.autograd.grad((slow * weights).sum(), list(parameters.values()))
    for key, found, expected in zip(parameters, mine, its, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-8, atol=1e-8, msg=key)


@every
def test_i7_every_parameter_learns_and_bfloat16_follows_float32(name):
    config = make_model_config(n_layer=3, **EVERY[name])
    model = GPT(config)
    model.init_weights(0)
    idx_BT = tokens(config, length=16)

    exact = model(idx_BT, shifted(idx_BT))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        rough = model(idx_BT, shifted(idx_BT))
    rough.backward()

    assert rough.dtype == torch.float32
    assert rough.item() == pytest.approx(exact.item(), rel=0.01)
    for key, parameter in model.named_parameters():
        assert parameter.grad.dtype == torch.float32
        assert parameter.grad.isfinite().all() and parameter.grad.any(), key


def test_token_losses_are_the_terms_of_the_loss():
    config = make_model_config()
    model = drawn(config)
    idx_BT = tokens(config, length=16)
    targets_BT = shifted(idx_BT)

    losses_BT, correct_BT, _ = model.token_losses(idx_BT, targets_BT)

    assert losses_BT.shape == correct_BT.shape == targets_BT.shape
    assert correct_BT.dtype == torch.bool
    torch.testing.assert_close(losses_BT.sum() / 30, model(idx_BT, targets_BT))
    assert not losses_BT[:, -1].any() and not correct_BT[:, -1].any()
    best_BT = model(idx_BT).argmax(-1)
    assert model.token_losses(idx_BT, best_BT).correct.all()
    assert torch.equal(correct_BT, best_BT == targets_BT)


@pytest.mark.parametrize("execution", [Execution(), CHUNKED], ids=["plain", "chunked"])
def test_the_z_loss_is_trained_and_not_evaluated(execution):
    config = make_model_config(z_loss=0.2, untied_head=True)
    model = drawn(config)
    model.set_execution(execution)
    idx_BT = tokens(config, length=16)
    targets_BT = shifted(idx_BT)
    logits_BTV, losses_BT = model(idx_BT), model.token_losses(idx_BT, targets_BT).loss

    expected = F.cross_entropy(logits_BTV[:, :-1].flatten(0, 1), idx_BT[:, 1:].flatten())
    torch.testing.assert_close(losses_BT.sum() / 30, expected)
    z = logits_BTV[:, :-1].exp().sum(-1).log().square().mean()
    trained = model(idx_BT, targets_BT)
    torch.testing.assert_close(trained, expected + 0.2 * z)
    torch.testing.assert_close(trained, reference_loss(logits_BTV, targets_BT, 0.2))


def test_a_sequence_beyond_the_context_is_refused():
    config = make_model_config()

    with pytest.raises(AssertionError, match="17 tokens"):
        GPT(config)(tokens(config, length=17))


def initialised(config, seed=7):
    """Return the initial parameters by name."""
    model = GPT(config)
    model.init_weights(seed)
    return {name: p.detach() for name, p in model.named_parameters()}


def test_seed_and_name_alone_decide_the_initial_weights():
    config = make_model_config(**EVERYTHING)
    first = initialised(config)
    torch.manual_seed(2)
    again, other = initialised(config), initialised(config, seed=8)
    model, state = GPT(config), torch.get_rng_state()
    model.init_weights(0)
    assert torch.equal(torch.get_rng_state(), state)

    matrices = [name for name, value in first.items() if value.ndim >= 2]
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert all(not torch.equal(first[name], other[name]) for name in matrices)
    same_shape = first["h.0.mlp.c_fc.weight"], first["h.1.mlp.c_fc.weight"]
    assert not torch.equal(*same_shape)


def test_padding_is_zero_and_does_not_shift_the_tokens():
    configs = [make_model_config(vocab_multiple=each, untied_head=True) for each in (64, 1)]
    padded, exact = map(initialised, configs)

    for name in ("wte.weight", "lm_head.weight"):
        assert (len(padded[name]), len(exact[name])) == (64, 50)
        assert torch.equal(padded[name][:50], exact[name])
        assert not padded[name][50:].any()


def test_a_head_of_its_own_starts_as_an_embedding_and_changes_no_other_weight():
    shape = {"vocab_size": 500, "n_embd": 96}
    tied, untied = (initialised(make_model_config(**shape, untied_head=u)) for u in (False, True))

    assert untied.keys() - tied.keys() == {"lm_head.weight"}
    assert all(torch.equal(value, untied[name]) for name, value in tied.items())
    head, table = untied["lm_head.weight"][:500], untied["wte.weight"][:500]
    assert float(head.std()) == pytest.approx(float(table.std()), rel=0.02)
    assert (head * table).mean().abs() < 0.02 * table.square().mean()


def test_a_head_of_its_own_is_no_embedding():
    model = drawn(make_model_config(untied_head=True))
    idx_BT = tokens(model.config)
    logits, x_BTC = model(idx_BT), model.hidden(idx_BT)
    model.lm_head.weight.data[7] += 1.0
    changed = (model(idx_BT) - logits).abs().amax((0, 1)).nonzero()
    assert changed.tolist() == [[7]] and torch.equal(model.hidden(idx_BT), x_BTC)


def test_a_head_of_its_own_decays_and_is_pruned_as_a_tied_one():
    tied, untied = (GPT(make_model_config(untied_head=each)) for each in (False, True))
    for embeddings in (False, True):
        more = {*prunable_parameters(untied, embeddings)} - {*prunable_parameters(tied, embeddings)}
        assert more == ({"lm_head.weight"} if embeddings else set())
    decayed, kept = parameter_groups(untied, 0.1)
    assert "lm_head.weight" in dict(kept["params"])
    assert dict(decayed["params"]).keys() == dict(parameter_groups(tied, 0.1)[0]["params"]).keys()


def test_dropout_is_for_training_and_for_embeddings_too():
    idx_BT = tokens(make_model_config())
    with_dropout = drawn(make_model_config(dropout=0.5))
    without = drawn(make_model_config(dropout=0.0))

    assert torch.equal(with_dropout(idx_BT), without(idx_BT))
    without.train()
    assert torch.equal(without(idx_BT), without(idx_BT))
    seen: list[Tensor] = []
    with_dropout.h[0].register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    with_dropout.train()
    assert not torch.equal(with_dropout(idx_BT), with_dropout(idx_BT))
    assert 0.3 < (seen[0] == 0).double().mean() < 0.7


def count(module):
    return sum(parameter.numel() for parameter in module.parameters())


@pytest.mark.parametrize(
    ("n_layer", "bias", "sizing"), [(1, True, "ratio"), (3, False, "hidden"), (3, True, "hidden")]
)
@every
def test_i6_declared_is_built(name, sizing, bias, n_layer):
    overrides = EVERY[name] | {"bias": bias, "n_layer": n_layer, "sizing": sizing}
    config = make_model_config(n_embd=96, **overrides)
    model = GPT(config)

    for site, block in zip(config.sites(), model.h, strict=True):
        assert count(block.attn) == config.attention.cost(config.shape, site.block).params
        assert count(block.mlp) == config.mlp.cost(site).params
        built = sum(p.numel() for p in block.mlp.parameters() if p.ndim >= 2)
        assert built == config.mlp.cost(site).weights
    assert model.num_params() == config.num_params() == count(model)


@pytest.mark.slow
@pytest.mark.parametrize(
    "given",
    [
        {"projection": "grouped", "pattern": "sliding", "positions": "rope"},
        {"mechanisms": (GATE, COUPLING), "projection": "latent"},
        {"norm": "rmsnorm", "untied_head": True, "activation": "swiglu", "z_loss": 0.1},
    ],
    ids=["grouped sliding rope", "latent with gates", "other parts"],
)
def test_plain_attention_is_one_graph_to_the_compiler(given):
    """Of a step of training, with dropout; mechanisms of attention: the Triton kernels' tests."""
    model = drawn(make_model_config(**given, dropout=0.1), torch.float32).train()
    idx_BT = tokens(model.config)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    torch.manual_seed(1)
    expected = model(idx_BT, idx_BT)
    torch.manual_seed(1)
    assert torch.equal(compiled(idx_BT, idx_BT), expected)
