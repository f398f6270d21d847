"""Find the pipelined network in a LightningModule, and the ordered layers in it."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import partial
from itertools import combinations
from typing import Any

from lightning.pytorch import LightningModule
from torch import nn
from torchmetrics import Metric
from typing_extensions import override

from pipeswift_lightning.strategies.hugging_face import blocks

__all__ = ["NetworkError", "PipelinedNetwork", "chained", "find_network", "find_networks"]

_USUAL_NAMES = ("model", "net", "network")
_SELF = "self"


class NetworkError(ValueError):
    """No network, or no layers, could be found in the LightningModule."""


@dataclass(frozen=True, slots=True)
class PipelinedNetwork:
    """The network and its layers.

    Attributes:
        name: How errors name it, for instance ``"self.model"``.
        module: The module whose call is pipelined.
        layers: Its layers, as registered or as ``configure_pipeline()`` returned them.
        chain: Whether the network's own forward must be replaced by calling ``layers`` in turn,
            since the hook returned layers that its forward does not call.
    """

    name: str
    module: nn.Module
    layers: tuple[nn.Module, ...]
    chain: bool = field(default=False)

    def parameters(self) -> Iterator[nn.Parameter]:
        """The parameters of the network and of its layers."""
        yield from self.module.parameters()
        for layer in self.layers:
            yield from layer.parameters()

    @property
    def has_forward(self) -> bool:
        """Whether the network can be called itself."""
        return self.chain or type(self.module).forward is not nn.Module.forward


def find_network(module: LightningModule, name: str | None) -> PipelinedNetwork:
    """Return the network of ``module`` that is to be pipelined.

    With ``name=None`` it is the one child module that has parameters, else the child called
    ``model``, ``net`` or ``network``, else the module itself if it defines
    ``configure_pipeline()``. Its layers are what ``configure_pipeline()`` (on the network or on
    the LightningModule) returns; else a Hugging Face model's blocks; else the members of its
    ``nn.Sequential`` or ``nn.ModuleList`` containers; else its child modules.

    Args:
        module: The user's module.
        name: Attribute of the network, dotted for a nested one; ``"self"`` for the module itself.

    Raises:
        NetworkError: Nothing or several things fit; the message lists the candidates.
    """
    network_name, network = _find_module(module, name)
    hook = _hook(network) or _hook(module)
    shown = "self" if network is module else f"self.{network_name}"
    if hook is not None:
        layers = _hooked_layers(hook)
        return PipelinedNetwork(shown, network, layers, chain=_needs_chain(network, layers))
    # A network without parts, such as a single nn.Linear, is one layer.
    found = blocks(network)
    layers = found if len(found) > 1 else _registered_layers(network) or (network,)
    return PipelinedNetwork(shown, network, layers)


def find_networks(
    module: LightningModule, names: Sequence[str] | None
) -> tuple[PipelinedNetwork, ...]:
    """Return every network of ``module`` that may be pipelined, for steps that call several.

    Without names these are the child modules with parameters; of a ``nn.ModuleList`` or
    ``nn.ModuleDict``, which cannot be called, its members. If the module itself defines
    ``configure_pipeline()``, what `find_network` finds is the only one.

    Args:
        module: The user's module.
        names: Attributes of the networks, as for `find_network`.

    Raises:
        NetworkError: A name does not fit, or one network holds another.
    """
    if names is None and _hook(module) is None:
        names = list(_callable_children(module))
    networks = [find_network(module, name) for name in names or (None,)]
    for a, b in combinations(networks, 2):
        if {id(p) for p in a.module.modules()} & {id(p) for p in b.module.modules()}:
            msg = (
                f"{a.name} and {b.name} are to be pipelined, but they have modules in common. "
                "Rule: pipelined networks lie beside each other. Remedy: name one of them"
            )
            raise NetworkError(msg)
    return tuple(networks)


def _callable_children(module: nn.Module, prefix: str = "") -> Iterator[str]:
    for name, child in module.named_children():
        if isinstance(child, Metric) or not any(True for _ in child.parameters()):
            continue
        if isinstance(child, nn.ModuleList | nn.ModuleDict):
            yield from _callable_children(child, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}"


def chained(network: PipelinedNetwork) -> dict[str, Any]:
    """Return the attributes to set on the network's module, so that a call runs its layers."""
    return {"forward": partial(_run_chain, network.layers)} if network.chain else {}


def _run_chain(layers: Sequence[nn.Module], *args: Any, **kwargs: Any) -> Any:
    value = layers[0](*args, **kwargs)
    for layer in layers[1:]:
        value = layer(value)
    return value


def _find_module(module: LightningModule, name: str | None) -> tuple[str, nn.Module]:
    if name is not None:
        return name, _named(module, name)
    candidates = {
        child_name: child
        for child_name, child in module.named_children()
        if any(True for _ in child.parameters())
    }
    if len(candidates) == 1:
        return next(iter(candidates.items()))
    for usual in _USUAL_NAMES:
        if usual in candidates:
            return usual, candidates[usual]
    if _hook(module) is not None:
        return _SELF, module
    found = (
        ", ".join(f"{n} ({type(c).__name__})" for n, c in candidates.items())
        if candidates
        else "none with parameters"
    )
    example = next(iter(candidates), "model")
    msg = (
        f"cannot tell which part of {type(module).__name__} to pipeline; its child modules are: "
        f"{found}. Rule: the network is the one child module with parameters, else the one called "
        f"{', '.join(_USUAL_NAMES[:-1])} or {_USUAL_NAMES[-1]}. Remedy: name it, as in "
        f'PipeSwiftStrategy(network="{example}"), or network="self" if training_step calls '
        "self(...); or define configure_pipeline() returning the ordered layers"
    )
    raise NetworkError(msg)


def _named(module: LightningModule, name: str) -> nn.Module:
    if name == _SELF:
        return module
    try:
        return module.get_submodule(name)
    except AttributeError:
        names = [n for n, _ in module.named_modules() if n]
        close = get_close_matches(name, names)
        children = ", ".join(n for n, _ in module.named_children()) or "(none)"
        hint = f" Did you mean {' or '.join(map(repr, close))}?" if close else ""
        msg = (
            f"network={name!r} is no module of {type(module).__name__}.{hint} Rule: it names a "
            f"module within the LightningModule, whose child modules are {children}. Remedy: one "
            'of these, or network="self" for the LightningModule itself'
        )
        raise NetworkError(msg) from None


def _hook(module: nn.Module) -> Callable[[], Any] | None:
    hook = getattr(module, "configure_pipeline", None)
    return hook if callable(hook) else None


class _Wrapped(nn.Module):
    """A plain callable as a layer."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self._function = function

    @override
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call it."""
        return self._function(*args, **kwargs)


def _hooked_layers(hook: Callable[[], Any]) -> tuple[nn.Module, ...]:
    returned = hook()
    is_listing = isinstance(returned, list | tuple | nn.ModuleList | nn.Sequential)
    entries = list(returned) if is_listing else None
    if not entries or not all(callable(entry) for entry in entries):
        msg = (
            f"configure_pipeline() returned {returned!r}. Rule: it returns the network's layers "
            "in the order of their calls. Remedy: return a list of modules, as in "
            "[self.embed, *self.blocks, self.head]"
        )
        raise NetworkError(msg)
    if len({id(entry) for entry in entries}) < len(entries):
        msg = (
            "configure_pipeline() returned one layer twice. Rule: a layer runs once, on one "
            "stage. Remedy: return each module once (tie the weights instead of the modules)"
        )
        raise NetworkError(msg)
    return tuple(e if isinstance(e, nn.Module) else _Wrapped(e) for e in entries)


def _needs_chain(network: nn.Module, layers: Sequence[nn.Module]) -> bool:
    inside = {id(child) for child in network.modules()}
    has_forward = type(network).forward is not nn.Module.forward
    return not has_forward or any(id(layer) not in inside for layer in layers)


def _registered_layers(network: nn.Module) -> tuple[nn.Module, ...]:
    if isinstance(network, nn.Sequential | nn.ModuleList):
        return _members(network)
    containers = _outermost_containers(network)
    if containers:
        layers = [layer for container in containers for layer in _members(container)]
        if len(layers) > 1:
            return tuple(layers)
    return tuple(c for c in network.children() if any(True for _ in c.parameters()))


def _outermost_containers(module: nn.Module) -> list[nn.Sequential | nn.ModuleList]:
    found: list[nn.Sequential | nn.ModuleList] = []
    for child in module.children():
        if isinstance(child, nn.Sequential | nn.ModuleList) and len(child) > 1:
            if any(True for _ in child.parameters()):
                found.append(child)
        else:
            found.extend(_outermost_containers(child))
    return found


def _members(container: nn.Sequential | nn.ModuleList) -> tuple[nn.Module, ...]:
    """Return the members; a plain ``nn.Sequential`` within one is only a bracket."""
    members: list[nn.Module] = []
    for member in container:
        if type(member) is nn.Sequential and isinstance(container, nn.Sequential) and len(member):
            members.extend(_members(member))
        else:
            members.append(member)
    return tuple(members)
