"""Text generation from a finished run: selection, errors, partial characters, end of text."""

import json
from itertools import islice

import pytest
import torch

from gpt2.generate import generate as sampled
from gpt2.records.files import find_finished
from gpt2.running.trained_models import generate, generate_texts
from gpt2.study.arguments import RunLookup
from gpt2.weights.trained import open_trained
from lib.errors import ConfigError
from tests.build_folder import write_build
from tests.errors import error_of
from tests.gpt2.training.conftest import BASE
from tests.options import options


@pytest.fixture
def write(trained, build_dir):
    """Return a function from words of the command to the displayed text and the samples."""

    def written(*words):
        shown = []
        model = open_trained(trained.files, build_dir)
        return shown, generate_texts(model, options("generate", *words), shown.append)

    return written


def test_a_document_has_the_texts_and_what_determines_them(trained, write, build_dir):
    words = ("--prompt", "a", "--tokens", "5", "--temperature", "0.5", "--json")
    run = ("--run", str(trained.files.path), "-O", str(build_dir))
    document = json.loads(generate(options("generate", *run, *words)))
    assert document["samples"] == write(*words)[1] and document["run"] == "run"
    assert document["sampling"] == {"temperature": 0.5, "top_k": 0, "top_p": 1.0}
    assert (document["prompt"], document["seed"]) == ("a", 1)


def test_seed_and_number_determine_the_texts(write):
    words = ("--prompt", "an é", "--tokens", "20")
    one, other = ("".join(write(*words, *more)[0]) for more in ((), ("--seed", "2")))
    two, texts = write(*words, "--samples", "2")
    assert one.startswith("an é") and one.endswith("\n")
    assert "".join(two) == one + "an é" + texts[1]["text"] + "\n" and one != other
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
def test_invalid_arguments_are_rejected(write, words, name, code):
    error = error_of(write, *words.split())
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


@pytest.mark.parametrize(
    ("tokens", "shown", "text", "used", "end"),
    [
        ("50", ["é", "\ufffd", "b", "\ufffd"], "é\ufffdb\ufffd", 6, "end_of_text"),
        ("3", ["é", "\ufffd"], "é\ufffd", 3, "length"),
    ],
)
def test_characters_are_shown_whole_and_the_end_of_text_ends_it(
    write, monkeypatch, tokens, shown, text, used, end
):
    """é in two tokens, an invalid first byte, a truncated character, end of text."""
    ids = [*"é".encode(), 0xFF, *"b€".encode()[:-1], 256, 97]
    monkeypatch.setattr("gpt2.generate.generate", lambda *_: iter(ids))
    displayed, (sample,) = write("--prompt", "a", "--tokens", tokens)
    assert displayed == ["a", *shown, "\n"]
    assert (sample["text"], sample["tokens"], sample["end"]) == (text, used, end)


def test_a_token_costs_one_pass_of_one_token(session, monkeypatch):
    """A long prompt is processed in chunks; a full context is processed again for each token."""
    opened, lengths = session(), []
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
