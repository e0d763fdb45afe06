"""Import of transformers weights: the same function, complete or rejected, and identified."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import torch.nn.functional as F

from gpt2.config import Config
from gpt2.mlp.options import ACTIVATIONS
from gpt2.running import preflight
from gpt2.weights import hf, source
from gpt2.weights.convert import load_initial_weights
from lib.errors import ConfigError, PreflightError, RunError
from lib.files import sha256_file
from lib.runs.code import run_drift
from lib.runs.record import RunRecord
from tests.gpt2.builders import make_activation
from tests.gpt2.weights.conftest import drawn, loaded, random_gpt2

HERE = {"INIT_FROM": "hf:./theirs"}
ADDED = {"RA_CROSS_TOKEN": True, "MLP_CROSS_TOKEN": True}


def tokens(config: Config) -> torch.Tensor:
    """Return random token ids [2, T]."""
    shape = config.model.shape
    generator = torch.Generator().manual_seed(1)
    return torch.randint(shape.vocab_size, (2, shape.block_size), generator=generator)


@pytest.mark.parametrize(
    ("ours", "its"),
    [
        *(
            (f"ACTIVATION_{name.upper()}", {"activation_function": hf_name})
            for name in ACTIVATIONS
            for hf_name in make_activation(name).hf_names
        ),
        ("MLP_HIDDEN", {"n_inner": 48}),
        ("UNTIED_HEAD", {"tie_word_embeddings": False}),
    ],
    ids=str,
)
def test_logits_and_gradients_are_those_of_transformers(configure, tmp_path, ours, its):
    theirs = random_gpt2(**its)
    theirs.save_pretrained(tmp_path / "theirs")
    config = configure(**HERE, **{ours: its.get("n_inner", True)})
    model, theirs = loaded(config, tmp_path)[0].double(), theirs.double()
    ids_BT = tokens(config)

    mine, expected = model(ids_BT), theirs(input_ids=ids_BT).logits
    torch.testing.assert_close(mine, expected, rtol=1e-11, atol=1e-11)
    F.cross_entropy(mine.flatten(0, 1), ids_BT.flatten()).backward()
    F.cross_entropy(expected.flatten(0, 1), ids_BT.flatten()).backward()
    gradients = {name: p.grad for name, p in theirs.named_parameters()}
    for name, parameter in model.named_parameters():
        found = hf.convert_layout(name, gradients[hf.their_name(name)])
        torch.testing.assert_close(parameter.grad[: len(found)], found, rtol=1e-9, atol=1e-11)
    assert not model.wte.weight[257:].any()


@pytest.mark.parametrize("form", ["published", "sharded", "bf16"])
def test_files_of_any_form(configure, tmp_path, form):
    """Without a prefix, with causal masks and an explicit head; several files; half precision."""
    theirs, config = random_gpt2(), configure(**HERE)
    folder = tmp_path / "theirs"
    if form == "bf16":
        theirs = theirs.to(torch.bfloat16)
    theirs.save_pretrained(folder, max_shard_size="40KB" if form == "sharded" else "1GB")
    assert (len(list(folder.glob("model-*.safetensors"))) > 1) == (form == "sharded")
    if form == "published":
        weights = safetensors.torch.load_file(folder / source.WEIGHTS_FILE)
        plain = {name.removeprefix("transformer."): w for name, w in weights.items()}
        plain |= {f"h.{i}.attn.bias": torch.ones(1, 1, 80, 80).tril() for i in range(2)}
        plain |= {"lm_head.weight": plain["wte.weight"].clone()}
        safetensors.torch.save_file(plain, folder / source.WEIGHTS_FILE)
    model, *_ = loaded(config, tmp_path)
    # Without rounding.
    expected = theirs.float()(input_ids=tokens(config)).logits
    torch.testing.assert_close(model(tokens(config)), expected, rtol=1e-5, atol=1e-5)
    assert torch.equal(model.wpe.weight, theirs.transformer.wpe.weight)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"n_layer": 2, "n_head": 3, "n_embd": 12, "n_inner": 20, "n_positions": 7},
        {"n_layer": 1, "tie_word_embeddings": False},
    ],
    ids=["defaults", "odd", "untied"],
)
def test_shapes_are_those_of_transformers(settings):
    from transformers import GPT2Config, GPT2LMHeadModel

    with torch.device("meta"):
        theirs = GPT2LMHeadModel(GPT2Config(**settings))
    its = {n.removeprefix("transformer."): tuple(p.shape) for n, p in theirs.named_parameters()}
    assert hf.shapes(hf.with_defaults(settings)) == its


@pytest.mark.parametrize("parts", [ADDED, {"RECIPROCAL": True, "ATTENTION_PATTERN_SLIDING": True}])
def test_parameters_that_gpt2_lacks_keep_their_values_and_are_named(configure, folder, parts):
    config, plain = configure(**HERE, **parts), configure(**HERE)
    model, line, _ = loaded(config, folder.parent)
    before = dict(drawn(config).named_parameters())
    expected = dict(loaded(plain, folder.parent)[0].named_parameters())
    own = before.keys() - expected.keys()
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, before[name] if name in own else expected[name]), name
    named = f"; randomly initialized: {len(own)} tensors of mlp_cross_token, ra_cross_token"
    assert line.startswith("INIT hf:./theirs: ") and bool(own) == (parts is ADDED)
    assert line.endswith(f"{folder}{named if own else ''}")


# Symbol → another value, and what is wrong.
DIFFERENT: dict[str, tuple[Any, str, str]] = {
    "N_LAYER": (1, "N_LAYER: 1 ", "(2)"),
    "N_HEAD": (2, "N_HEAD: 2 ", "(4)"),
    "N_EMBD": (16, "N_EMBD: 16 ", "(32)"),
    "BLOCK_SIZE": (64, "BLOCK_SIZE: 64 ", "(80)"),
    "TOKENIZER_GPT2": (True, "TOKENIZER: 50257 ", "(257 tokens)"),
    "MLP_HIDDEN": (24, "MLP_HIDDEN: 24 ", "(128)"),
    "ACTIVATION_GELU_EXACT": (True, "ACTIVATION: gelu_exact ", "(gelu_new)"),
    "ATTENTION_PROJECTION_LATENT": (True, "ATTENTION_PROJECTION: latent ", "(dense)"),
    "NORM_RMSNORM": (True, "NORM: rmsnorm ", "(layernorm)"),
    "UNTIED_HEAD": (True, "UNTIED_HEAD: y ", "(n)"),
}


def test_every_difference_is_listed_before_data_is_prepared(configure, folder):
    changes = {name: value for name, (value, *_) in DIFFERENT.items()}
    config = configure(**HERE, **changes, TOKENIZER_BYTE=None)
    with pytest.raises(ConfigError) as error:
        preflight.check_weights([config, config], folder.parent)

    assert error.value.codes == ["weights.config-mismatch"] * len(DIFFERENT)
    for _, ours, theirs in DIFFERENT.values():
        (problem,) = [p for p in error.value.problems if p.what.startswith(ours)]
        assert theirs in problem.what
    assert "INIT_FROM" in error.value.problems[-1].next
    assert {path.name for path in folder.parent.iterdir()} == {"theirs"}


def test_a_head_that_the_settings_name_and_the_file_lacks_is_missing(configure, folder):
    settings = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(settings | {"tie_word_embeddings": False}))
    text = refused(configure(**HERE, UNTIED_HEAD=True), folder.parent, "weights.shape-mismatch")
    assert "lm_head.weight is missing" in text


def test_a_variant_of_gpt2_is_refused(configure, tmp_path):
    variant = random_gpt2(scale_attn_by_inverse_layer_idx=True, layer_norm_epsilon=1e-6)
    variant.save_pretrained(tmp_path / "theirs")
    with pytest.raises(ConfigError) as caught:
        preflight.check_weights([configure(**HERE, POSITIONS_ROPE=True)], tmp_path)
    assert caught.value.codes == ["weights.config-mismatch"] * 3
    assert re.search("layer_norm_epsilon.*1e-05.*1e-06", str(caught.value))
    assert re.search("POSITIONS: rope .*learned", str(caught.value))
    assert "scale_attn_by_inverse_layer_idx" in str(caught.value)


@pytest.mark.parametrize(
    ("settings", "code", "words"),
    [
        ({"BIAS": False}, "weights.config-mismatch", "^BIAS: .*h.0.attn.c_attn"),
        ({}, "weights.untied-head", "lm_head.weight"),
    ],
)
def test_neither_biases_nor_a_head_are_dropped(configure, folder, settings, code, words):
    if not settings:
        weights = safetensors.torch.load_file(folder / source.WEIGHTS_FILE)
        weights["lm_head.weight"] = weights["transformer.wte.weight"] + 1
        safetensors.torch.save_file(weights, folder / source.WEIGHTS_FILE)
    config = configure(**HERE, **settings)
    model = drawn(config)
    with pytest.raises((ConfigError, PreflightError), match=words) as caught:
        load_initial_weights(model, config, folder.parent, print)
    assert caught.value.codes == [code]
    for name, expected in drawn(config).named_parameters():
        assert torch.equal(dict(model.named_parameters())[name], expected), name


def refused(config: Config, build_dir: Path, code: str) -> str:
    with pytest.raises(PreflightError) as error:
        preflight.check_weights([config], build_dir)
    assert error.value.exit_code == 3 and error.value.codes == [code]
    return str(error.value)


def cut(size: int) -> Callable[[Path], object]:
    return lambda path: path.write_bytes(path.read_bytes()[:size])


@pytest.mark.parametrize(
    ("name", "change", "kind"),
    [
        ("config.json", Path.unlink, "missing"),
        # Pickled weights only.
        ("model.safetensors", lambda path: path.rename(f"{path}.bin"), "missing"),
        ("config.json", cut(99), "damaged"),
        ("config.json", lambda path: path.write_text("[]"), "damaged"),
        ("model.safetensors", cut(999), "damaged"),
        ("model.safetensors", cut(0), "damaged"),
    ],
)
def test_missing_and_damaged_files(configure, folder, name, change, kind):
    change(folder / name)
    text = refused(configure(**HERE), folder.parent, f"weights.{kind}")
    assert f"theirs/{name}: " in text and ("hf:PATH" in text) == (kind == "missing")


def test_tensors_of_another_model(configure, folder):
    weights = safetensors.torch.load_file(folder / source.WEIGHTS_FILE)
    del weights["transformer.ln_f.bias"]
    weights["transformer.wpe.weight"] = weights["transformer.wpe.weight"][:64].clone()
    weights["transformer.h.2.ln_1.bias"] = torch.zeros(32, dtype=torch.float64)
    safetensors.torch.save_file(weights, folder / source.WEIGHTS_FILE)

    text = refused(configure(**HERE), folder.parent, "weights.shape-mismatch")

    assert re.search(r"wpe.weight [^,]*\[64, 32\], expected \[80, 32\]", text)
    assert "ln_f.bias is missing" in text
    assert "h.2.ln_1.bias is unexpected" in text
    assert "dtype F64" in text


def test_an_index_stays_in_its_folder(configure, folder):
    outside = folder.parent / "model-1.safetensors"
    (folder / source.WEIGHTS_FILE).rename(outside)
    index = {"weight_map": {"transformer.wte.weight": f"../{outside.name}"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    text = refused(configure(**HERE), folder.parent, "weights.missing")
    assert "theirs/model-1.safetensors: " in text


def test_a_model_of_the_hub_is_downloaded_once(configure, folder, monkeypatch):
    asked = []

    def download(name: str, allow_patterns: list[str], local_dir: Path) -> None:
        asked.append((name, allow_patterns))
        local_dir.parent.mkdir(parents=True)
        folder.rename(local_dir)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    config = configure(INIT_FROM="hf:openai-community/gpt2")
    for _ in range(2):
        preflight.check_weights([config], folder.parent)

    assert [name for name, _ in asked] == ["openai-community/gpt2"]
    assert not any("bin" in pattern for pattern in asked[0][1])
    place = folder.parent / "data/downloads/hub/openai-community--gpt2"
    assert source.weights_folder(config, folder.parent) == place
    loaded(config, folder.parent)


def test_a_hub_without_a_network_is_an_error_with_advice(configure, tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    text = refused(configure(INIT_FROM="hf:gpt2"), tmp_path, "hub.download-failed")
    assert " gpt2 " in text and "set INIT_FROM=hf:PATH" in text


@pytest.mark.parametrize(
    "value",
    [
        *("gpt2", "hf:", "hf:results/run/export", "hf:..", "hf:$(x)", "hf:a b", "pt:./x"),
        *("run:", "run:a/b", "run:-a", "runs:a"),
    ],
)
def test_a_value_that_is_neither_path_nor_name_is_rejected(configure, value):
    with pytest.raises(ConfigError) as caught:
        configure(INIT_FROM=value)
    assert caught.value.codes == ["config.invalid-value"]
    assert f"INIT_FROM: invalid value {value!r}" in str(caught.value)


@pytest.mark.slow
def test_a_run_starts_from_the_weights_and_detects_that_they_have_changed(configure, train):
    folder, theirs = train.folder / "theirs", random_gpt2()
    # Predicts worse than random weights.
    theirs.transformer.ln_f.weight.data *= 100
    theirs.save_pretrained(folder)
    config = configure(INIT_FROM=f"hf:{folder}", MAX_ITERS=3)
    stopped = train(config, stop_at=1)
    assert stopped.rows("train")[0]["loss"] > 10
    recorded = stopped.manifest()["origin"]
    weights = folder / source.WEIGHTS_FILE
    for path in (weights, folder / "config.json"):
        assert recorded["sources"][str(path)] == sha256_file(path)

    original = weights.read_bytes()
    tensors = safetensors.torch.load_file(weights)
    tensors["transformer.ln_f.bias"] += 1
    safetensors.torch.save_file(tensors, weights)
    assert str(weights) in run_drift(RunRecord(stopped.files), recorded["device"])
    with pytest.raises(RunError, match="theirs/model.safetensors"):
        train(config)
    assert stopped.files.checkpoints.exists()

    weights.write_bytes(original)
    resumed = train(config)
    assert "resumes at iteration 1" in resumed.lines()
    assert run_drift(RunRecord(resumed.files), recorded["device"]) == []
