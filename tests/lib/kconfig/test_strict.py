"""Each assignment takes effect or is an error that names its file and line."""

import pytest

from lib.errors import ConfigError
from lib.kconfig import Layer, Tree, parse_set, parse_text

NOT_TAKEN = [
    (
        "CONFIG_N_LAYERS=4",
        "N_LAYERS=4: no such symbol; nearest: N_LAYER",
    ),
    ("CONFIG_ZZZZZZZ=4", "ZZZZZZZ=4: no such symbol"),
    (
        "CONFIG_OPTIMIZER=y",
        "OPTIMIZER=y: is a choice; set one of its members to y: "
        "OPTIMIZER_ADAMW, OPTIMIZER_ADAMWSPAM",
    ),
    (
        "CONFIG_LATENT_DIM=64",
        "LATENT_DIM=64: needs PROJECTION_LATENT=y, which is n",
    ),
    (
        "CONFIG_KERNEL_FLASH=y",
        "KERNEL_FLASH=y: needs DROPOUT || DEEP, where DEEP is n and DROPOUT is n; "
        "DEVICE_CUDA=y, which is n",
    ),
    ("CONFIG_N_LAYER=49", "N_LAYER=49: out of range 1 to 48"),
    ("CONFIG_N_LAYER=-1", "N_LAYER=-1: out of range 1 to 48"),
    ("CONFIG_N_KV_HEAD=13", "N_KV_HEAD=13: out of range 1 to N_HEAD (12)"),
    ("CONFIG_N_LAYER=y", "N_LAYER=y: wrong type, N_LAYER is int: a whole number"),
    ("CONFIG_N_LAYER=1_0", "N_LAYER=1_0: wrong type, N_LAYER is int: a whole number"),
    ("CONFIG_N_LAYER=0x4", "N_LAYER=0x4: wrong type, N_LAYER is int: a whole number"),
    ("# CONFIG_N_LAYER is not set", "N_LAYER=n: wrong type, N_LAYER is int: a whole number"),
    ('CONFIG_N_LAYER="4"', "N_LAYER=4: wrong type, N_LAYER is int and takes no quotes"),
    ("CONFIG_DROPOUT=1", "DROPOUT=1: wrong type, DROPOUT is bool: y or n"),
    ("CONFIG_DROPOUT=yes", "DROPOUT=yes: wrong type, DROPOUT is bool: y or n"),
    ("CONFIG_DROPOUT=m", "DROPOUT=m: wrong type, DROPOUT is bool: y or n"),
    (
        "CONFIG_LEARNING_RATE=6e-4",
        'LEARNING_RATE=6e-4: is a string and takes quotes: CONFIG_LEARNING_RATE="6e-4"',
    ),
    ("CONFIG_DEEP=y", "DEEP=y: is derived (no prompt, Kconfig:31) and cannot be set"),
    (
        "CONFIG_OPTIMIZER_ADAMW=n",
        "OPTIMIZER_ADAMW=n: is selected in the choice OPTIMIZER; set another member to y instead",
    ),
]


@pytest.mark.parametrize(("line", "what"), NOT_TAKEN)
def test_an_assignment_that_does_not_take_is_an_error(refused, line: str, what: str) -> None:
    assert refused(f"# first line\n{line}\n") == [f"f:2: {what}"]


def test_all_problems_of_all_layers_are_listed_at_once(refused) -> None:
    fragment = parse_text("CONFIG_X = 1\nCONFIG_N_LAYER=0\n", "fragment", "g")
    found = refused("CONFIG_DROPOUT=maybe\nCONFIG_LATENT_DIM=1\n", fragment, parse_set("NO_HEAD=2"))
    assert [line.split(": ")[0] for line in found] == ["g:1", "f:1", "f:2", "g:2", "SET"]


def test_duplicate_with_another_value(refused, tree) -> None:
    text = "CONFIG_N_LAYER=4\nCONFIG_N_LAYER=4\nCONFIG_N_LAYER=5\n"
    assert refused(text) == ["f:3: N_LAYER=5: duplicate with another value: 4 at f:1"]
    twice = parse_text("CONFIG_N_LAYER=4\nCONFIG_N_LAYER=4\n", "defconfig", "f")
    assert tree.resolve([twice]).values["N_LAYER"] == 4


def test_two_members_of_a_choice(refused) -> None:
    text = "CONFIG_PROJECTION_DENSE=y\nCONFIG_PROJECTION_LATENT=y\n"
    assert refused(text) == [
        "f:2: PROJECTION_LATENT=y: second member of the choice PROJECTION: "
        "PROJECTION_DENSE=y at f:1"
    ]


@pytest.mark.parametrize("character", ["\n", "\r", "\0", "\x1b", "\x85", "\u2028", "\udcff"])
def test_a_value_cannot_break_out_of_its_line(refused, character: str) -> None:
    layer = Layer.of("step", "step x", {"OUTPUT_DIR": f"a{character}CONFIG_DROPOUT=y"})
    (found,) = refused(layer)
    assert found.startswith("step x: OUTPUT_DIR=a")
    assert found.endswith("no line breaks, control characters or non-UTF-8 bytes")


def test_the_source_without_quotes_takes_a_string_as_it_is(tree) -> None:
    assert tree.resolve([parse_set("LEARNING_RATE=1e-3")]).values["LEARNING_RATE"] == "1e-3"


def test_a_failed_override_does_not_blame_what_it_overrides(refused) -> None:
    assert refused("CONFIG_N_LAYER=8\n", parse_set("N_LAYER=99")) == [
        "SET: N_LAYER=99: out of range 1 to 48"
    ]
    kernel = "CONFIG_DEVICE_CUDA=y\nCONFIG_KERNEL_AUTO=y\n"
    (found,) = refused(kernel, parse_set("KERNEL_FLASH=y"))
    assert found.startswith("SET: KERNEL_FLASH=y: needs DROPOUT || DEEP")


def test_a_failed_member_does_not_blame_the_one_it_overrides(tmp_path) -> None:
    """With C unavailable the choice falls back on its default A, which is not B's fault."""
    (tmp_path / "Kconfig").write_text(
        'config GPU\n\tbool "gpu"\n\nchoice X\n\tprompt "x"\n\nconfig A\n\tbool "a"\n\n'
        'config B\n\tbool "b"\n\nconfig C\n\tbool "c"\n\tdepends on GPU\n\nendchoice\n'
    )
    with pytest.raises(ConfigError) as caught:
        Tree(tmp_path).resolve([parse_text("CONFIG_B=y", "defconfig", "f"), parse_set("C=y")])
    (problem,) = caught.value.problems
    assert (problem.where, problem.what) == ("SET", "C=y: needs GPU=y, which is n")
    assert problem.next == "let pass, X would be a"


def test_a_later_layer_may_not_push_an_earlier_value_out_of_its_range(refused) -> None:
    """kconfiglib would fall back on the default without a word."""
    assert refused("CONFIG_N_KV_HEAD=8\n", parse_set("N_HEAD=4")) == [
        "f:1: N_KV_HEAD=8: out of range 1 to N_HEAD (4)"
    ]


def test_forced_by_a_select(tmp_path) -> None:
    text = 'config A\n\tbool "a"\n\tselect B\n\nconfig B\n\tbool "b"\n'
    (tmp_path / "Kconfig").write_text(text)
    with pytest.raises(ConfigError, match="^f:2: B=n: is y because A selects it\n"):
        Tree(tmp_path).resolve(
            [parse_text("CONFIG_A=y\n# CONFIG_B is not set\n", "defconfig", "f")]
        )


def test_setting_n_what_is_n_anyway_is_fine(tree) -> None:
    resolution = tree.resolve([parse_text("# CONFIG_LATENT_SHARED is not set", "fragment", "f")])
    assert resolution.values["LATENT_SHARED"] is False
    # It is n because it is not available, not because of that line.
    assert resolution.origins["LATENT_SHARED"] is None
