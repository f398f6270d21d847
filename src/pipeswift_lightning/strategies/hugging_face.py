"""What the pipeline knows about Hugging Face models; transformers itself is never imported here."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

__all__ = ["blocks", "initialiser", "predicts_next_token", "returned", "without_caches"]

# Outputs that models return beside what they compute, as the encoders gave them.
_BY_PRODUCTS = {
    *(f"{what}_hidden_states" for what in ("image", "video", "audio", "vision", "encoder")),
    "encoder_attentions",
    "encoder_last_hidden_state",
}


def _pretrained(module: nn.Module) -> list[Any]:
    """Return the Hugging Face models in ``module``: none, as long as nobody imports them.

    The package itself is there in most processes (torchmetrics imports it); to ask it for the class
    would load the models' module, and with it accelerate: a third of a second on each rank.
    """
    models: Any = sys.modules.get("transformers.modeling_utils")
    if models is None:
        return []
    return [m for m in module.modules() if isinstance(m, models.PreTrainedModel)]


def blocks(network: nn.Module) -> tuple[nn.Module, ...]:
    """Return the blocks of the models in ``network``, in their order: encoders come first.

    A block is what Hugging Face itself recomputes as one in activation checkpointing.
    """
    layers: Any = sys.modules.get("transformers.modeling_layers")
    if layers is None or not _pretrained(network):
        return ()
    found: list[nn.Module] = []
    _collect(network, layers.GradientCheckpointingLayer, found)
    return tuple(found)


def _collect(module: nn.Module, kind: type[nn.Module], found: list[nn.Module]) -> None:
    for child in module.children():
        if isinstance(child, kind):
            found.append(child)
        else:
            _collect(child, kind, found)


def returned(output: Any) -> Any:
    """Return what a step may use of a model's output: not what encoders gave on the way.

    A vision-language model also returns its image features. To bring them to the last stage would
    cost as much as the activations themselves, and hardly a step looks at them.
    """
    generic: Any = sys.modules.get("transformers.utils.generic")
    if generic is None or not isinstance(output, generic.ModelOutput):
        return output
    return {
        name: value
        for name, value in output.items()
        if name not in _BY_PRODUCTS and not isinstance(value, generic.ModelOutput)
    }


def initialiser(module: nn.Module) -> Callable[[nn.Module], bool]:
    """Return a function that initialises a small module of ``module``, if it knows how.

    Within a Hugging Face model its ``_init_weights`` does, elsewhere ``reset_parameters``; adapters
    of ``peft`` have rules of their own (LoRA begins with no change to the model).
    """
    adapters = _adapters(module)
    owner: dict[int, Any] = {}
    for model in _pretrained(module):  # inner models come later, and have the last word
        owner.update({id(child): model for child in model.modules()})

    def initialise(child: nn.Module) -> bool:
        if id(child) in adapters:
            return _initialise_adapter(child, *adapters[id(child)])
        if id(child) in owner:
            owner[id(child)]._init_weights(child)
            return True
        reset = getattr(child, "reset_parameters", None)
        if reset is None:
            return False
        reset()
        return True

    return initialise


def _adapters(module: nn.Module) -> dict[int, tuple[Any, Any]]:
    """Return the layer and the configurations of each small module of an adapter, by ``id``."""
    peft: Any = sys.modules.get("peft")
    if peft is None:
        return {}
    found: dict[int, tuple[Any, Any]] = {}
    for model in module.modules():
        if not isinstance(model, peft.PeftModel):
            continue
        for layer in model.modules():
            if not isinstance(layer, peft.tuners.tuners_utils.BaseTunerLayer):
                continue
            base = {id(child) for child in layer.get_base_layer().modules()}
            found.update(
                (id(child), (layer, model.peft_config))
                for child in layer.modules()
                if id(child) not in base
            )
    return found


def _initialise_adapter(child: nn.Module, layer: Any, configs: Any) -> bool:
    """Initialise one part of a LoRA layer by the layer's own rule; other adapters are not known."""
    reset = getattr(layer, "reset_lora_parameters", None)
    holders = [h for h in layer.children() if isinstance(h, nn.ModuleDict)]
    adapter = next((n for holder in holders for n, part in holder.items() if part is child), None)
    if reset is None or adapter is None:
        return False
    rule = configs[adapter].init_lora_weights
    if not rule:
        child.reset_parameters()  # type: ignore[operator]
        return True
    mine = {id(p) for p in child.parameters()}
    others = [p for p in layer.parameters() if id(p) not in mine and not p.is_meta]
    kept = [p.detach().clone() for p in others]
    reset(adapter, rule)
    for parameter, before in zip(others, kept, strict=True):
        parameter.data.copy_(before)
    return True


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
        # Models whose class's name tells no kind (GPT2LMHeadModel) take the causal loss.
        causal = kind in {"ForCausalLM", "ForConditionalGeneration"}
        if causal or (kind is None and model.can_generate()):
            return not getattr(model.config, "is_encoder_decoder", False)
    return False
