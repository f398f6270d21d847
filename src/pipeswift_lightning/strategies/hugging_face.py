"""What the pipeline knows about Hugging Face models; transformers itself is never imported here."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

__all__ = ["predicts_next_token", "without_caches"]


def _pretrained(module: nn.Module) -> list[Any]:
    """Return the Hugging Face models in ``module``: none, as long as nobody imports them."""
    transformers: Any = sys.modules.get("transformers")
    if transformers is None:
        return []
    return [m for m in module.modules() if isinstance(m, transformers.PreTrainedModel)]


@contextmanager
def without_caches(module: nn.Module) -> Iterator[None]:
    """Turn key-value caches off in the models' configurations, and back on at the end.

    A cache serves generation. By default causal models fill one in every step, also in training:
    each layer would copy its keys and values into an object that no other stage sees.
    """
    configs = {id(m.config): m.config for m in _pretrained(module)}
    changed = [c for c in configs.values() if getattr(c, "use_cache", False)]
    for config in changed:
        config.use_cache = False
    try:
        yield
    finally:
        for config in changed:
            config.use_cache = True


def predicts_next_token(network: nn.Module) -> bool:
    """Whether the model's own loss pairs each position with the next one's label.

    Hugging Face's losses of causal models do: the first label of each row counts nowhere.
    """
    for model in _pretrained(network):
        kind = getattr(model, "loss_type", None)
        if kind in {"ForCausalLM", "ForConditionalGeneration"}:
            return not getattr(model.config, "is_encoder_decoder", False)
    return False
