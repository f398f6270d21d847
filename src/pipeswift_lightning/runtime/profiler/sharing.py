"""The same profile on every rank: the first one's, or each rank's part of it put together."""

import logging
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist

from pipeswift_lightning.plan.costs import CostError, Link, Origin
from pipeswift_lightning.plan.profile import CostProfile, slowest_link
from pipeswift_lightning.runtime.profiler.examples import shape_of
from pipeswift_lightning.runtime.profiler.link import measure_link
from pipeswift_lightning.runtime.profiler.measure import (
    Measured,
    ProfileOptions,
    Subject,
    layer_profiles,
    measure,
)
from pipeswift_lightning.runtime.profiler.network import check
from pipeswift_lightning.runtime.profiler.origin import origin_of
from pipeswift_lightning.runtime.transport import Transport

__all__ = ["obtain_profile", "profile_stages", "read_profile", "shared_link", "write_profile"]

_log = logging.getLogger(__name__)


def profile_stages(
    subject: Subject,
    micro_batches: Sequence[Any],
    group: dist.ProcessGroup | None,
    *,
    owned: Sequence[int] | None = None,
    shapes: Sequence[tuple[int, int]] | None = None,
    options: ProfileOptions | None = None,
) -> CostProfile:
    """Measure each layer on one rank of ``group``, and return the whole profile on all of them.

    What a rank's layers would be given by others' is drawn at random, in the right shape. The
    ranks' layers need not exist elsewhere, nor hold values: those on the meta device are drawn too.

    Args:
        subject: The network; the same layers in the same order on every rank.
        micro_batches: The same on every rank.
        group: The ranks of one pipeline.
        owned: Positions (in call order) of this rank's layers; by default an equal share of them.
        shapes: As for `profile_network`.
        options: How often to measure.

    Raises:
        ProfileError: A layer is nobody's, or the network cannot be measured.
    """
    options = options or ProfileOptions()
    check(micro_batches)
    trace = subject.trace(micro_batches[0])
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    if owned is None:
        n = trace.num_layers
        owned = range(n * rank // ranks, n * (rank + 1) // ranks)
    mine = measure(subject, micro_batches, options, owned) if len(owned) else Measured({}, [])
    origin = origin_of(subject.module, subject.layers, subject.device, options.settings)
    parts: list[tuple[Measured, Origin]] = [(mine, origin)] * ranks
    dist.all_gather_object(parts, (mine, origin), group=group)
    return CostProfile(
        shapes=tuple(shapes or map(shape_of, micro_batches)),
        layers=layer_profiles(
            subject, trace, [part for part, _ in parts], options.optimizer_factor
        ),
        origin=parts[0][1],
    )


def shared_link(
    transport: Transport, num_stages: int, group: dist.ProcessGroup | None
) -> Link | None:
    """Measure the links of a pipeline, and return the slowest on every rank; ``None`` for none."""
    mine = measure_link(transport, num_stages)
    every: list[Link | None] = [None] * dist.get_world_size(group)
    dist.all_gather_object(every, mine, group=group)
    return slowest_link([link for link in every if link is not None])


def obtain_profile(
    path: str | os.PathLike[str] | None,
    origin: Origin,
    profile: Callable[[], CostProfile],
    group: dist.ProcessGroup | None = None,
    *,
    together: bool = False,
) -> CostProfile:
    """Return the profile of a file if it still holds; else measure, and write the file.

    Every rank of ``group`` calls this and gets the numbers of its first rank, so that all plan
    alike. Only that rank touches the file.

    Args:
        path: The file; ``None`` for none.
        origin: What is to be planned for, on this rank (see `origin_of`).
        profile: Measures. Called on the first rank alone, or on all of them.
        group: Ranks that must agree; without a process group this one rank decides.
        together: Whether ``profile`` is a collective, such as `profile_stages`.
    """
    alone = not dist.is_initialized() or dist.get_world_size(group) == 1
    first = alone or dist.get_rank(group) == 0
    found = read_profile(path, origin) if first and path is not None else None
    if alone:
        return found or _written(profile(), path)
    text = _broadcast(found.to_json() if found is not None else "", group)
    if text:
        return CostProfile.from_json(text)
    measured = profile() if first or together else None
    if first and measured is not None:
        _written(measured, path)
    return CostProfile.from_json(
        _broadcast(measured.to_json() if measured is not None else "", group)
    )


def _broadcast(text: str, group: dist.ProcessGroup | None) -> str:
    box = [text]
    dist.broadcast_object_list(box, group=group, group_src=0)
    return box[0]


def _written(profile: CostProfile, path: str | os.PathLike[str] | None) -> CostProfile:
    if path is not None:
        write_profile(profile, path)
    return profile


def write_profile(profile: CostProfile, path: str | os.PathLike[str]) -> None:
    """Write a profile as JSON: whole, or not at all."""
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    draft = target.with_name(f".{target.name}.{os.getpid()}")
    draft.write_text(profile.to_json())
    draft.replace(target)


def read_profile(path: str | os.PathLike[str], origin: Origin) -> CostProfile | None:
    """Return the profile in a file if it was measured of the same, where it is to be used.

    Otherwise a notice in the log says what is different.
    """
    file = Path(path)
    try:
        if not file.is_file():
            return None
        profile = CostProfile.from_json(file.read_text())
    except (CostError, OSError, UnicodeDecodeError) as error:
        _log.warning("%s is measured anew: %s", file, error)
        return None
    changes = profile.origin.differences(origin)
    if changes:
        _log.warning("%s is measured anew: %s", file, "; ".join(changes))
        return None
    return profile
