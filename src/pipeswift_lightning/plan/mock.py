"""Costs and lengths to plan with where nothing is measured yet."""

from dataclasses import replace

import numpy as np

from pipeswift_lightning.plan.cost_model import CostModel
from pipeswift_lightning.plan.costs import CostError

__all__ = ["sample_lengths", "transformer_costs"]


def transformer_costs(
    num_blocks: int,
    *,
    dim: int,
    vocabulary: int,
    flops_per_s: float,
    fixed_s: float = 0.0,
    relative_error: float = 0.25,
) -> CostModel:
    """Return the costs of an embedding, blocks of 12 ``dim^2`` parameters, and a head.

    Example:
        >>> len(transformer_costs(2, dim=8, vocabulary=100, flops_per_s=1e9).layers)
        4
    """
    block, head = 12 * dim * dim, dim * vocabulary
    model = CostModel.analytic(
        [0, *[block] * num_blocks, head], dim=dim, flops_per_s=flops_per_s, fixed_s=fixed_s
    )
    embedding = replace(model.layers[0], static_bytes=model.layers[-1].static_bytes)
    return replace(model, layers=(embedding, *model.layers[1:]), relative_error=relative_error)


def sample_lengths(
    number: int, *, median: int, spread: float, longest: int, seed: int = 0
) -> tuple[int, ...]:
    """Return lengths as texts have them: lognormal, the same for the same seed.

    Raises:
        CostError: A value is below 1, or the spread is negative.

    Example:
        >>> sample_lengths(4, median=100, spread=0.0, longest=50)
        (50, 50, 50, 50)
    """
    if min(number, median, longest) < 1 or spread < 0:
        message = (
            f"number={number}, median={median}, longest={longest}, spread={spread} make no lengths."
            " Rule: the first three 1 or more, the spread 0 or more. Remedy: correct them"
        )
        raise CostError(message)
    drawn = median * np.exp(spread * np.random.default_rng(seed).normal(size=number))
    return tuple(np.clip(drawn.round(), 1, longest).astype(int).tolist())
