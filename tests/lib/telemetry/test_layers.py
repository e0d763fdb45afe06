"""Layer statistics, reduced over layers and per layer."""

from lib.tracking.reader import per_layer_metrics, reduce_over_layers

VALUES = {
    "attention/entropy": [1.0, 2.0, 6.0],
    "nsa/gate_entropy_min": [0.5, 0.25, 0.75],
    "nsa/gate_largest_max": [0.5, 0.9, 0.75],
    "mlp_attn_gate/gate_mean": [0.2, 0.4, None],
    "nsa/distance": [None, None, None],
}


def test_the_mean_and_of_extremes_the_extreme() -> None:
    assert reduce_over_layers(VALUES) == {
        "attention/entropy": 3.0,
        "nsa/gate_entropy_min": 0.25,
        "nsa/gate_largest_max": 0.9,
        "mlp_attn_gate/gate_mean": (0.2 + 0.4) / 2,
    }


def test_every_layer_that_has_a_value() -> None:
    found = per_layer_metrics(VALUES)
    assert found["layer/2/attention/entropy"] == 6.0
    assert [name for name in found if "mlp_attn_gate" in name] == [
        "layer/0/mlp_attn_gate/gate_mean",
        "layer/1/mlp_attn_gate/gate_mean",
    ]
    assert len(found) == 3 * 3 + 2
