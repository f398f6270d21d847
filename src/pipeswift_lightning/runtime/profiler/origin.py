"""What was measured, and on what: whether a profile still holds."""

import hashlib
import platform
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch
from torch import nn

from pipeswift_lightning.plan.costs import Origin

__all__ = ["device_name", "origin_of", "structure_digest"]


def origin_of(
    module: nn.Module,
    layers: Sequence[nn.Module],
    device: torch.device,
    settings: Mapping[str, str] | None = None,
) -> Origin:
    """Describe a measurement of ``module`` on ``device``.

    Args:
        module: What is measured.
        layers: Its layers.
        device: Where they run.
        settings: What else decides the costs, such as the precision.
    """
    dtypes = sorted({str(p.dtype).removeprefix("torch.") for p in module.parameters()})
    versions = {"torch": str(torch.__version__)}
    if device.type == "cuda" and torch.version.cuda is not None:
        versions["cuda"] = torch.version.cuda
    return Origin(
        structure=structure_digest(module, layers, settings or {}),
        device=device_name(device),
        dtype=", ".join(dtypes),
        versions=versions,
    )


def device_name(device: torch.device) -> str:
    """Return the model of a device; of a CPU, with the number of threads that torch uses."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    if device.type != "cpu":
        return device.type
    return f"{_cpu_name()}, {torch.get_num_threads()} threads"


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")  # only Linux has it; elsewhere the platform has a name
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def structure_digest(
    module: nn.Module, layers: Sequence[nn.Module], settings: Mapping[str, str]
) -> str:
    """Return a digest of all that decides what the layers cost, but not of any weight's value.

    Example:
        >>> a, b, c = nn.Linear(2, 3), nn.Linear(2, 3), nn.Linear(2, 4)
        >>> digests = [structure_digest(x, [x], {}) for x in (a, b, c)]
        >>> digests[0] == digests[1], digests[0] == digests[2]
        (True, False)
    """
    digest = hashlib.blake2b(digest_size=16)
    for line in (*_lines(module), *map(_of_layer, layers), *sorted(settings.items())):
        digest.update(f"{line}\n".encode())
    return digest.hexdigest()


def _of_layer(layer: nn.Module) -> str:
    return ";".join(_lines(layer))


def _lines(module: nn.Module) -> Iterator[str]:
    for name, child in module.named_modules():
        kind = type(child)
        yield f"{name}: {kind.__module__}.{kind.__qualname__}({child.extra_repr()})"
        # Counts such as that of the heads are often in no representation.
        plain = {k: v for k, v in vars(child).items() if isinstance(v, bool | int | float | str)}
        yield str(sorted((k, v) for k, v in plain.items() if k != "training" and k[0] != "_"))
    for name, parameter in module.named_parameters():
        yield f"{name}: {tuple(parameter.shape)} {parameter.dtype} {parameter.requires_grad}"
