"""Named tensors to and from a checkpoint's folder, each rank its own, by `torch.distributed`'s DCP.

DCP describes its files by a pickle, and stores what is no tensor as pickles too. Here only tensors
go through DCP, and its description is read by an unpickler that knows DCP's own classes and no
others: reading a checkpoint executes nothing.
"""

import concurrent.futures
import io
import pickle
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.staging import AsyncStager
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import AsyncSaveResponse, async_save, save
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future
from typing_extensions import override

from pipeswift_lightning.runtime.checkpoint_directory import (
    METADATA_FILE,
    CheckpointError,
    Commit,
    write_durably,
)
from pipeswift_lightning.runtime.checksum import checksum, file_checksum

__all__ = [
    "NameCheck",
    "ShardWriter",
    "begin_save",
    "checked",
    "load_small",
    "read_table",
    "read_tensors",
    "save_small",
    "save_tensors",
]

_ALLOWED = {
    "torch.distributed.checkpoint.metadata": {
        "_MEM_FORMAT_ENCODING",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.serialization": {"_get_layout"},
    "pathlib": {"Path", "PosixPath", "PurePosixPath", "PureWindowsPath", "WindowsPath"},
    "pathlib._local": {"PosixPath", "WindowsPath"},
    "collections": {"OrderedDict"},
}


class _DescriptionUnpickler(pickle.Unpickler):
    """Reads DCP's description of its files; refuses every other class."""

    @override
    def find_class(self, module: str, name: str) -> Any:
        if name in _ALLOWED.get(module, ()):
            return super().find_class(module, name)
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        if (module, name) == ("torch", "Size"):
            return torch.Size
        msg = (
            f"{METADATA_FILE} names {module}.{name}. Rule: reading a checkpoint executes nothing, "
            "so only the classes that describe tensors are known. Remedy: do not use this file; "
            "it was not written by a save"
        )
        raise CheckpointError(msg)


class _Reader(FileSystemReader):
    """Reads with the safe unpickler."""

    @override
    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        path = Path(self.path) / METADATA_FILE
        try:
            with path.open("rb") as file:
                metadata = _DescriptionUnpickler(file).load()
        except CheckpointError:
            raise
        except Exception as error:  # an unpickler of damaged bytes may raise anything
            raise _unreadable(path, error) from error
        if not isinstance(metadata, Metadata):
            raise _unreadable(path, TypeError(f"it describes a {type(metadata).__name__}"))
        return metadata


def read_table(path: Path) -> dict[str, tuple[torch.dtype, torch.Size]]:
    """Return the dtype and shape of each tensor in a checkpoint, by name.

    Raises:
        CheckpointError: Something in it is no tensor.
    """
    table = {}
    for name, stored in _Reader(path).read_metadata().state_dict_metadata.items():
        if not isinstance(stored, TensorStorageMetadata):
            msg = f"{name} in {path} is no tensor. Rule: only tensors are read. Remedy: save anew"
            raise CheckpointError(msg)
        table[name] = (stored.properties.dtype, stored.size)
    return table


def read_tensors(path: Path, targets: Mapping[str, Tensor]) -> None:
    """Fill ``targets`` in place, by name; each rank reads what it needs, alone.

    Args:
        path: A whole checkpoint.
        targets: Tensors of the stored shapes, on any device.
    """
    if not targets:
        return
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*torch.distributed is disabled.*")
        planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        load(
            {name: target.detach() for name, target in targets.items()},
            storage_reader=_Reader(path),
            planner=planner,
            no_dist=True,
        )


def save_small(value: Any) -> bytes:
    """Serialise plain values and tensors so that `load_small` reads them.

    Raises:
        pickle.UnpicklingError: ``value`` holds something that could only be read by executing it.
    """
    buffer = io.BytesIO()
    torch.save(value, buffer)
    buffer.seek(0)
    torch.load(buffer, weights_only=True, map_location="cpu")
    return buffer.getvalue()


def load_small(path: Path) -> Any:
    """Read what `save_small` has made; nothing is executed.

    Raises:
        CheckpointError: It is something else.
    """
    try:
        return torch.load(path, weights_only=True, map_location="cpu")
    except (OSError, EOFError, RuntimeError, ValueError, KeyError, pickle.UnpicklingError) as error:
        raise _unreadable(path, error) from error


def _unreadable(path: Path, error: Exception) -> CheckpointError:
    reason = str(error).strip().partition("\n")[0] or type(error).__name__
    return CheckpointError(
        f"{path} cannot be read: {reason}. Rule: only what a save has written is read, and nothing "
        "in it is executed. Remedy: another checkpoint; do not trust this file"
    )


class NameCheck(DefaultSavePlanner):
    """Plans who writes what, and refuses a plan that lacks a part of the model.

    Args:
        required: Names that must be there, on all ranks together.
    """

    def __init__(self, required: Iterable[str]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._required = frozenset(required)

    @override
    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        plans, metadata = super().create_global_plan(all_plans)
        self.check(metadata)
        return plans, metadata

    def check(self, metadata: Metadata) -> None:
        """Compare the names in a description with the model's.

        Raises:
            CheckpointError: Some are missing.
        """
        missing = sorted(self._required - metadata.state_dict_metadata.keys())
        if missing:
            msg = (
                f"the ranks together hold no {', '.join(missing[:5])}"
                f"{f' and {len(missing) - 5} more' if missing[5:] else ''}. Rule: a checkpoint "
                "holds every name of the model. Remedy: report this; the checkpoint was not made"
            )
            raise CheckpointError(msg)


@dataclass(frozen=True, slots=True)
class _Checksums:
    """What a rank tells of its files, by name."""

    by_name: Mapping[str, str]


class ShardWriter(FileSystemWriter):
    """Writes a rank's tensors and small files, and on rank 0 makes the checkpoint whole at the end.

    DCP calls `finish` on one rank once all ranks have written, and tells all of them if it fails.

    Args:
        commit: Where the checkpoint is made.
        files: This rank's small files, by name.
        topology: What `Commit.complete` writes; used on rank 0.
        names: Checks what was written.
    """

    def __init__(
        self,
        commit: Commit,
        files: Mapping[str, bytes],
        topology: Mapping[str, Any],
        names: NameCheck,
    ) -> None:
        super().__init__(commit.unfinished)
        self._commit = commit
        self._files = files
        self._topology = topology
        self._names = names

    @override
    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan  # the folder is made once, by rank 0, in `prepare_global_plan`

    @override
    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        self._commit.prepare()
        return super().prepare_global_plan(plans)

    @override
    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        folder = self._commit.unfinished
        for name, content in self._files.items():
            write_durably(folder / name, content)
        results = super().write_data(plan, planner).wait()
        sums = {name: checksum(content) for name, content in self._files.items()}
        for name in {result.storage_data.relative_path for result in results}:
            sums[name] = file_checksum(folder / name)
        told: Future[list[WriteResult]] = Future()
        # DCP brings each rank's results to `finish`, and these along with them.
        told.set_result([*results, WriteResult(MetadataIndex(""), 0, _Checksums(sums))])
        return told

    @override
    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        sums: dict[str, str] = {}
        written: list[list[WriteResult]] = []
        for mine in results:
            written.append([r for r in mine if not isinstance(r.storage_data, _Checksums)])
            for result in mine:
                if isinstance(result.storage_data, _Checksums):
                    sums |= result.storage_data.by_name
        super().finish(metadata, written)
        self._names.check(metadata)
        self._check_files(metadata)
        self._commit.complete(self._topology, sums)

    def _check_files(self, metadata: Metadata) -> None:
        """See what all ranks have written."""
        here = {p.name for p in self._commit.unfinished.iterdir()}
        lost = {info.relative_path for info in metadata.storage_data.values()} - here
        lost |= set(self._topology.get("small_files", ())) - here
        if lost:
            msg = (
                f"rank 0 does not see {', '.join(sorted(lost))} in {self._commit.unfinished}. "
                "Rule: all ranks write to one folder. Remedy: a dirpath on a shared file system"
            )
            raise CheckpointError(msg)


def save_tensors(
    tensors: Mapping[str, Tensor],
    writer: ShardWriter,
    names: NameCheck,
    group: dist.ProcessGroup | None,
) -> None:
    """Write a checkpoint; collective over ``group``, which must be gloo's.

    Raises:
        CheckpointError: On every rank, if any of them failed.
    """
    with checked():
        save(dict(tensors), storage_writer=writer, planner=names, process_group=group)


def begin_save(
    tensors: Mapping[str, Tensor],
    writer: ShardWriter,
    names: NameCheck,
    group: dist.ProcessGroup,
    stager: AsyncStager,
) -> concurrent.futures.Future[None]:
    """Copy tensors, and begin to write them in a thread; collective over ``group``, gloo's.

    Nothing else may use the group: if training did, the collectives of both would mix, and hang.

    Returns:
        What tells the end of the writing. The tensors may change already.

    Raises:
        TypeError: ``stager`` copies in a thread.
    """
    response = async_save(
        dict(tensors),
        storage_writer=writer,
        planner=names,
        process_group=group,
        async_stager=stager,
    )
    if isinstance(response, AsyncSaveResponse):
        msg = "the stager stages in a thread: StagingOptions(use_async_staging=False)"
        raise TypeError(msg)
    return response


class checked:  # noqa: N801 -- reads as a context
    """Turn DCP's exception, which is no ``Exception``, into a `CheckpointError`."""

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, CheckpointException):
            raise _as_checkpoint_error(error) from None


def _as_checkpoint_error(error: CheckpointException) -> CheckpointError:
    """Return what each rank failed with, in one error."""
    reasons = {
        f"rank {rank}: {str(failure[0]) or type(failure[0]).__name__}"
        for rank, failure in error.failures.items()
    }
    said = "; ".join(sorted(reasons))
    if "Remedy: " not in said:
        said += (
            ". Rule: a checkpoint counts once every rank has written its part. Remedy: see to what "
            "is named here, and go on from the checkpoint before, which is as it was"
        )
    return CheckpointError(f"the checkpoint was not made. {said}")
