"""What one topology saves, every other reads: parameters and optimizer state, bit by bit."""

from datetime import timedelta
from itertools import product
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from pipeswift_lightning.runtime.checkpoint_directory import CheckpointDirectory
from pipeswift_lightning.runtime.mesh import Coordinate, Mesh
from pipeswift_lightning.runtime.ownership import LocalShare, Owners, ParameterTable
from pipeswift_lightning.runtime.sharded_state import read_table, read_tensors, save_small
from pipeswift_lightning.runtime.topology import Structure
from pipeswift_lightning.strategies.shard_saver import Shard, ShardSaver
from pipeswift_lightning.strategies.training_state import MODEL, model_tensors, optimizer_tensors
from tests.helpers.distributed import run_ranks
from tests.helpers.modules import Language, Transformer

TOPOLOGIES = [(4, 1), (3, 1), (2, 2), (2, 1), (1, 2), (1, 1)]


def _label(stages: int, replicas: int) -> str:
    return f"{stages}x{replicas}"


def _trained() -> tuple[Language, torch.optim.Optimizer]:
    """A module with tied weights and a buffer, three steps of AdamW in; the same in any process."""
    torch.manual_seed(5)
    module = Language(Transformer(tied="module"))
    module.register_buffer("seen", torch.randn(3))
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.01)
    for _ in range(3):
        for parameter in module.parameters():
            parameter.grad = torch.randn_like(parameter)
        optimizer.step()
    return module, optimizer


def _cut(module: Language, mesh: Mesh, stage: int) -> LocalShare:
    """Keep one stage's parameters: blocks in turn, the embedding on the first and the last."""
    last = mesh.num_stages - 1
    owners: dict[str, tuple[int, ...]] = {}
    for name, _ in module.named_parameters():
        block = name.removeprefix("model.blocks.").partition(".")[0]
        if block.isdigit():
            owners[name] = (int(block) * mesh.num_stages // 4,)
        elif "embed" in name:
            owners[name] = (0, last) if last else (0,)
        else:
            owners[name] = (0,) if "position" in name else (last,)
    share = LocalShare(module, Owners(owners, {"seen": last}), ParameterTable.of(module), stage)
    share.give_up_foreign()
    return share


def _local(mesh: Mesh, place: Coordinate) -> tuple[Language, dict[str, Tensor]]:
    """Return a stage's module and its tensors by name."""
    module, optimizer = _trained()
    share = _cut(module, mesh, place.stage)
    for parameter in [p for p in optimizer.state if not p.numel()]:
        del optimizer.state[parameter]
    tensors = model_tensors(module, share, place, mesh.num_stages - 1)
    state, values = optimizer_tensors([optimizer], module)
    assert values == {}
    return module, {**tensors, **state}


def _save(folder: Path, topologies: list[tuple[int, int]]) -> None:
    saver = ShardSaver(timedelta(seconds=30), torch.device("cpu"))
    for stages, replicas in topologies:
        mesh = Mesh(stages, replicas)
        module, tensors = _local(mesh, mesh.coordinate(dist.get_rank()))
        box = [CheckpointDirectory(folder / _label(stages, replicas)).begin(3, None)]
        required = [f"{MODEL}{name}" for name in Structure.of(module).tensors]
        files = {f"rank{dist.get_rank()}.pt": save_small({})}
        saver.save(Shard(box[0], tensors, files, {}, required))
    saver.close()


def _load(folder: Path, topologies: list[tuple[int, int]]) -> None:
    for (stages, replicas), source in product(topologies, TOPOLOGIES):
        mesh = Mesh(stages, replicas)
        place = mesh.coordinate(dist.get_rank())
        _, want = _local(mesh, place)
        if place.replica == 0 and place.stage == stages - 1:
            assert f"{MODEL}seen" in want
        got = {name: torch.full_like(tensor, -7) for name, tensor in want.items()}
        read_tensors(folder / _label(*source) / "step3", got)
        different = [name for name in want if not torch.equal(got[name], want[name])]
        assert different == [], f"{source} to {(stages, replicas)}: {different}"


def _worlds() -> dict[int, list[tuple[int, int]]]:
    worlds: dict[int, list[tuple[int, int]]] = {}
    for stages, replicas in TOPOLOGIES:
        worlds.setdefault(stages * replicas, []).append((stages, replicas))
    return worlds


@pytest.mark.slow
def test_no_tensor_differs_over_all_pairs_of_topologies(tmp_path: Path) -> None:
    for size, topologies in _worlds().items():
        run_ranks(_save, size, {"folder": tmp_path, "topologies": topologies}, deadline_s=90)
    module, optimizer = _trained()
    names = {f"{MODEL}{name}" for name in Structure.of(module).tensors}
    names |= optimizer_tensors([optimizer], module)[0].keys()
    for topology in TOPOLOGIES:
        folder = tmp_path / _label(*topology) / "step3"
        table = read_table(folder)
        assert table.keys() == names
        stored = sum(p.stat().st_size for p in folder.glob("*.distcp"))
        assert stored < 1.05 * sum(
            p.stat().st_size for p in (tmp_path / "1x1" / "step3").glob("*.distcp")
        )
    for size, topologies in _worlds().items():
        run_ranks(_load, size, {"folder": tmp_path, "topologies": topologies}, deadline_s=90)
