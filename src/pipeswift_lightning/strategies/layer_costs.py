"""A first guess of each layer's cost, before anything is measured."""

from collections.abc import Sequence

from torch import nn

from pipeswift_lightning.runtime.trace import StepTrace

__all__ = ["layer_costs"]

# Every layer costs something: without this, layers free of parameters would all go to one stage.
_FIXED = 1.0


def layer_costs(module: nn.Module, layers: Sequence[nn.Module], trace: StepTrace) -> list[float]:
    """Return relative costs of the layers, in call order: multiplications for each token.

    A matrix costs its number of elements; a look-up table costs nothing. Code between layers (a
    head, say) is charged to the layer whose stage runs it.
    """
    tables = {id(child.weight) for child in module.modules() if isinstance(child, nn.Embedding)}
    loose = dict(module.named_parameters())
    costs = [_FIXED + _cost(layers[index].parameters(), tables) for index in trace.order]
    for name, gaps in trace.parameter_gaps.items():
        parameter = loose.get(name)
        if parameter is None:
            continue
        for gap in gaps:
            # A table that is used after the first layer is a tied head, which multiplies.
            costs[max(gap - 1, 0)] += _cost([parameter], tables if gap == 0 else set())
    return costs


def _cost(parameters: object, tables: set[int]) -> float:
    return float(
        sum(
            p.numel()
            for p in parameters  # type: ignore[attr-defined]
            if p.dim() > 1 and id(p) not in tables
        )
    )
