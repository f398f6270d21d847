"""What all ranks together say of a folder of checkpoints; each function is a collective."""

from pathlib import Path

from pipeswift_lightning.runtime.checkpoint_directory import (
    CheckpointDirectory,
    CheckpointError,
    find_whole,
    why_damaged,
)
from pipeswift_lightning.runtime.mesh import Mesh
from pipeswift_lightning.strategies.collectives import Collectives

__all__ = ["find_sound", "require_writable"]


def find_sound(
    path: str | Path,
    collectives: Collectives | None = None,
    mesh: Mesh | None = None,
    rank: int = 0,
) -> Path | None:
    """Return the checkpoint that a path means, once all of its files were read.

    Each rank reads a share of the files, and compares them with their checksums. Where the newest
    is meant, one that is damaged is passed over with a warning.

    Args:
        path: As for `find_whole`; the first rank's counts.
        collectives: Of the ranks; without them, this process reads all.
        mesh: Their places.
        rank: This one.

    Raises:
        CheckpointError: The checkpoint is not whole, is damaged, or there is none that is neither.
    """
    damaged: dict[Path, str] = {}
    num_ranks = 1 if collectives is None or mesh is None else mesh.world_size
    meant = path if isinstance(path, Path) else Path(path)  # `Path()` makes a plain one of it
    while True:
        found = find_whole(meant, damaged) if rank == 0 else None
        if collectives is not None:
            found = collectives.broadcast(found, 0)
        if found is None:
            return None
        problems = [[why_damaged(found, rank, num_ranks)]]
        if collectives is not None:
            what = "comparing a checkpoint with its checksums"
            problems = collectives.gather_over_ranks(what, problems[0][0])
        reasons = [problem for row in problems for problem in row if problem is not None]
        if not reasons:
            return found
        damaged[found] = "; ".join(reasons)


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
