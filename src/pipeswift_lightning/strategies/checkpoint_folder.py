"""What all ranks together say of a folder of checkpoints; each function is a collective."""

from pathlib import Path

from pipeswift_lightning.runtime.checkpoint_directory import CheckpointDirectory, CheckpointError
from pipeswift_lightning.runtime.mesh import Mesh
from pipeswift_lightning.strategies.collectives import Collectives

__all__ = ["require_writable"]


def require_writable(folder: Path, collectives: Collectives, mesh: Mesh) -> None:
    """Refuse a folder that some rank cannot write to.

    Raises:
        CheckpointError: On every rank; the message names those that cannot, and why.
    """
    problem = CheckpointDirectory(folder).why_not_writable()
    found = collectives.gather_over_ranks("looking at the folder of checkpoints", problem)
    hindered = [
        f"rank {rank}: {problem}"
        for replica, row in enumerate(found)
        for rank, problem in zip(mesh.pipeline_ranks(replica), row, strict=True)
        if problem is not None
    ]
    if hindered:
        msg = (
            f"checkpoints cannot be written to {folder} ({'; '.join(hindered)}). Rule: every rank "
            "writes its part there. Remedy: another dirpath, on a file system that all ranks "
            "share, or the right to write there"
        )
        raise CheckpointError(msg)
