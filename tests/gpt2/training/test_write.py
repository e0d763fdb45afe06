"""Text generation from a finished run: selection, errors, partial characters, end of text."""

import json
from itertools import islice
from typing import Any

import pytest
import torch

from gpt2.generate import generate as sampled
from gpt2.records.files import find_finished
from gpt2.running.trained_models import generate, generate_texts
from gpt2.study.arguments import RunLookup
from gpt2.weights.trained import open_trained
from lib.errors import ConfigError
from lib.runs.run_dir import RunDir
from tests.build_folder import write_build
from tests.errors import error_of
from tests.gpt2.training.conftest import BASE
from tests.options import options


@pytest.fixture
def run(trained) -> RunDir:
    return trained.files


def written(run, build_dir, *words: str) -> tuple[str, list[dict[str, Any]]]:
    """Return the displayed text and the samples."""
    given = options("generate", "--run", str(run.path), *words)
    shown: list[str] = []
    trained = open_trained(find_finished(given.run, build_dir), build_dir)
    texts = generate_texts(trained, given, shown.append)
    return "".join(shown), texts


def test_a_document_has_the_texts_and_what_determines_them(run, build_dir):
    words = ("--prompt", "a", "--tokens", "5", "--temperature", "0.5", "--json")
    given = options("generate", "--run", str(run.path), "-O", str(build_dir), *words)
    document = json.loads(generate(given))
    _, (text,) = written(run, build_dir, *words)
    assert document["samples"] == [text] and document["run"] == run.path.name
    assert document["sampling"] == {"temperature": 0.5, "top_k": 0, "top_p": 1.0}
    assert (document["prompt"], document["seed"]) == ("a", 1)


def test_seed_and_number_determine_the_texts(run, build_dir):
    one, _ = written(run, build_dir, "--prompt", "an é", "--tokens", "20")
    two, texts = written(run, build_dir, "--prompt", "an é", "--tokens", "20", "--samples", "2")
    other, _ = written(run, build_dir, "--prompt", "an é", "--tokens", "20", "--seed", "2")
    assert one.startswith("an é") and one.endswith("\n")
    assert two == one + "an é" + texts[1]["text"] + "\n" and one != other
    assert texts[0]["text"] != texts[1]["text"] and texts[0]["seed"] != texts[1]["seed"]
    assert {text["tokens"] for text in texts} == {20} and texts[0]["end"] == "length"


@pytest.mark.parametrize(
    ("words", "name", "code"),
    [
        ("--temperature -1", "TEMPERATURE", "usage.out-of-range"),
        ("--tokens 0", "TOKENS", "usage.out-of-range"),
        ("--prompt aaaaaaaaaaaaaaaaa", "PROMPT", "usage.prompt-too-long"),
        ("--prompt \udcff", "PROMPT", "usage.invalid-encoding"),
    ],
)
def test_invalid_arguments_are_rejected(run, build_dir, words, name, code):
    error = error_of(written, run, build_dir, *words.split())
    assert error.codes == [code] and error.problems[0].where == name


def test_a_pattern_names_one_run(build_dir):
    write_build(build_dir, BASE)
    for named, seeds, code, value in (
        ("nope", "", "run.not-found", "'nope'"),
        ("r*", "1,2", "run.ambiguous", "2 runs: single/run s1, single/run s2"),
        ("run", "", "run.not-found", "run-s1-"),
        ("", "", "usage.missing-argument", "RUN"),
    ):
        with pytest.raises(ConfigError) as error:
            find_finished(named, build_dir, RunLookup(seeds=seeds))
        assert error.value.codes == [code] and value in str(error.value)


def test_characters_are_shown_whole_and_the_end_of_text_ends_it(run, build_dir, monkeypatch):
    """é in two tokens, an invalid first byte, a truncated character, end of text."""
    ids = [*"é".encode(), 0xFF, *"b€".encode()[:-1], 256, 97]
    monkeypatch.setattr("gpt2.generate.generate", lambda *_: iter(ids))
    shown: list[str] = []
    trained = open_trained(run, build_dir)
    given = options("generate", "--prompt", "a", "--tokens", "50")
    (text,) = generate_texts(trained, given, shown.append)
    assert shown == ["a", "é", "\ufffd", "b", "\ufffd", "\n"]
    assert (text["text"], text["tokens"], text["end"]) == ("é\ufffdb\ufffd", 6, "end_of_text")
    given.tokens = 3
    (text,) = generate_texts(trained, given, shown.append)
    assert (text["text"], text["tokens"], text["end"]) == ("é\ufffd", 3, "length")


def test_a_token_costs_one_pass_of_one_token(session, monkeypatch):
    """A long prompt is processed in chunks; a full context is processed again for each token."""
    opened = session()
    lengths: list[int] = []
    hidden = opened.model.hidden
    monkeypatch.setattr("gpt2.generate._PREFILL_TOKENS", 10)
    monkeypatch.setattr(
        opened.model,
        "hidden",
        lambda ids, cache: lengths.append(ids.size(1)) or hidden(ids, cache),
    )
    drawn = sampled(opened.model, torch.arange(13), 5, opened.config.machine)
    assert len(list(islice(drawn, 6))) == 6
    assert lengths == [10, 3, 1, 1, 1, 10, 6, 10, 6]
