"""The files of a report contain every run of the study; a selection changes only what is printed."""

import pytest

from gpt2.records.files import write_resolved_config
from gpt2.running import results
from gpt2.study.arguments import asked_tables
from gpt2.study.plan import config_layers, make_plan
from tests.build_folder import write_build
from tests.integration.conftest import SMALL
from tests.lib.fabricated import MANIFEST, seal, write_run
from tests.options import options

STUDY = {**SMALL, "RA_MLA_ABLATION_STEPS": "0,ra", "VERDICT_AA": False}


@pytest.fixture
def build(tmp_path):
    """A build folder with finished runs of two steps and three seeds, of which .config lists one."""
    write_build(tmp_path, STUDY)
    plan = make_plan(config_layers(tmp_path), tmp_path, seeds="1-3")
    for run in plan.runs:
        directory = write_run(run.path, identity=run.config.identity(), symbols=run.config.values)
        write_resolved_config(directory, run.config)
        seal(directory, MANIFEST)
    return tmp_path


def asked(build, **given):
    words = [f"--{name}={value}" for name, value in given.items()]
    return asked_tables(options("report", "-O", str(build), *words))


def report(build, **options):
    """Write the report; return the printed table and the files."""
    plan, whole, selected = asked(build, **options)
    text = results.report(plan, whole, selected=selected)
    return text, {name: (whole.folder / name).read_text() for name in ("table.md", "table.csv")}


def slugs(table):
    return [line.split(",")[1] for line in table.splitlines()[1:]]


@pytest.mark.slow
def test_a_selection_changes_what_is_printed_and_no_file(build):
    whole, files = report(build)
    assert slugs(files["table.csv"]) == ["baseline", "ra"] and "n=3" in files["table.md"]
    page = (build / "results/ratio/report.html").read_bytes()
    for chosen in ({"steps": "0"}, {"seed": "3"}):
        part, again = report(build, **chosen)
        assert part != whole and again == files, chosen
        assert ("| ra " in part) == ("steps" not in chosen)
        assert (build / "results/ratio/report.html").read_bytes() == page


def test_runs_of_another_configuration_stay_in_the_table(build):
    report(build)
    before = sorted((build / "results/ratio").glob("*-s*-*"))
    write_build(build, {**STUDY, "LEARNING_RATE": "1e-3"})
    text, files = report(build)
    heading, section = files["table.md"].split("## Other configurations")
    for path in before:
        assert path.name in section and path.name not in heading
        assert f"{path.name[-8:]} |" in section
    assert "LEARNING_RATE" in section and text.startswith(files["table.md"])
    assert "new" in files["table.csv"]


@pytest.mark.slow
def test_the_seeds_of_a_folder_are_no_declared_look(build):
    """A look spends alpha, so the folder's seeds do not start one."""
    report(build)
    assert not (build / "results/ratio/verdicts.json").exists()
    report(build, seeds="1-3")
    assert (build / "results/ratio/verdicts.json").exists()


@pytest.mark.parametrize("name", ["ra-s99999999999999999999-12345678", "ra-s7-12345678", "x-s-"])
def test_a_folder_with_a_foreign_name_adds_no_seed(build, name):
    (build / "results/ratio" / name).mkdir()
    _, whole, selected = asked(build)
    assert {run.seed for run in whole.runs} == {1, 2, 3} and not selected
