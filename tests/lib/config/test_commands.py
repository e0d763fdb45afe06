"""Tests of the commands that configure: output, written files, exit codes."""

import json
import os
import subprocess
from pathlib import Path

import pytest

from gpt2 import configure
from lib.config import commands
from lib.config.dotconfig import ConfigWorkspace, read_constants
from lib.errors import ConfigError, Problem
from lib.project import python_module_command
from tests.errors import error_of


@pytest.fixture
def place(root: Path, tmp_path: Path, monkeypatch) -> ConfigWorkspace:
    monkeypatch.delenv("KCONFIG_CONFIG", raising=False)
    return ConfigWorkspace(root, tmp_path)


def run(
    place: ConfigWorkspace, *words: str, **environment: str
) -> subprocess.CompletedProcess[str]:
    command = python_module_command("lib.kablate", words[0], "--tree", str(place.root))
    command += ["-O", str(place.build), *words[1:]]
    return subprocess.run(
        command,
        capture_output=True,
        text=True,
        env=os.environ | environment,
        cwd=place.build,
        stdin=subprocess.DEVNULL,
    )


def test_defconfig_then_constants_as_processes(place: ConfigWorkspace) -> None:
    setting = "OUTPUT_DIR='$(shell id) `id` \"é\"' N_HEAD=8"
    done = run(place, "defconfig", "base+quick+cpu", "--set", setting)
    assert done.returncode == 0 and done.stdout == ""
    hidden, summary, written = done.stderr.splitlines()
    assert hidden.startswith("CONFIG  defconfigs/base:9 has no effect with the settings on top: ")
    assert hidden.endswith("KERNEL_FLASH=y: needs DEVICE_CUDA=y (currently n)")
    assert summary.startswith(f"CONFIG  base+quick+cpu -> {place.config} (17 symbols, 10 ")
    assert written == f"CONFIG  {place.config} -> {place.build}/config.py (17 symbols)"
    content = (place.build / "config.py").read_bytes()
    done = run(place, "constants")
    assert done.stderr.endswith("config.py (17 symbols, 0 changed since the last write)\n")
    assert (place.build / "config.py").read_bytes() == content
    values = read_constants(place)
    assert values["OUTPUT_DIR"] == '$(shell id) `id` "é"'
    assert (values["N_HEAD"], values["OPTIMIZER"], values["DROPOUT"]) == (8, "adamwspam", True)


def test_a_bad_value_ends_with_exit_code_2_and_leaves_config_alone(place: ConfigWorkspace) -> None:
    commands.defconfig(place, "plain", "")
    before = {path.name: path.read_bytes() for path in place.build.iterdir()}
    done = run(place, "defconfig", "base", "--set", "N_HEADS=1 LATENT_DIM=9999")
    assert done.returncode == 2
    unknown, menu, out_of_range, advice, end = done.stderr.splitlines()
    assert unknown.startswith("ERROR   SET: N_HEADS=1: ")
    assert unknown.endswith("N_HEAD, N_KV_HEAD [config.unknown-symbol]")
    assert "make menuconfig" in menu
    assert out_of_range.startswith("ERROR   SET: LATENT_DIM=9999: ")
    assert out_of_range.endswith("(expected 0 to 4096, got 9999) [config.out-of-range]")
    assert "make why SYM=LATENT_DIM" in advice and advice.endswith("LATENT_DIM would be 128")
    assert end == "EXIT    code 2"
    assert before == {path.name: path.read_bytes() for path in place.build.iterdir()}


def test_a_defconfig_does_not_replace_an_edited_config_py(place: ConfigWorkspace) -> None:
    commands.defconfig(place, "plain", "")
    with (place.build / "config.py").open("a") as file:
        file.write("N_LAYER = 3\n")
    before = {path.name: path.read_bytes() for path in place.build.iterdir()}
    assert error_of(commands.defconfig, place, "base", "").codes == ["config.damaged"]
    assert before == {path.name: path.read_bytes() for path in place.build.iterdir()}


def test_constants_count_what_changed(place: ConfigWorkspace, capsys) -> None:
    commands.defconfig(place, "plain", "")
    capsys.readouterr()
    commands.defconfig(place, "plain", "N_LAYER=4 PROJECTION_LATENT=y")
    # N_LAYER, PROJECTION, and LATENT_DIM, which becomes available.
    assert "(17 symbols, 3 changed" in capsys.readouterr().err


def test_constants_reports_new_symbols(place: ConfigWorkspace, capsys) -> None:
    commands.defconfig(place, "plain", "")
    text = place.config.read_text().replace("CONFIG_N_HEAD=12\n", "")
    place.config.write_text(text)
    commands.write_config_py(place)
    assert "CONFIG  new symbol, at the default: N_HEAD\n" in capsys.readouterr().err


def test_constants_rejects_a_stale_config_and_olddefconfig_fixes_it(
    place: ConfigWorkspace, capsys
) -> None:
    commands.defconfig(place, "base", "")
    (place.build / "config.py").unlink()
    text = place.config.read_text().replace(
        "CONFIG_DEVICE_CUDA=y", "# CONFIG_DEVICE_CUDA is not set"
    )
    place.config.write_text(text + "CONFIG_GONE=1\n")
    error = error_of(commands.write_config_py, place)
    named = [problem.what.split(":")[0] for problem in error.problems]
    assert named == ["KERNEL_FLASH=y", "GONE=1"]
    assert error.codes == ["config.unmet-dependency", "config.unknown-symbol"]
    assert not (place.build / "config.py").exists()
    capsys.readouterr()
    commands.olddefconfig(place)
    log = capsys.readouterr().err
    line = text.split("\n").index("CONFIG_KERNEL_FLASH=y") + 1
    dropped = [row for row in log.splitlines() if row.startswith("WARN ")]
    assert len(dropped) == 2 and "2 dropped, 0 new" in log
    assert f"{place.config}:{line}: KERNEL_FLASH=y: " in dropped[0]
    assert "[config.unmet-dependency]" in dropped[0]
    assert "GONE=1: " in dropped[1] and "[config.unknown-symbol]" in dropped[1]
    commands.write_config_py(place)


def test_olddefconfig_without_a_config_takes_the_defaults(place: ConfigWorkspace) -> None:
    commands.olddefconfig(place)
    commands.write_config_py(place)
    assert read_constants(place)["N_LAYER"] == 12


def test_savedefconfig_returns_the_assignments_of_the_defconfig(place: ConfigWorkspace) -> None:
    commands.defconfig(place, "base", "")
    commands.savedefconfig(place)
    source = (place.root / "defconfigs" / "base").read_text().splitlines()
    saved = (place.build / "defconfig").read_text().splitlines()
    assert sorted(saved) == sorted(line for line in source if not line.startswith("#"))


def test_kconfig_config_names_the_file(place: ConfigWorkspace) -> None:
    done = run(place, "defconfig", "plain", KCONFIG_CONFIG="other")
    assert done.returncode == 0
    assert sorted(path.name for path in place.build.iterdir()) == [
        "config.py",
        "other",
        "other.origins",
    ]


def test_diffconfig_prints_as_the_kernel_does(place: ConfigWorkspace) -> None:
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


def test_diffconfig_compares_with_the_config_before(place: ConfigWorkspace) -> None:
    commands.defconfig(place, "plain", "")
    error = error_of(commands.diff_config_files, place, "", "", json=False)
    assert error.codes == ["config.missing"]
    assert error.problems[0].next == "type: make diffconfig A=NAME"
    commands.defconfig(place, "plain", "N_LAYER=4")
    assert run(place, "diffconfig").stdout == " N_LAYER 12 -> 4\n"
    error = error_of(commands.diff_config_files, place, "./absent", "", json=False)
    assert error.codes == ["config.unreadable"] and "absent" in str(error)


def test_diffconfig_takes_names_of_defconfigs(place: ConfigWorkspace) -> None:
    found = commands.diff_config_files(place, "plain", "plain+quick", json=False)
    assert found.split("\n") == [
        " N_LAYER 12 -> 4",
        " OPTIMIZER_ADAMW y -> n",
        " OPTIMIZER_ADAMWSPAM n -> y",
        "+SPAM_INTERVAL 1000",
    ]


def test_list_defconfigs(place: ConfigWorkspace) -> None:
    text = commands.format_defconfigs(place, json=False)
    assert "  base   A study with latent attention\n" in text
    assert "  quick  Small and short [base, plain]" in text and "GPU [any]\n" in text
    narrow = commands.format_defconfigs(place, json=False, columns=28)
    assert "  base   A study with latent\n         attention\n" in narrow
    document = json.loads(commands.format_defconfigs(place, json=True))
    assert document["schema_version"] == 1
    assert document["fragments"][0] == {
        "name": "cpu",
        "summary": "Train without a GPU",
        "bases": ["*"],
    }


def test_why_a_symbol(place: ConfigWorkspace) -> None:
    commands.defconfig(place, "base+quick", "")
    assert commands.explain_symbol(place, "N_LAYER", json=False).split("\n") == [
        "N_LAYER = 4",
        "    from     defconfigs/+quick:3 (fragment)  N_LAYER=4",
        "    prompt   Layers",
        "    type     int, 1 to 48",
        "    default  12",
        "    defined  Kconfig:3",
        "",
        "    Number of blocks.",
    ]


def test_why_a_default_with_needs(place: ConfigWorkspace) -> None:
    commands.defconfig(place, "base", "")
    text = commands.explain_symbol(place, "CONFIG_LATENT_SHARED=y", json=False)
    assert text.startswith("LATENT_SHARED = n (not available)\n")
    assert "    from     parts/latent/Kconfig:14 (default)\n" in text
    assert "    needs    PROJECTION_LATENT=y  (met: PROJECTION_LATENT is y)\n" in text
    assert "    needs    DROPOUT=n  (unmet: DROPOUT is y)\n" in text
    assert "DROPOUT=n" in text.splitlines()[-1]
    explanation = json.loads(commands.explain_symbol(place, "LATENT_SHARED=y", json=True))
    assert explanation["asked"]["assignment"] == "LATENT_SHARED=y"
    assert len(explanation["asked"]["problems"]) == 1
    explanation = json.loads(commands.explain_symbol(place, "N_HEAD=8", json=True))
    assert explanation["asked"] == {"assignment": "N_HEAD=8", "problems": []}
    assert "N_HEAD=8" in commands.explain_symbol(place, "N_HEAD=8", json=False).splitlines()[-1]


def test_why_a_choice_and_its_members(place: ConfigWorkspace) -> None:
    commands.defconfig(place, "base", "")
    text = commands.explain_symbol(place, "PROJECTION", json=False)
    assert text.startswith("PROJECTION = latent\n    from     defconfigs/base:5 (defconfig)")
    assert "    member   PROJECTION_LATENT  latent (MLA)  (selected)\n" in text
    member = json.loads(commands.explain_symbol(place, "PROJECTION_DENSE", json=True))
    assert (member["value"], member["choice"]) == (False, "PROJECTION")
    assert member["origin"] == {
        "label": "defconfig",
        "where": "defconfigs/base:5",
        "assignment": "PROJECTION_LATENT=y",
    }
    assert member["schema_version"] == 1


def test_why_an_unknown_symbol(place: ConfigWorkspace) -> None:
    commands.defconfig(place, "plain", "")
    error = error_of(commands.explain_symbol, place, "OUTPUT_DIRS", json=False)
    assert error.codes == ["config.unknown-symbol"]
    (problem,) = error.problems
    assert problem.what.startswith("OUTPUT_DIRS: ") and problem.what.endswith(" OUTPUT_DIR")


def test_menuconfig_without_a_terminal_is_exit_2(place: ConfigWorkspace) -> None:
    done = run(place, "menuconfig")
    assert done.returncode == 2 and "[usage.no-terminal]" in done.stderr
    assert list(place.build.iterdir()) == []


def test_the_menu_opens_again_while_a_rule_is_broken() -> None:
    values = [3, 5, 4]
    edited: list[int] = []

    def check() -> None:
        if edited[-1] % 2:
            raise ConfigError(Problem("odd", code="config.conflict"))

    commands.edit_until_valid(lambda: edited.append(values.pop(0)), check, lambda: None)
    assert edited == [3, 5, 4]
    with pytest.raises(ConfigError, match="odd"):
        commands.edit_until_valid(lambda: edited.append(7), check, check)


def test_help_is_the_docstring() -> None:
    command = python_module_command("lib.kablate", "defconfig", "--help")
    done = subprocess.run(command, capture_output=True, text=True)
    assert configure.defconfig.__doc__ is not None
    words = configure.defconfig.__doc__.split()
    assert done.returncode == 0 and " ".join(words[:6]) in " ".join(done.stdout.split())
