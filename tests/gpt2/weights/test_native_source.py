"""INIT_FROM with the weights of a run."""

from pathlib import Path

import pytest
import torch

from gpt2.model import GPT
from gpt2.weights.convert import load_initial_weights
from gpt2.weights.match import weight_mismatches
from gpt2.weights.source import weights_folder
from lib.errors import PreflightError
from lib.runs.run_dir import RunStatus, State, write_status
from tests.gpt2.weights.conftest import OWN_CODE, loaded, random_weights, write_finished
from tests.lib.fabricated import reseal

RA = {"RECIPROCAL": True, "RECIPROCAL_LEARNABLE": True}
LATENT = {"ATTENTION_PROJECTION_LATENT": True, "MLP_LATENT": True}
UNTIED = {"UNTIED_HEAD": True}
SAME_PROJECTION = {"ATTENTION_PROJECTION_GROUPED": True, "N_KV_HEAD": 2}
NAME = "a-s1-1a2b3c4d"


@pytest.fixture
def results(tmp_path) -> Path:
    (tmp_path / "results" / "ratio").mkdir(parents=True)
    return tmp_path / "results" / "ratio"


@pytest.mark.parametrize(
    ("settings", "source"),
    [
        ({"BIAS": False}, f"run:{NAME}"),
        (RA, "run:a-s1"),
        (LATENT, f"run:./results/ratio/{NAME}"),
    ],
)
def test_the_weights_of_a_run(configure, results, tmp_path, settings, source):
    config = configure(**settings)
    write_finished(config, results / NAME)
    model, _, digests = loaded(configure(**settings, INIT_FROM=source), tmp_path)
    for name, expected in random_weights(config).items():
        assert torch.equal(dict(model.named_parameters())[name], expected), name
    assert any(path.endswith(f"{NAME}/model.safetensors") for path in digests)


def test_a_mechanism_is_added_and_starts_as_it_is_declared(configure, results, tmp_path):
    write_finished(configure(), results / NAME)
    config = configure(**RA, INIT_FROM="run:a-s1")
    model, line, _ = loaded(config, tmp_path)
    assert "reciprocal" in line
    alpha = dict(model.named_parameters())["h.0.attn.terms.reciprocal.alpha"]
    assert torch.equal(alpha, torch.full_like(alpha, config.model.attention.terms[0].alpha))


def test_padding_of_the_vocabulary_may_differ(configure, results, tmp_path):
    config = configure(**UNTIED)
    write_finished(config, results / NAME)
    for multiple in (1, 512):
        changed = configure(**UNTIED, VOCAB_MULTIPLE=multiple, INIT_FROM="run:a-s1")
        model, *_ = loaded(changed, tmp_path)
        for name in ("wte.weight", "lm_head.weight"):
            found = model.get_parameter(name)
            assert torch.equal(found[:257], random_weights(config)[name][:257])
            assert len(found) == (257 if multiple == 1 else 512) and not found[257:].any()


@pytest.mark.parametrize(
    ("theirs", "ours", "symbol"),
    [
        # Equal shapes: another function.
        ({}, {"N_HEAD": 2}, "N_HEAD"),
        ({}, LATENT, "ATTENTION_PROJECTION"),
        ({}, {"NORM_RMSNORM": True}, "NORM"),
        ({}, UNTIED, "UNTIED_HEAD"),
        (UNTIED, {}, "UNTIED_HEAD"),
        (RA, {}, "RECIPROCAL"),
        (OWN_CODE["nsa"], SAME_PROJECTION | UNTIED, "ATTENTION_PATTERN"),
    ],
)
def test_a_mismatch_names_the_symbol(configure, results, theirs, ours, symbol):
    run = write_finished(configure(**theirs), results / NAME)
    problems = weight_mismatches(run.path, configure(**ours).model)
    assert [p.what.partition(":")[0] for p in problems] == [symbol]
    assert problems[0].code == "weights.config-mismatch"


@pytest.mark.parametrize("kind", ["damaged", "shape-mismatch"])
def test_damage_and_tensors_of_another_shape_leave_the_model_unchanged(
    configure, results, tmp_path, kind
):
    run = write_finished(configure(), results / NAME)
    if kind == "damaged":
        data = bytearray(run.weights.read_bytes())
        data[-1] ^= 1
        run.weights.write_bytes(data)
    else:
        other = write_finished(configure(MLP_HIDDEN=48), results / "b-s1-1a2b3c4d")
        run.weights.write_bytes(other.weights.read_bytes())
        reseal(run)
    config = configure(INIT_FROM="run:a-s1")
    model = GPT(config.model)
    before = {name: p.clone() for name, p in model.named_parameters()}
    with pytest.raises(PreflightError) as caught:
        load_initial_weights(model, config, tmp_path, print)
    assert caught.value.codes == [f"weights.{kind}"]
    assert all(torch.equal(before[name], p) for name, p in model.named_parameters())


def test_a_name_must_be_one_finished_run(configure, results, tmp_path):
    config = configure(INIT_FROM="run:a-s1")
    first = write_finished(configure(), results / NAME)
    assert weights_folder(config, tmp_path) == first.path
    second = write_finished(configure(), results / "a-s1-2a2b3c4d")
    with pytest.raises(PreflightError, match="2 finished") as caught:
        weights_folder(config, tmp_path)
    assert caught.value.codes == ["weights.missing"]
    write_status(second, RunStatus(State.INTERRUPTED))
    assert weights_folder(config, tmp_path) == first.path
    with pytest.raises(PreflightError) as caught:
        weights_folder(configure(INIT_FROM="run:a-s11"), tmp_path)
    assert caught.value.codes == ["weights.missing"]
