"""Claims files: every problem has a code and a line, and an update changes nothing else."""

import pytest

from lib.claims.file import read_claims, updated_text
from lib.errors import ConfigError

GOOD = """# what the paper states
seeds = "1-3"

[[claim]]
name = "wide"
text = "a wider MLP"
contrast = "wide vs base"
verdict = "BETTER"
value = "-0.10"  # nats

[[claim]]
name = "loss-2"
text = '''two
lines'''
cell = { run = "base", seed = 1, field = "val_loss" }
value = '3.00'
digest = "0123456789abcdef"
"""


@pytest.fixture
def claims_file(tmp_path):
    """Return a factory of claims files."""

    def write(text):
        path = tmp_path / "claims.toml"
        path.write_text(text)
        return path

    return write


def test_entries(claims_file):
    file = read_claims(claims_file(GOOD))
    wide, loss = file.claims
    assert (file.seeds, wide.verdict, wide.value.number) == ("1-3", "BETTER", "-0.10")
    assert (loss.subject, loss.text, loss.macro) == (
        "base s1 val_loss",
        "two lines",
        "claimLossTwo",
    )
    assert wide.where.endswith("claims.toml:4") and loss.where.endswith(":11")


@pytest.mark.parametrize(
    ("line", "replacement", "code", "number"),
    [
        ('value = "-0.10"', "value = -0.10", "claims.invalid-value", 9),
        ('value = "-0.10"', 'value = "-0.10 s"', "claims.invalid-number", 9),
        ('value = "-0.10"', 'value = "-0.10', "claims.syntax", 9),
        ('value = "-0.10"', 'valu = "-0.10"', "claims.unknown-key", 9),
        ('verdict = "BETTER"', 'verdict = "GOOD"', "claims.invalid-verdict", 8),
        ('verdict = "BETTER"', 'verdict = "UNFAIR"', "claims.invalid-verdict", 8),
        ('verdict = "BETTER"\n', "", "claims.invalid-verdict", 4),
        ('contrast = "wide vs base"\n', "", "claims.missing-key", 4),
        ('contrast = "wide vs base"', "cell = {}", "claims.missing-key", 7),
        ('name = "wide"', 'name = "wide_"', "claims.invalid-value", 5),
        ('name = "wide"', 'name = "loss-2"', "claims.duplicate", 11),
        ('name = "wide"', 'name = "loss_two"', "claims.duplicate-command", 11),
        ('text = "a wider MLP"\n', "", "claims.missing-key", 4),
        ('"val_loss" }', '"loss" }', "claims.unknown-field", 15),
        ('"val_loss" }', '"train_loss" }', "claims.missing-key", 15),
        ('"val_loss" }', '"train_loss", iterations = [2, 1] }', "claims.invalid-value", 15),
        ('"val_loss" }', '"val_loss", step = 1 }', "claims.unknown-key", 15),
        ("seed = 1,", "seed = true,", "claims.invalid-value", 15),
        ("value = '3.00'\n", "", "claims.missing-key", 11),
        ('digest = "0123456789abcdef"', 'digest = "0123"', "claims.invalid-value", 17),
        ('seeds = "1-3"', "seeds = 3", "claims.invalid-value", 2),
        ('seeds = "1-3"', 'seed = "3"', "claims.unknown-key", 2),
    ],
)
def test_a_wrong_entry_names_its_line(claims_file, line, replacement, code, number):
    assert GOOD.count(line) == 1
    with pytest.raises(ConfigError) as caught:
        read_claims(claims_file(GOOD.replace(line, replacement)))
    assert caught.value.exit_code == 2
    found = [(p.code, p.where.rpartition(":")[2]) for p in caught.value.problems]
    assert (code, str(number)) in found


@pytest.mark.parametrize("text", ["", 'claim = "x"\n', 'study = "demo"\n', "claim = [1]\n"])
def test_a_file_without_entries_is_refused(claims_file, text):
    with pytest.raises(ConfigError):
        read_claims(claims_file(text))


def test_all_problems_are_reported_at_once(claims_file):
    text = GOOD.replace("BETTER", "GOOD").replace('"val_loss"', '"loss"')
    with pytest.raises(ConfigError) as caught:
        read_claims(claims_file(text))
    assert caught.value.codes == ["claims.invalid-verdict", "claims.unknown-field"]


def test_an_unreadable_file(claims_file, tmp_path):
    for path in (tmp_path / "none.toml", tmp_path):
        with pytest.raises(ConfigError) as caught:
            read_claims(path)
        assert caught.value.codes == ["claims.unreadable"]
    path = claims_file("")
    path.write_bytes(b"\xff")
    with pytest.raises(ConfigError) as caught:
        read_claims(path)
    assert caught.value.codes == ["claims.unreadable"]


def test_an_update_changes_two_keys_and_no_other_byte(claims_file):
    file = read_claims(claims_file(GOOD))
    new = {"value": "-0.12", "digest": "f" * 16}
    text = updated_text(file, {"wide": new, "loss-2": {"value": "2.98"}})
    expected = GOOD.replace('"-0.10"', '"-0.12"').replace("'3.00'", '"2.98"')
    expected = expected.replace(
        '[[claim]]\nname = "wide"', f'[[claim]]\ndigest = "{"f" * 16}"\nname = "wide"'
    )
    assert text == expected
    assert updated_text(file, {}) == GOOD


def test_an_entry_in_another_form_is_not_updated(claims_file):
    inline = 'claim = [{ name = "a", text = "t", contrast = "x vs y", verdict = "BETTER", value = "1" }]\n'
    hidden = GOOD.replace("two\nlines", "two\nvalue = '3.00'\nlines").replace(
        "text = '''", "text = '''\n[[claim]]\n"
    )
    for text, name in ((inline, "a"), (hidden, "loss-2")):
        file = read_claims(claims_file(text))
        with pytest.raises(ConfigError) as caught:
            updated_text(file, {name: {"value": "2"}})
        assert caught.value.codes == ["claims.not-updatable"]
