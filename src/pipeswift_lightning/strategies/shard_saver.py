"""Saves in shards, at once or in a thread: one at a time, over connections of their own."""

from collections.abc import Iterable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

from pipeswift_lightning.runtime.checkpoint_directory import Commit
from pipeswift_lightning.runtime.sharded_state import (
    NameCheck,
    ShardWriter,
    begin_save,
    checked,
    save_tensors,
)

__all__ = ["Shard", "ShardSaver"]


@dataclass(frozen=True, slots=True)
class Shard:
    """One rank's part of a checkpoint.

    Attributes:
        commit: Where it goes.
        tensors: By name; what other ranks hold alike is written once.
        files: Small files of this rank.
        topology: What rank 0 writes as ``topology.json``.
        required: Names that the ranks together must hold.
    """

    commit: Commit
    tensors: Mapping[str, Tensor]
    files: Mapping[str, bytes]
    topology: Mapping[str, Any]
    required: Iterable[str]


@dataclass(slots=True)
class ShardSaver:
    """Owns what saves need: a gloo group that nothing else uses, and the memory of copies.

    On the group of the training's collectives, a save in a thread would take their messages.
    """

    timeout: timedelta
    device: torch.device
    _group: dist.ProcessGroup | None = None
    _votes: dist.ProcessGroup | None = None  # a save in a thread uses the other one meanwhile
    _stager: DefaultStager | None = None
    _pending: Future[None] | None = None

    @property
    def group(self) -> dist.ProcessGroup:
        """The group; the first use is a collective of all ranks."""
        if self._group is None:
            self._group = dist.new_group(backend="gloo", timeout=self.timeout)
        return self._group

    def any_rank(self, *, wish: bool) -> bool:
        """Return whether any rank wishes; collective. Training's collectives are left alone."""
        if self._votes is None:
            self._votes = dist.new_group(backend="gloo", timeout=self.timeout)
        vote = torch.tensor(int(wish))
        dist.all_reduce(vote, op=dist.ReduceOp.MAX, group=self._votes)
        return bool(vote)

    def save(self, shard: Shard) -> None:
        """Write a checkpoint; collective.

        Raises:
            CheckpointError: On every rank, if any of them failed.
        """
        self._synchronise()
        names = NameCheck(shard.required)
        writer = ShardWriter(shard.commit, shard.files, shard.topology, names)
        save_tensors(shard.tensors, writer, names, self.group)

    def begin(self, shard: Shard) -> None:
        """Copy the tensors, then write them in a thread; collective, after the save before.

        They may change as soon as this returns: any hook may change them, as for an average of
        weights.
        """
        self.finish()
        if self._stager is None:
            cuda = self.device.type == "cuda"
            self._stager = DefaultStager(
                StagingOptions(
                    use_pinned_memory=cuda,
                    use_shared_memory=False,
                    use_async_staging=False,  # who knows when a hook changes a tensor?
                    use_non_blocking_copy=cuda,
                )
            )
        self._synchronise()
        names = NameCheck(shard.required)
        writer = ShardWriter(shard.commit, shard.files, shard.topology, names)
        self._pending = begin_save(shard.tensors, writer, names, self.group, self._stager)

    def _synchronise(self) -> None:
        """Let a GPU finish what makes the tensors; copies may go over streams of their own."""
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()

    def poll(self) -> None:
        """Take note of a save that has ended.

        Raises:
            CheckpointError: It failed.
        """
        if self._pending is not None and self._pending.done():
            self.finish()

    def finish(self) -> None:
        """Wait for the save that is under way.

        Raises:
            CheckpointError: It failed.
        """
        pending, self._pending = self._pending, None
        if pending is not None:
            with checked():
                pending.result()

    def close(self) -> None:
        """Let go of the group and the copies; what is still under way is given up."""
        self._pending = None
        if self._stager is not None:
            self._stager.close()
            self._stager = None
        groups, self._group, self._votes = (self._group, self._votes), None, None
        for group in groups:
            if group is not None and dist.is_initialized():
                with suppress(RuntimeError, ValueError):  # the default group has taken it along
                    dist.destroy_process_group(group)
