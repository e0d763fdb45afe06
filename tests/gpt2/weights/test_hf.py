"""Import of transformers weights: the same function, complete or rejected, and identified."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar

import pytest
import safetensors.torch
import torch
import torch.nn.functional as F

from gpt2.config import Config
from gpt2.data.prepare import prepare_dataset
from gpt2.mlp.options import ACTIVATIONS
from gpt2.model import GPT
from gpt2.running import preflight
from gpt2.weights import hf, source
from gpt2.weights.convert import load_initial_weights
from lib.errors import ConfigError, PreflightError, RunError
from lib.files import sha256_file
from lib.runs.code import run_drift
from lib.runs.record import RunRecord
from tests.gpt2.builders import make_activation
from tests.gpt2.weights.conftest import random_gpt2

Configure = Callable[..., Config]
HERE = {"INIT_FROM": "hf:./theirs"}
ADDED = {"RA_CROSS_TOKEN": True, "MLP_CROSS_TOKEN": True}


def drawn(config: Config, seed: int = 3) -> GPT:
    """Build a randomly initialized model."""
    model = GPT(config.model)
    model.init_weights(seed)
    return model


def loaded(config: Config, build_dir: Path, lines: list[str] | None = None) -> GPT:
    """Build a model with the weights of INIT_FROM."""
    model = drawn(config)
    log = [] if lines is None else lines
    load_initial_weights(model, config, build_dir, lambda tag, text: log.append(f"{tag} {text}"))
    return model.eval()


def tokens(config: Config) -> torch.Tensor:
    """Return random token ids [2, T]."""
    shape = config.model.shape
    generator = torch.Generator().manual_seed(1)
    return torch.randint(shape.vocab_size, (2, shape.block_size), generator=generator)


class TestTheSameFunction:
    """The native model computes the same function as transformers."""

    @pytest.mark.parametrize(
        ("ours", "its"),
        [
            *(
                (f"ACTIVATION_{name.upper()}", {"activation_function": hf_name})
                for name in ACTIVATIONS
                for hf_name in make_activation(name).hf_names
            ),
            ("MLP_HIDDEN", {"n_inner": 48}),
        ],
        ids=str,
    )
    def test_logits_and_gradients(self, configure, tmp_path, ours, its):
        theirs = random_gpt2(**its)
        theirs.save_pretrained(tmp_path / "theirs")
        config = configure(**HERE, **{ours: its.get("n_inner", True)})
        model, theirs = loaded(config, tmp_path).double(), theirs.double()
        ids_BT = tokens(config)

        mine, expected = model(ids_BT), theirs(input_ids=ids_BT).logits
        torch.testing.assert_close(mine, expected, rtol=1e-11, atol=1e-11)
        F.cross_entropy(mine.flatten(0, 1), ids_BT.flatten()).backward()
        F.cross_entropy(expected.flatten(0, 1), ids_BT.flatten()).backward()
        gradients = {name: p.grad for name, p in theirs.named_parameters()}
        for name, parameter in model.named_parameters():
            found = hf.convert_layout(name, gradients[f"transformer.{name}"])
            torch.testing.assert_close(parameter.grad[: len(found)], found, rtol=1e-9, atol=1e-11)
        assert not model.wte.weight[257:].any()

    @pytest.mark.parametrize("form", ["published", "sharded", "bf16"])
    def test_files_of_any_form(self, configure, tmp_path, form):
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
            plain |= {f"h.{i}.attn.bias": torch.ones(1, 1, 80, 80).tril() for i in range(3)}
            plain |= {"lm_head.weight": plain["wte.weight"].clone()}
            safetensors.torch.save_file(plain, folder / source.WEIGHTS_FILE)
        model = loaded(config, tmp_path)
        # Without rounding.
        expected = theirs.float()(input_ids=tokens(config)).logits
        torch.testing.assert_close(model(tokens(config)), expected, rtol=1e-5, atol=1e-5)
        assert torch.equal(model.wpe.weight, theirs.transformer.wpe.weight)


@pytest.mark.parametrize(
    ("size", "parameters"),
    [
        ((12, 12, 768), 124_439_808),
        ((24, 16, 1024), 354_823_168),
        ((36, 20, 1280), 774_030_080),
        ((48, 25, 1600), 1_557_611_200),
    ],
    ids=["gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl"],
)
def test_the_four_sizes_have_the_shapes_of_transformers(size, parameters):
    """Compare shapes with transformers, and the published parameter counts."""
    from transformers import GPT2Config, GPT2LMHeadModel

    settings = dict(zip(("n_layer", "n_head", "n_embd"), size))
    with torch.device("meta"):
        theirs = GPT2LMHeadModel(GPT2Config(**settings))
    its = {n.removeprefix("transformer."): tuple(p.shape) for n, p in theirs.named_parameters()}

    assert hf.shapes(hf.with_defaults(settings)) == its
    assert sum(p.numel() for p in theirs.parameters()) == parameters


@pytest.mark.parametrize("parts", [ADDED, {"RECIPROCAL": True, "ATTENTION_PATTERN_SLIDING": True}])
def test_parameters_that_gpt2_lacks_keep_their_values_and_are_named(configure, folder, parts):
    config, plain = configure(**HERE, **parts), configure(**HERE)
    lines: list[str] = []
    model = loaded(config, folder.parent, lines)
    before = dict(drawn(config).named_parameters())
    expected = dict(loaded(plain, folder.parent).named_parameters())
    own = before.keys() - expected.keys()
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, before[name] if name in own else expected[name]), name
    (line,) = lines
    named = f"; randomly initialized: {len(own)} tensors of mlp_cross_token, ra_cross_token"
    assert line.startswith("INIT hf:./theirs: ") and bool(own) == (parts is ADDED)
    assert line.endswith(f"{folder}{named if own else ''}")


class TestWhatDoesNotFit:
    """All mismatches are listed at once, and nothing is loaded."""

    DIFFERENT: ClassVar = {
        "N_LAYER": (2, "N_LAYER: 2 ", "(3)"),
        "N_HEAD": (2, "N_HEAD: 2 ", "(4)"),
        "N_EMBD": (16, "N_EMBD: 16 ", "(32)"),
        "BLOCK_SIZE": (64, "BLOCK_SIZE: 64 ", "(80)"),
        "TOKENIZER_GPT2": (True, "TOKENIZER: 50257 ", "(257 tokens)"),
        "MLP_HIDDEN": (24, "MLP_HIDDEN: 24 ", "(128)"),
        "ACTIVATION_GELU_EXACT": (True, "ACTIVATION: gelu_exact ", "(gelu_new)"),
        "ATTENTION_PROJECTION_LATENT": (True, "ATTENTION_PROJECTION: latent ", "(dense)"),
    }

    def test_every_difference_is_listed_before_data_is_prepared(self, configure, folder):
        changes = {name: value for name, (value, *_) in self.DIFFERENT.items()}
        config = configure(**HERE, **changes, TOKENIZER_BYTE=None)
        with pytest.raises(ConfigError) as error:
            preflight.check_weights([config, config], folder.parent)

        assert error.value.codes == ["weights.config-mismatch"] * len(self.DIFFERENT)
        for _, ours, theirs in self.DIFFERENT.values():
            (problem,) = [p for p in error.value.problems if p.what.startswith(ours)]
            assert theirs in problem.what
        assert error.value.exit_code == 2
        assert "INIT_FROM" in error.value.problems[-1].next
        assert {path.name for path in folder.parent.iterdir()} == {"theirs"}

    def test_a_variant_of_gpt2_is_refused(self, configure, tmp_path):
        random_gpt2(scale_attn_by_inverse_layer_idx=True, layer_norm_epsilon=1e-6).save_pretrained(
            tmp_path / "theirs"
        )
        with pytest.raises(ConfigError) as caught:
            preflight.check_weights([configure(**HERE, POSITIONS_ROPE=True)], tmp_path)
        assert caught.value.codes == ["weights.config-mismatch"] * 3
        assert re.search("layer_norm_epsilon.*1e-05.*1e-06", str(caught.value))
        assert re.search("POSITIONS: rope .*learned", str(caught.value))
        assert "scale_attn_by_inverse_layer_idx" in str(caught.value)

    def test_biases_are_not_dropped(self, configure, folder):
        model = drawn(configure(**HERE, BIAS=False))
        with pytest.raises(ConfigError, match="^BIAS: .*h.0.attn.c_attn") as caught:
            load_initial_weights(model, configure(**HERE, BIAS=False), folder.parent, print)
        assert caught.value.codes == ["weights.config-mismatch"]
        assert_untouched(model, configure(BIAS=False))

    def test_an_untied_head_is_refused(self, configure, folder):
        weights = safetensors.torch.load_file(folder / source.WEIGHTS_FILE)
        weights["lm_head.weight"] = weights["transformer.wte.weight"] + 1
        safetensors.torch.save_file(weights, folder / source.WEIGHTS_FILE)
        model = drawn(configure(**HERE))
        with pytest.raises(PreflightError) as caught:
            load_initial_weights(model, configure(**HERE), folder.parent, print)
        assert caught.value.codes == ["weights.untied-head"]
        assert_untouched(model, configure())


def assert_untouched(model: GPT, config: Config) -> None:
    """Check that the model has its initial weights."""
    expected = dict(drawn(config).named_parameters())
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, expected[name]), name


DAMAGED = "weights.damaged"


class TestDamagedFolders:
    """Missing and damaged files are distinguished; the exit code is 3."""

    @staticmethod
    def refused(config: Config, build_dir: Path, code: str) -> str:
        with pytest.raises(PreflightError) as error:
            preflight.check_weights([config], build_dir)
        assert error.value.exit_code == 3
        assert error.value.codes == [code]
        return str(error.value)

    @pytest.mark.parametrize(
        ("name", "change", "code"),
        [
            ("config.json", lambda path: path.unlink(), "weights.missing"),
            # Pickled weights only.
            ("model.safetensors", lambda path: path.rename(f"{path}.bin"), "weights.missing"),
            ("config.json", lambda path: path.write_bytes(path.read_bytes()[:99]), DAMAGED),
            ("config.json", lambda path: path.write_text("[]"), DAMAGED),
            ("model.safetensors", lambda path: path.write_bytes(path.read_bytes()[:999]), DAMAGED),
            ("model.safetensors", lambda path: path.write_bytes(b""), DAMAGED),
        ],
    )
    def test_missing_and_damaged_files(self, configure, folder, name, change, code):
        change(folder / name)
        text = self.refused(configure(**HERE), folder.parent, code)
        assert f"theirs/{name}: " in text and ("hf:PATH" in text) == (code == "weights.missing")

    def test_tensors_of_another_model(self, configure, folder):
        weights = safetensors.torch.load_file(folder / source.WEIGHTS_FILE)
        del weights["transformer.ln_f.bias"]
        weights["transformer.wpe.weight"] = weights["transformer.wpe.weight"][:64].clone()
        weights["transformer.h.3.ln_1.bias"] = torch.zeros(32, dtype=torch.float64)
        safetensors.torch.save_file(weights, folder / source.WEIGHTS_FILE)

        text = self.refused(configure(**HERE), folder.parent, "weights.shape-mismatch")

        assert re.search(r"wpe.weight [^,]*\[64, 32\], expected \[80, 32\]", text)
        assert "ln_f.bias is missing" in text
        assert "h.3.ln_1.bias is unexpected" in text
        assert "dtype F64" in text

    def test_an_index_stays_in_its_folder(self, configure, folder):
        outside = folder.parent / "model-1.safetensors"
        (folder / source.WEIGHTS_FILE).rename(outside)
        index = {"weight_map": {"transformer.wte.weight": f"../{outside.name}"}}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
        text = self.refused(configure(**HERE), folder.parent, "weights.missing")
        assert "theirs/model-1.safetensors: " in text


class TestHub:
    """Models of the hub are downloaded once; other values are rejected."""

    def test_a_model_is_downloaded_once(self, configure, folder, monkeypatch):
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

    def test_without_a_network_the_error_has_advice(self, configure, tmp_path, monkeypatch):
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
        with pytest.raises(PreflightError) as error:
            preflight.check_weights([configure(INIT_FROM="hf:gpt2")], tmp_path)
        assert error.value.codes == ["hub.download-failed"] and " gpt2 " in str(error.value)
        assert "set INIT_FROM=hf:PATH" in str(error.value)

    @pytest.mark.parametrize(
        "value", ["gpt2", "hf:", "hf:results/run/export", "hf:..", "hf:$(x)", "pt:./x", "hf:a b"]
    )
    def test_a_value_that_is_neither_path_nor_name_is_rejected(self, configure, value):
        with pytest.raises(ConfigError) as caught:
            configure(INIT_FROM=value)
        assert caught.value.codes == ["config.invalid-value"]
        assert f"INIT_FROM: invalid value {value!r}" in str(caught.value)


class TestIdentity:
    """The content of the weights is part of the identity of a run."""

    def test_the_symbol_is_in_the_hash(self, configure):
        assert len({configure(INIT_FROM=v).hash8 for v in ("", "hf:./a", "hf:./b")}) == 3

    def test_changed_content_under_the_same_name_is_detected(self, configure, train):
        place = train.folder / "theirs"
        random_gpt2().save_pretrained(place)
        config = configure(**HERE, MAX_ITERS=6)
        prepare_dataset(config.data, train.build_dir)
        stopped = train(config, stop_at=3)
        recorded = json.loads(stopped.files.manifest.read_text())["origin"]
        weights = place / source.WEIGHTS_FILE
        assert recorded["sources"][str(weights)] == sha256_file(weights)
        assert recorded["sources"][str(place / "config.json")] == sha256_file(place / "config.json")
        resumed = train(config)
        assert "resumes at iteration 3" in resumed.lines()
        assert run_drift(RunRecord(resumed.files), recorded["device"]) == []

        first = train(config, name="second", stop_at=3)
        tensors = safetensors.torch.load_file(weights)
        tensors["transformer.ln_f.bias"] += 1
        safetensors.torch.save_file(tensors, weights)

        assert str(weights) in run_drift(RunRecord(resumed.files), recorded["device"])
        with pytest.raises(RunError, match="theirs/model.safetensors"):
            train(config, name="second")
        assert first.files.checkpoints.exists()

    def test_weights_affect_training(self, configure, train):
        random_gpt2().save_pretrained(train.folder / "theirs")
        losses = {}
        for name, symbols in {"loaded": HERE, "drawn": {}}.items():
            config = configure(**symbols, MAX_ITERS=1)
            prepare_dataset(config.data, train.build_dir)
            losses[name] = train(config, name=name).rows("train")[0]["loss"]
        assert losses["loaded"] != losses["drawn"]
