import math

import pytest

from pipeswift_lightning.plan.costs import CostError, LayerCost, Link, StepCosts


def test_uniform_costs_and_json() -> None:
    costs = StepCosts.uniform(3, 2, forward_s=1.0, backward_s=2.0, activation_bytes=8)
    assert costs.activation_bytes == ((8.0, 8.0), (8.0, 8.0))
    assert costs.num_stages == 3
    assert StepCosts.from_json(costs.to_json()) == costs


@pytest.mark.parametrize(
    ("tables", "message"),
    [
        ({"backward_s": [[1, 1], [1, -1]]}, r"backward_s\[1\]\[1\]=-1.0 .*Rule: finite"),
        ({"backward_s": [[1, 1], [1, math.nan]]}, r"backward_s\[1\]\[1\]=nan .*Rule: finite"),
        ({"backward_s": [[1, 1]]}, r"backward_s has rows of \[2\] entries, .* 2 rows of 2"),
        ({"activation_bytes": [[1, 1], [1, 1]]}, "activation_bytes .* 1 rows of 2"),
        ({"gradient_bytes": [[1]]}, "gradient_bytes has rows"),
        ({"forward_s": [[1, 1], [1]]}, "forward_s has rows"),
        ({"forward_s": []}, "forward_s is empty"),
        ({"forward_s": [[]]}, "forward_s is empty"),
    ],
)
def test_tables_that_cannot_be(tables, message) -> None:
    good = {"forward_s": [[1, 1], [1, 1]], "backward_s": [[1, 1], [1, 1]]}
    with pytest.raises(CostError, match=message):
        StepCosts(**(good | tables))


def test_links_that_cannot_be() -> None:
    with pytest.raises(CostError, match=r"latency_s=-1 .*Rule: .*Remedy: "):
        Link(latency_s=-1)
    with pytest.raises(CostError, match=r"bandwidth_bytes_per_s=0 .*Rule: above 0\. Remedy: "):
        Link(bandwidth_bytes_per_s=0)


def test_layers_that_cannot_be() -> None:
    with pytest.raises(CostError, match=r"activation_bytes=-1 .*Rule: .*Remedy: "):
        LayerCost(forward_s=1.0, backward_s=1.0, activation_bytes=-1, parameter_bytes=0)
