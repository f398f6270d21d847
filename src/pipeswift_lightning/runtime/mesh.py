"""The device mesh: axes ``pp`` (stages) and ``dp`` (replicas of the pipeline), and their groups."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

__all__ = ["Coordinate", "Mesh", "MeshError", "MeshGroups"]


class MeshError(ValueError):
    """The number of devices does not fit the mesh."""


@dataclass(frozen=True, slots=True)
class Coordinate:
    """A rank's place: ``stage`` along ``pp``, ``replica`` along ``dp``."""

    stage: int
    replica: int


@dataclass(frozen=True, slots=True)
class Mesh:
    """``num_replicas`` pipelines of ``num_stages`` ranks each; ``pp`` varies fastest.

    Neighbouring stages have neighbouring ranks, so that the links that carry activations stay
    inside a node where they can.

    Example:
        >>> mesh = Mesh.of(world_size=4, num_stages=2)
        >>> mesh.coordinate(3), mesh.rank(stage=0, replica=1)
        (Coordinate(stage=1, replica=1), 2)
    """

    num_stages: int
    num_replicas: int

    @classmethod
    def of(cls, *, world_size: int, num_stages: int | None) -> "Mesh":
        """Return the mesh over ``world_size`` devices; ``None`` makes every device a stage.

        Raises:
            MeshError: ``world_size`` is not a multiple of ``num_stages``.
        """
        stages = world_size if num_stages is None else num_stages
        if stages < 1 or world_size % stages:
            fits = [n for n in range(1, world_size + 1) if world_size % n == 0]
            msg = (
                f"{world_size} devices cannot form pipelines of {stages} stages. Rule: the number "
                "of devices (devices x num_nodes) is a multiple of the number of stages. Remedy: "
                f"stages={' or '.join(map(str, fits))}, or devices={max(stages, 1)} (or a multiple)"
            )
            raise MeshError(msg)
        return cls(stages, world_size // stages)

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.num_stages * self.num_replicas

    def coordinate(self, rank: int) -> Coordinate:
        """Return where ``rank`` stands."""
        return Coordinate(rank % self.num_stages, rank // self.num_stages)

    def rank(self, *, stage: int, replica: int) -> int:
        """Return the rank at a coordinate."""
        return replica * self.num_stages + stage

    def pipeline_ranks(self, replica: int) -> list[int]:
        """Ranks of one pipeline, by stage."""
        return [self.rank(stage=s, replica=replica) for s in range(self.num_stages)]

    def replica_ranks(self, stage: int) -> list[int]:
        """Ranks that hold the same stage, by replica."""
        return [self.rank(stage=stage, replica=r) for r in range(self.num_replicas)]


@dataclass(slots=True)
class MeshGroups:
    """The process groups of one rank.

    Every rank creates the same groups in the same order (a collective requirement of
    ``torch.distributed``). One group a *directed* edge: NCCL ignores tags and matches messages by
    their order within a pair, and activations must never queue behind gradients.

    Attributes:
        mesh: The mesh.
        rank: This rank.
        pipeline: The stages of this rank's pipeline.
        replicas: The ranks that hold the same stage.
        control: As ``pipeline``, for what hosts tell each other: over gloo, whatever the device.
        edges: The groups that move activations and gradients, by (source, destination).
        shared: The groups of stages that own a parameter together.
    """

    mesh: Mesh
    rank: int
    pipeline: dist.ProcessGroup
    replicas: dist.ProcessGroup
    control: dist.ProcessGroup
    edges: dict[tuple[int, int], dist.ProcessGroup] = field(default_factory=dict)
    shared: dict[tuple[int, ...], dist.ProcessGroup] = field(default_factory=dict)
    _connected: set[tuple[int, ...]] = field(default_factory=set)

    @classmethod
    def create(cls, mesh: Mesh, rank: int) -> "MeshGroups":
        """Create and warm the groups of ``mesh``; every rank of the default group calls this."""
        place = mesh.coordinate(rank)
        pipelines = [_new_group(mesh.pipeline_ranks(r)) for r in range(mesh.num_replicas)]
        replicas = [_new_group(mesh.replica_ranks(s)) for s in range(mesh.num_stages)]
        controls = pipelines
        if dist.get_backend() != dist.Backend.GLOO:
            every = [mesh.pipeline_ranks(r) for r in range(mesh.num_replicas)]
            controls = [_new_group(ranks, dist.Backend.GLOO) for ranks in every]
        own = pipelines[place.replica], replicas[place.stage], controls[place.replica]
        groups = cls(mesh, rank, *own)
        for replica in range(mesh.num_replicas):
            for lower in range(mesh.num_stages - 1):
                for edge in ((lower, lower + 1), (lower + 1, lower)):
                    ranks = sorted(mesh.rank(stage=s, replica=replica) for s in edge)
                    group = _new_group(ranks)
                    if rank in ranks:
                        groups.edges[edge] = group
        return groups

    def create_shared(self, owners: Sequence[tuple[int, ...]]) -> None:
        """Create groups for parameters that several stages own; the same on every rank.

        Args:
            owners: Tuples of stages, each with two or more.
        """
        for stages in sorted(set(owners) - self._connected):
            self._connected.add(stages)  # on all ranks: also where this one is no member
            for replica in range(self.mesh.num_replicas):
                ranks = [self.mesh.rank(stage=s, replica=replica) for s in stages]
                group = _new_group(ranks)
                if self.rank in ranks:
                    self.shared[stages] = group

    def close(self) -> None:
        """Let go of the groups: a connection is open for as long as anything refers to it."""
        self.edges.clear()
        self.shared.clear()
        self._connected.clear()
        nothing: Any = None  # what is left of the groups must not be used
        self.pipeline = self.replicas = self.control = nothing

    @property
    def coordinate(self) -> Coordinate:
        """Where this rank stands."""
        return self.mesh.coordinate(self.rank)

    def warm(self, device: torch.device) -> None:
        """Exchange one byte over each edge, in one order on all ranks.

        The first message over a pair opens its connection; in the middle of a schedule that would
        serialise the ranks.
        """
        stage = self.coordinate.stage
        byte = torch.zeros(1, dtype=torch.uint8, device=device)
        for source, destination in sorted(self.edges, key=lambda edge: (min(edge), edge)):
            group = self.edges[source, destination]
            if stage == source:
                group.send([byte], dist.get_group_rank(group, self._rank(destination)), 0).wait()
            else:
                group.recv([byte], dist.get_group_rank(group, self._rank(source)), 0).wait()

    def _rank(self, stage: int) -> int:
        return self.mesh.rank(stage=stage, replica=self.coordinate.replica)


def _new_group(ranks: list[int], backend: str | None = None) -> dist.ProcessGroup:
    group: dist.ProcessGroup = dist.new_group(ranks, backend=backend)
    return group
