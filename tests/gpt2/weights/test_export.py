"""Export of weights: the same function in transformers, and lossless round trips."""

import dataclasses
import inspect
import re
from pathlib import Path
from typing import Any, ClassVar

import pytest
import safetensors.torch
import torch

from gpt2 import kv_cache
from gpt2.attention.options import TermOptions
from gpt2.data.tokenizer import load_tokenizer
from gpt2.shape import Cost, ModelShape
from gpt2.weights.hf import unsupported_components
from gpt2.weights.model_code import model_files
from gpt2.weights.trained import load_run
from lib.errors import ConfigError, PreflightError
from lib.json_files import read_json_object
from lib.project import ROOT
from lib.runs.run_dir import RunDir
from tests.gpt2.builders import needs_bitsandbytes
from tests.gpt2.data.conftest import downloads
from tests.gpt2.weights.conftest import (
    LORA,
    OWN_CODE,
    export,
    loaded,
    native,
    own_code,
    random_weights,
    write_finished,
)
from tests.lib.fabricated import reseal

__all__ = ["downloads"]

OTHERS = {
    "BIAS": False,
    "ACTIVATION_GELU_EXACT": True,
    "MLP_HIDDEN": 48,
    "VOCAB_MULTIPLE": 1,
}
TEXT = (ROOT / "README.md").read_text() + " naïve — 東京 🙂\n\n\t don't  stop\x00\x7f"


def from_transformers(folder: Path) -> Any:
    """Load a folder with transformers; fail on missing or unused weights."""
    from transformers import GPT2LMHeadModel

    theirs, info = GPT2LMHeadModel.from_pretrained(folder, output_loading_info=True)
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    return theirs.eval()


def assert_weights(model: Any, weights: dict[str, torch.Tensor]) -> None:
    """Check that the parameters have the bits of ``weights``."""
    parameters = dict(model.named_parameters())
    assert parameters.keys() == weights.keys()
    assert [name for name in weights if not torch.equal(parameters[name], weights[name])] == []


@pytest.mark.parametrize(
    "settings", [{}, OTHERS, {"UNTIED_HEAD": True}], ids=["gpt2", "others", "untied"]
)
def test_a_dense_gpt2_is_one_of_transformers_and_comes_back_bit_identical(
    configure, tmp_path, settings
):
    config = configure(**settings)
    export(write_finished(config, tmp_path / "run"), tmp_path / "out", tmp_path)
    model, theirs = native(config), from_transformers(tmp_path / "out")
    ids_BT = torch.arange(2 * 80).reshape(2, 80) % 257
    expected = theirs(input_ids=ids_BT).logits
    torch.testing.assert_close(model(ids_BT), expected, rtol=1e-5, atol=1e-5)
    # Pruned weights stay zeros. Conv1D is [in, out]: rows of ours are columns there.
    assert not theirs.transformer.h[0].attn.c_proj.weight[:, ::2].any()
    assert theirs.transformer.h[0].attn.c_proj.weight[:, 1::2].all()
    for again in (
        loaded(configure(**settings, INIT_FROM="hf:./out"), tmp_path)[0],
        load_run(tmp_path / "out"),
    ):
        assert_weights(again, random_weights(config))


@pytest.mark.parametrize(
    ("base", "changes", "named"),
    [
        ("FP32", {}, []),
        ("INT8", {}, []),
        pytest.param(
            "NF4",
            {"NORM_RMSNORM": True, "VALUE_RESIDUAL": True},
            ["value_residual, rmsnorm"],
            marks=[pytest.mark.slow, needs_bitsandbytes],
        ),
    ],
)
def test_trained_adapters_are_merged(
    configure, train, build_dir, tmp_path, capsys, base, changes, named
):
    """What transformers lacks is named as without adapters."""
    first = train(configure(**changes, MAX_ITERS=1), "first").files
    settings = {**LORA, **changes, f"LORA_BASE_{base}": True, "INIT_FROM": f"run:{first.path}"}
    run = train(configure(**settings, MAX_ITERS=4)).files
    export(run, tmp_path / "out", build_dir)
    lacking = re.findall(r"not supported by transformers' GPT-2: (.*?);", capsys.readouterr().err)
    assert lacking == named
    theirs = (own_code if named else from_transformers)(tmp_path / "out")
    ids_BT = torch.arange(2 * 80).reshape(2, 80) % 257
    found, expected = theirs(input_ids=ids_BT).logits, load_run(run.path)(ids_BT)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    assert (load_run(first.path)(ids_BT) - expected).abs().max() > 1e-3


@pytest.mark.parametrize(
    ("wrong", "settings"),
    [("relu", {}), ("nosuch", {}), ("a gated activation", {}), ("relu", LORA)],
)
def test_an_activation_with_another_function_in_transformers_is_not_exported(
    configure, tmp_path, monkeypatch, wrong, settings
):
    config = configure(ACTIVATION_GELU_EXACT=True, **settings)
    run = write_finished(config, tmp_path / "run")
    if wrong == "a gated activation":
        # Its c_fc has twice the outputs that transformers expects.
        weights = random_weights(config)
        name = "h.0.mlp.c_fc.weight"
        safetensors.torch.save_file({**weights, name: weights[name].repeat(2, 1)}, run.weights)
        reseal(run)
    else:
        monkeypatch.setattr(type(config.model.mlp.activation), "hf_names", (wrong,))
    with pytest.raises(ConfigError) as caught:
        export(run, tmp_path / "out", tmp_path)
    assert caught.value.codes == ["export.other-model"]
    # Any of them may be the cause.
    assert "this model of dense, full, learned, gelu_exact" in caught.value.problems[0].what
    assert not (tmp_path / "out").exists()


@dataclasses.dataclass(frozen=True)
class UnknownOptions(TermOptions):
    """Options of a component that the export has never heard of."""

    name: ClassVar[str] = "unknown"

    def cost(self, shape: ModelShape, keys: float) -> Cost:
        """Return none."""
        return Cost()


def test_an_unknown_component_is_not_one_of_gpt2(configure):
    """Of a field for another kind of component, too."""
    model = configure().model
    assert unsupported_components(model) == []
    assert unsupported_components(configure(NORM_RMSNORM=True).model) == ["rmsnorm"]
    attention = dataclasses.replace(model.attention, terms=(UnknownOptions(),))
    mlp = dataclasses.replace(model.mlp, activation=(UnknownOptions(),))
    for change in ({"attention": attention}, {"mlp": mlp}):
        assert unsupported_components(dataclasses.replace(model, **change)) == ["unknown"]


def test_the_tokenizer_of_transformers_cuts_as_ours_does(
    configure, downloads, tmp_path, monkeypatch
):
    from transformers import AutoTokenizer

    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "downloads").symlink_to(downloads)
    config = configure(TOKENIZER_BYTE=None, TOKENIZER_GPT2=True, N_LAYER=1)
    export(write_finished(config, tmp_path / "run"), tmp_path / "out", tmp_path)

    theirs = AutoTokenizer.from_pretrained(tmp_path / "out")
    mine = load_tokenizer("gpt2", downloads.parent)
    assert theirs(TEXT)["input_ids"] == mine.encode(TEXT).tolist()
    assert theirs.decode(mine.encode(TEXT)) == TEXT
    assert (len(theirs), theirs.eos_token_id) == (50257, mine.end_of_text)
    assert from_transformers(tmp_path / "out").config.eos_token_id == mine.end_of_text
    # Ids as OpenAI published them.
    assert theirs.encode("Hello world") == [15496, 995]
    assert theirs.encode("!~\n ") == [0, 93, 198, 220]


@pytest.mark.slow
def test_the_example_of_the_documents_runs(configure, tmp_path, monkeypatch):
    for name, settings in {"baseline": {}, "ra": {"RECIPROCAL": True}}.items():
        run = write_finished(configure(**settings), tmp_path / name)
        export(run, tmp_path / "models" / name, tmp_path)
    monkeypatch.chdir(tmp_path)
    text = (ROOT / "docs" / "weights.md").read_text()
    names: dict[str, Any] = {"torch": torch}
    theirs, with_code, own = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    exec(theirs, names)
    assert names["model"].config.n_layer == 2 and len(names["tokenizer"]) == 257
    exec(with_code, names)
    assert names["text"].startswith("The ")
    exec(own, names)
    assert names["logits"].shape == (1, 3, 257)


@pytest.fixture
def run(configure, tmp_path) -> RunDir:
    return write_finished(configure(), tmp_path / "run")


def test_a_folder_with_other_content_is_refused(run, tmp_path, capsys):
    out = tmp_path / "out"
    out.mkdir()
    export(run, out, tmp_path)
    export(run, out, tmp_path)
    assert f"{out} is up to date" in capsys.readouterr().err
    (out / "config.json").write_text("mine")
    (tmp_path / "file").write_text("mine")
    for target, file in ((out, out / "config.json"), (tmp_path / "file", tmp_path / "file")):
        with pytest.raises(ConfigError) as caught:
            export(run, target, tmp_path)
        assert caught.value.codes == ["export.target-exists"]
        assert file.read_text() == "mine"
    assert {p.name for p in tmp_path.iterdir()} == {"run", "out", "file"}


def test_a_full_disk_leaves_nothing(run, tmp_path, monkeypatch):
    def full(*arguments: Any, **named: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("gpt2.weights.export.write_json", full)
    with pytest.raises(OSError, match="No space left"):
        export(run, tmp_path / "out", tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["run"]


def test_weights_of_another_model_are_refused(configure, run, tmp_path):
    other = write_finished(configure(N_LAYER=1), tmp_path / "other")
    run.weights.write_bytes(other.weights.read_bytes())
    with pytest.raises(PreflightError) as caught:
        load_run(run.path)
    assert caught.value.codes == ["weights.shape-mismatch"]
    # The digest is that of the manifest.
    with pytest.raises(PreflightError) as caught:
        export(run, tmp_path / "out", tmp_path)
    assert caught.value.codes == ["weights.damaged"] and caught.value.exit_code == 3
    assert not (tmp_path / "out").exists()
    run.weights.unlink()
    with pytest.raises(PreflightError) as caught:
        load_run(run.path)
    assert caught.value.codes == ["weights.damaged"]
    run.resolved_config.unlink()
    with pytest.raises(ConfigError) as missing:
        load_run(run.path)
    assert missing.value.codes == ["run.damaged"]


def test_an_export_without_one_of_its_tensors_is_refused(configure, tmp_path):
    export(
        write_finished(configure(NORM_RMSNORM=True), tmp_path / "run"), tmp_path / "out", tmp_path
    )
    path = tmp_path / "out" / "model.safetensors"
    tensors = safetensors.torch.load_file(path)
    del tensors["transformer.h.1.ln_2.weight"]
    safetensors.torch.save_file(tensors, path)
    with pytest.raises(PreflightError, match="no h.1.ln_2.weight") as caught:
        load_run(tmp_path / "out")
    assert caught.value.codes == ["weights.shape-mismatch"]


@pytest.mark.slow
def test_a_model_that_transformers_lacks_has_its_code(exported, configure, tmp_path):
    name, folder = exported.name, exported.folder
    ids_BT = torch.arange(2 * 80).reshape(2, 80) % 257
    with torch.no_grad():
        expected = exported.ours(ids_BT)
        for cached in (False, True):
            found = exported.theirs(input_ids=ids_BT, use_cache=cached).logits
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    weights = dict(exported.ours.named_parameters())
    config = configure(**OWN_CODE[name], INIT_FROM=f"hf:{folder}")
    for again in (load_run(folder), loaded(config, tmp_path)[0]):
        assert_weights(again, weights)
    assert {path.stat().st_mode & 0o777 for path in folder.iterdir()} == {0o644}

    code = {path.stem: path.read_text() for path in folder.glob("*.py")}
    imports = re.compile(r"^ *from \.(\w+) import", re.MULTILINE)
    # What transformers follows from the first file.
    imported = {file for text in code.values() for file in imports.findall(text)}
    assert imported == code.keys() - {"modeling_kablate"}
    for text in code.values():
        assert not re.search(r"^\s*(from|import) (gpt2|lib|triton)\b", text, re.MULTILINE)
        assert "kablate::" not in text
    # A mechanism that is loaded by its models only.
    assert ("nsa" in code) == (name == "nsa")
    assert code["kv_cache"] == inspect.getsource(kv_cache)
    # The kernels of GPUs, which auto selects for terms and gates, are not copied.
    options = read_json_object(folder / "config.json")["model"]
    backend = {"sliding": "auto", "everything": "rows", "nsa": ""}[name]
    assert options["attention"]["backend"] == backend


@pytest.mark.slow
@pytest.mark.parametrize("exported", ["sliding"], indirect=True)
def test_the_byte_tokenizer_and_the_card(exported):
    from transformers import AutoTokenizer

    folder = exported.folder
    theirs = AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
    assert theirs(TEXT)["input_ids"] == list(TEXT.encode())
    assert theirs.decode(list(TEXT.encode())) == TEXT
    assert (len(theirs), theirs.eos_token_id) == (257, 256)
    assert theirs.encode("<|endoftext|>") == [256]
    card = (folder / "README.md").read_text()
    assert all(text in card for text in ("| run | run |", "2.5000", "0" * 40, "trust_remote_code"))


def test_an_operator_has_a_name_of_its_own_in_a_folder_of_any_name():
    texts = model_files(["gpt2.attention.triton"], set())
    code = next(text for text in texts.values() if "::launch_tiles" in text)
    expression = re.search(r"custom_op\((.+::launch_tiles\")", code)
    assert expression
    names = {eval(expression[1], {"__name__": f"modules.{name}.x"}) for name in ("ö b", "ö_b")}
    assert len(names) == 2
    assert all(re.fullmatch(r"\w+::launch_tiles", name, re.ASCII) for name in names)
