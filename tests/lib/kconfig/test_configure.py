"""The command line: what it prints, what it writes, how it ends."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from lib.errors import ConfigError
from lib.kconfig import commands, queries, read_constants
from lib.kconfig.place import Place
from lib.project import ROOT

SCRIPT = ROOT / "scripts" / "configure.py"


@pytest.fixture
def place(root: Path, tmp_path: Path, monkeypatch) -> Place:
    monkeypatch.delenv("KCONFIG_CONFIG", raising=False)
    return Place(root, tmp_path)


def run(place: Place, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), words[0], "--tree", str(place.root)]
    command += ["-O", str(place.build), *words[1:]]
    return subprocess.run(
        command,
        capture_output=True,
        text=True,
        env=os.environ | environment,
        cwd=place.build,
        stdin=subprocess.DEVNULL,
    )


def test_defconfig_then_constants_as_processes(place: Place) -> None:
    setting = "OUTPUT_DIR='$(shell id) `id` \"é\"' N_HEAD=8"
    done = run(place, "defconfig", "base+quick+cpu", "--set", setting)
    assert done.returncode == 0 and done.stdout == ""
    assert done.stderr == (
        "CONFIG  no longer applies: defconfigs/base:9: KERNEL_FLASH=y: "
        "needs DEVICE_CUDA=y, which is n\n"
        f"CONFIG  base+quick+cpu -> {place.config} (17 symbols, 10 not left to the default)\n"
    )
    done = run(place, "constants")
    assert done.stderr == f"CONFIG  {place.config} -> {place.build}/config.py (17 symbols)\n"
    values = read_constants(place.build / "config.py")
    assert values["OUTPUT_DIR"] == '$(shell id) `id` "é"'
    assert (values["N_HEAD"], values["OPTIMIZER"], values["DROPOUT"]) == (8, "adamwspam", True)


def test_a_bad_value_ends_with_exit_code_2_and_leaves_config_alone(place: Place) -> None:
    commands.defconfig(place, "plain", "")
    before = {path.name: path.read_bytes() for path in place.build.iterdir()}
    done = run(place, "defconfig", "base", "--set", "N_HEADS=1 LATENT_DIM=9999")
    assert done.returncode == 2
    assert done.stderr == (
        "ERROR   SET: N_HEADS=1: no such symbol; nearest: N_HEAD, N_KV_HEAD\n"
        "ERROR   SET: LATENT_DIM=9999: out of range 0 to 4096\n"
        "        let pass, LATENT_DIM would be 128\n"
        "EXIT    code 2\n"
    )
    assert before == {path.name: path.read_bytes() for path in place.build.iterdir()}


def test_constants_count_what_changed(place: Place, capsys) -> None:
    commands.defconfig(place, "plain", "")
    commands.constants(place)
    commands.defconfig(place, "plain", "N_LAYER=4 PROJECTION_LATENT=y")
    capsys.readouterr()
    commands.constants(place)
    # N_LAYER, PROJECTION, and LATENT_DIM, which becomes available.
    assert "(17 symbols, 3 changed since the last write)" in capsys.readouterr().err


def test_constants_tell_new_symbols(place: Place, capsys) -> None:
    commands.defconfig(place, "plain", "")
    text = place.config.read_text().replace("CONFIG_N_HEAD=12\n", "")
    place.config.write_text(text)
    commands.constants(place)
    assert "CONFIG  1 new symbols took their defaults" in capsys.readouterr().err
    assert queries.new_symbols(place, json=False) == "CONFIG_N_HEAD=12"
    document = json.loads(queries.new_symbols(place, json=True))
    assert document == {"schema_version": 1, "symbols": {"N_HEAD": "12"}}


def test_constants_refuse_a_stale_config_and_olddefconfig_mends_it(place: Place, capsys) -> None:
    commands.defconfig(place, "base", "")
    text = place.config.read_text().replace(
        "CONFIG_DEVICE_CUDA=y", "# CONFIG_DEVICE_CUDA is not set"
    )
    place.config.write_text(text + "CONFIG_GONE=1\n")
    with pytest.raises(ConfigError) as caught:
        commands.constants(place)
    named = [problem.what.split(":")[0] for problem in caught.value.problems]
    assert named == ["KERNEL_FLASH=y", "GONE=1"]
    assert not (place.build / "config.py").exists()
    capsys.readouterr()
    commands.olddefconfig(place)
    said = capsys.readouterr().err
    line = text.split("\n").index("CONFIG_KERNEL_FLASH=y") + 1
    assert f"WARN    dropped {place.config}:{line}: KERNEL_FLASH=y: needs DEVICE_CUDA=y" in said
    assert "GONE=1: no such symbol" in said and "2 dropped, 0 new" in said
    commands.constants(place)


def test_olddefconfig_without_a_config_takes_the_defaults(place: Place) -> None:
    commands.olddefconfig(place)
    commands.constants(place)
    assert read_constants(place.build / "config.py")["N_LAYER"] == 12


def test_savedefconfig_returns_the_assignments_of_the_defconfig(place: Place) -> None:
    commands.defconfig(place, "base", "")
    commands.savedefconfig(place)
    source = (place.root / "defconfigs" / "base").read_text().splitlines()
    saved = (place.build / "defconfig").read_text().splitlines()
    assert sorted(saved) == sorted(line for line in source if not line.startswith("#"))


def test_kconfig_config_names_the_file(place: Place) -> None:
    done = run(place, "defconfig", "plain", KCONFIG_CONFIG="other")
    assert done.returncode == 0
    assert sorted(path.name for path in place.build.iterdir()) == ["other", "other.origins"]


def test_diffconfig_prints_as_the_kernel_does(place: Place) -> None:
    (place.build / "a").write_text('CONFIG_B=1\nCONFIG_A=y\nCONFIG_S="x y"\n')
    (place.build / "b").write_text('CONFIG_A=y\n# CONFIG_C is not set\nCONFIG_S="z"\n')
    done = run(place, "diffconfig", "a", "b")
    assert done.stdout == '-B 1\n S "x y" -> "z"\n+C n\n'
    found = json.loads(run(place, "diffconfig", "a", "b", JSON="1").stdout)
    assert found == {
        "schema_version": 1,
        "removed": {"B": "1"},
        "changed": {"S": ['"x y"', '"z"']},
        "added": {"C": "n"},
    }


def test_diffconfig_compares_with_the_config_before(place: Place) -> None:
    commands.defconfig(place, "plain", "")
    with pytest.raises(ConfigError, match="the first configuration here; .* diffconfig A=NAME"):
        queries.differences(place, "", "", json=False)
    commands.defconfig(place, "plain", "N_LAYER=4")
    assert run(place, "diffconfig").stdout == " N_LAYER 12 -> 4\n"
    with pytest.raises(ConfigError, match="absent: cannot read it: No such file"):
        queries.differences(place, "./absent", "", json=False)


def test_diffconfig_takes_names_of_defconfigs(place: Place) -> None:
    found = queries.differences(place, "plain", "plain+quick", json=False)
    assert found.split("\n") == [
        " N_LAYER 12 -> 4",
        " OPTIMIZER_ADAMW y -> n",
        " OPTIMIZER_ADAMWSPAM n -> y",
        "+SPAM_INTERVAL 1000",
    ]


def test_list_defconfigs(place: Place) -> None:
    assert queries.show_defconfigs(place, json=False, plain=True) == "base\nplain\n+cpu\n+quick"
    text = queries.show_defconfigs(place, json=False, plain=False)
    assert "  base   A study with latent attention\n" in text
    assert "  quick  Small and short [base, plain]" in text and "GPU [any]\n" in text
    document = json.loads(queries.show_defconfigs(place, json=True, plain=False))
    assert document["schema_version"] == 1
    assert document["fragments"][0] == {
        "name": "cpu",
        "summary": "Train without a GPU",
        "bases": ["*"],
    }


def test_why_a_symbol(place: Place) -> None:
    commands.defconfig(place, "base+quick", "")
    assert queries.explain(place, "N_LAYER", json=False).split("\n") == [
        "N_LAYER = 4",
        "    from     defconfigs/fragments/quick:3 (fragment)  N_LAYER=4",
        "    prompt   Layers",
        "    type     int, 1 to 48",
        "    default  12",
        "    defined  Kconfig:3",
        "",
        "    Number of blocks.",
    ]


def test_why_a_default_with_needs(place: Place) -> None:
    commands.defconfig(place, "base", "")
    text = queries.explain(place, "CONFIG_LATENT_SHARED=y", json=False)
    assert text.startswith("LATENT_SHARED = n (not available)\n")
    assert "    from     parts/latent/Kconfig:14 (default)\n" in text
    assert "    needs    PROJECTION_LATENT=y  (met: PROJECTION_LATENT is y)\n" in text
    assert "    needs    DROPOUT=n  (unmet: DROPOUT is y)\n" in text
    assert text.endswith("LATENT_SHARED=y: needs DROPOUT=n, which is y")
    assert queries.explain(place, "N_HEAD=8", json=False).endswith("N_HEAD=8 would take effect")


def test_why_a_choice_and_its_members(place: Place) -> None:
    commands.defconfig(place, "base", "")
    text = queries.explain(place, "PROJECTION", json=False)
    assert text.startswith("PROJECTION = latent\n    from     defconfigs/base:5 (defconfig)")
    assert "    member   PROJECTION_LATENT  latent (MLA)  (selected)\n" in text
    member = json.loads(queries.explain(place, "PROJECTION_DENSE", json=True))
    assert (member["value"], member["choice"]) == (False, "PROJECTION")
    assert member["origin"] == {
        "label": "defconfig",
        "where": "defconfigs/base:5",
        "assignment": "PROJECTION_LATENT=y",
    }
    assert member["schema_version"] == 1


def test_why_an_unknown_symbol(place: Place) -> None:
    commands.defconfig(place, "plain", "")
    with pytest.raises(ConfigError, match="OUTPUT_DIRS: no such symbol; nearest: OUTPUT_DIR"):
        queries.explain(place, "OUTPUT_DIRS", json=False)


def test_menuconfig_without_a_terminal_is_exit_2(place: Place) -> None:
    done = run(place, "menuconfig")
    assert done.returncode == 2 and "menuconfig needs a terminal" in done.stderr
    assert list(place.build.iterdir()) == []


def test_help_is_the_docstring() -> None:
    done = subprocess.run([sys.executable, str(SCRIPT), "--help"], capture_output=True, text=True)
    assert done.returncode == 0 and "takes effect, or nothing is written" in done.stdout
