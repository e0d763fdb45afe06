"""Loss curves as they are read; what is drawn of them needs an extra package."""

import builtins

import pytest

from lib.analysis.curves import Curve, draw_curves, read_curves
from lib.errors import ConfigError, PreflightError
from lib.files import canonical_json
from lib.rundir import RunDir


def write(run, losses, evaluations=()):
    """metrics.jsonl as the trainer writes it, with a torn last line."""
    run.path.mkdir(parents=True, exist_ok=True)
    rows = [{"kind": "train", "tokens": 10 * i, "loss": x} for i, x in enumerate(losses, 1)]
    rows += [{"kind": "eval", "tokens": t, "val_loss": x} for t, x in evaluations]
    text = "".join(canonical_json(row) + "\n" for row in rows)
    RunDir(run.path).metrics.write_text(text + '{"kind": "tr')


def test_seeds_are_averaged_over_the_tokens_that_all_have_seen(make_run):
    first, second = make_run("base"), make_run("base", seed=2)
    write(first, [4.0, 3.0, 2.0], [(20, 3.5)])
    write(second, [5.0, 4.0], [(20, 2.5)])
    (curve,) = read_curves([first, second, make_run("not-begun", number=1)])
    assert curve == Curve("base", [(10, 4.5), (20, 3.5)], [(20, 3.0)])


def test_the_running_mean_looks_back_and_not_ahead(make_run):
    run = make_run("base")
    write(run, [float(i % 2) for i in range(100)])
    (curve,) = read_curves([run])
    # Three of a hundred.
    assert [loss for _, loss in curve.train[:5]] == pytest.approx([0, 1 / 2, 1 / 3, 2 / 3, 1 / 3])


def test_nothing_to_draw_is_an_error(make_run):
    with pytest.raises(ConfigError, match="no run has a row"):
        read_curves([make_run("base")])


def test_the_missing_package_is_named_with_its_command(tmp_path, monkeypatch):
    original = builtins.__import__

    def without(name, *rest, **more):
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return original(name, *rest, **more)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(PreflightError, match='make setup EXTRAS="matplotlib"'):
        draw_curves([Curve("base", [(1, 2.0)], [])], "demo", tmp_path / "x.png")
    assert not (tmp_path / "x.png").exists()
