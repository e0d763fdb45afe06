"""Reading and drawing of loss curves."""

import pytest

from lib.errors import ConfigError, PreflightError
from lib.files import canonical_json, write_json
from lib.report.figures import LossCurve, loss_axis_limits, plot_loss_curves, read_loss_curves
from lib.runs.run_dir import RunDir
from tests.lib.fabricated import WARMUP


def write(run, losses, evaluations=()):
    """Write metrics.jsonl like the trainer, with an incomplete last line."""
    run.path.mkdir(parents=True, exist_ok=True)
    write_json(RunDir(run.path).resolved_config, {"identity": WARMUP})
    step = {"kind": "train", "lr": 0.1, "grad_norm": 1.0}
    rows = [{**step, "iteration": i, "tokens": 10 * i, "loss": x} for i, x in enumerate(losses, 1)]
    rows += [
        {"kind": "eval", "iteration": t // 10, "tokens": t, "val_loss": x, "sparsity": 0.0}
        for t, x in evaluations
    ]
    text = "".join(canonical_json(row) + "\n" for row in rows)
    RunDir(run.path).metrics.write_text(text + '{"kind": "tr')


def test_seeds_are_averaged_over_the_tokens_that_all_have_seen(make_run):
    first, second = make_run("base"), make_run("base", seed=2)
    write(first, [4.0, 3.0, 2.0], [(20, 3.5)])
    write(second, [5.0, 4.0], [(20, 2.5)])
    (curve,) = read_loss_curves([first, second, make_run("not-begun", number=1)])
    assert curve == LossCurve("base", [(10, 4.5), (20, 3.5)], [(20, 3.0)], [])


def test_the_running_mean_looks_back_and_not_ahead(make_run):
    run = make_run("base")
    write(run, [float(i % 2) for i in range(100)])
    (curve,) = read_loss_curves([run])
    # Three of a hundred.
    assert [loss for _, loss in curve.train[:5]] == pytest.approx([0, 1 / 2, 1 / 3, 2 / 3, 1 / 3])


def test_the_frame_leaves_the_first_fall_out_and_shows_all_that_comes_after():
    falling = [(i, 100.0 / i) for i in range(1, 101)]
    bumped = [(at, loss + 3.0 * (at == 80)) for at, loss in falling]
    # 100 / 21 is the first after a fifth, 100 / 100 the last.
    low, high = loss_axis_limits([falling, bumped])
    room = 0.05 * (100 / 21 - 1)
    assert (low, high) == pytest.approx((1 - room, 100 / 21 + room))
    assert loss_axis_limits([falling, [(80, 9.0)]])[1] > 9.0
    assert loss_axis_limits([falling], [7.0])[1] > 7.0
    assert loss_axis_limits([[(1, 2.0), (10, 2.0)], []]) == pytest.approx((1.95, 2.05))


def test_unstable_steps_of_single_seeds_are_part_of_a_curve(make_run):
    first, second = make_run("base"), make_run("base", seed=2)
    write(first, [3.0] * 9)
    write(second, [3.0] * 7 + [6.5, 3.0])
    (curve,) = read_loss_curves([first, second])
    assert curve.spikes == [(80, 6.5)]


def test_a_picture_is_drawn_with_and_without_evaluations(tmp_path):
    begun = LossCurve("begun", [(1, 5.0)], [])
    curves = [LossCurve("base", [(1, 5.0), (10, 2.0)], [(5, 3.0), (10, 2.5)], [(7, 9.0)]), begun]
    plot_loss_curves(curves, "demo", tmp_path / "both.png")
    plot_loss_curves([begun], "demo", tmp_path / "train.png")
    for name in ("both.png", "train.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")


def test_nothing_to_draw_is_an_error(make_run):
    with pytest.raises(ConfigError) as caught:
        read_loss_curves([make_run("base")])
    assert caught.value.codes == ["run.missing-metric"]


def test_the_missing_package_is_named_with_its_command(tmp_path, without_matplotlib):
    with pytest.raises(PreflightError) as caught:
        plot_loss_curves([LossCurve("base", [(1, 2.0)], [])], "demo", tmp_path / "x.png")
    assert caught.value.codes == ["env.missing-package"] and "make setup" in str(caught.value)
    assert not (tmp_path / "x.png").exists()
