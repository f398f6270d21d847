"""A strategy that writes checkpoints in shards, and reads them on any topology."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn
from torch.optim import Optimizer
from typing_extensions import override

from pipeswift_lightning.runtime.checkpoint_directory import (
    CheckpointDirectory,
    Commit,
)
from pipeswift_lightning.runtime.topology import Layout, Structure, Topology, versions
from pipeswift_lightning.strategies.checkpoint_folder import find_sound, require_writable
from pipeswift_lightning.strategies.epoch_position import EpochPosition
from pipeswift_lightning.strategies.hushed_warning import HushedWarning
from pipeswift_lightning.strategies.loader_seeds import LoaderSeeds
from pipeswift_lightning.strategies.optimizers import load_settings, unwrapped
from pipeswift_lightning.strategies.recorded_plan import RecordedPlan
from pipeswift_lightning.strategies.shard_saver import Shard, ShardSaver
from pipeswift_lightning.strategies.shard_source import LIGHTNING_FILE, ShardSource, rank_file
from pipeswift_lightning.strategies.state_strategy import StateStrategy
from pipeswift_lightning.strategies.training_state import (
    MODEL,
    at_the_start_of_an_epoch,
    extra_state,
    model_tensors,
    named_settings,
    optimizer_tensors,
    safe_state,
)

__all__ = ["ShardedStrategy"]


class ShardedStrategy(StateStrategy):
    """Adds checkpoints in shards to those in one file.

    Args:
        **kwargs: As for `StateStrategy`.
    """

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._saver: ShardSaver | None = None
        self._seeds: LoaderSeeds | None = None
        self._source: ShardSource | None = None
        self._position: EpochPosition | None = None  # until the loader has been moved
        self._logged: EpochPosition | None = None  # until a step has ended
        self._has_pending_optimizer_state = False
        self._describes_only = False
        self._not_resumable = HushedWarning(".*your dataloader is not resumable.*")

    # -- saving -------------------------------------------------------------------------------

    @property
    def saver(self) -> ShardSaver:
        """Saves in shards; exists while the Trainer runs."""
        if self._saver is None:
            self._saver = ShardSaver(self._timeout, self.root_device)
        return self._saver

    def require_writable(self, dirpath: Path) -> None:
        """See that every rank can write to a folder; collective over all ranks."""
        assert self._collectives is not None
        require_writable(dirpath, self._collectives, self.mesh)

    def save_sharded(
        self,
        dirpath: str | Path,
        *,
        fresh: bool,
        asynchronous: bool = False,
        keep: int | None = None,
    ) -> Path:
        """Write a checkpoint with its topology; collective over all ranks.

        Args:
            dirpath: Folder of checkpoints, on a file system that all ranks share.
            fresh: Whether it is between two epochs: what the last one did is done, and no batch
                of the next was drawn. Otherwise, that a batch has just ended.
            asynchronous: Return once the tensors are copied; they are written in a thread.
            keep: Delete all but so many of the newest afterwards.

        Returns:
            The checkpoint, or where it will be.

        Raises:
            CheckpointError: It could not be written; on every rank.
        """
        collectives, module = self._collectives, self.lightning_module
        assert collectives is not None
        assert module is not None
        saver, trainer = self.saver, module.trainer
        collectives.guarded("waiting for the checkpoint before", saver.finish)
        commit: Commit | None = None
        if self.global_rank == 0:
            commit = CheckpointDirectory(Path(dirpath)).begin(trainer.global_step, keep)
        agreed: Commit = collectives.broadcast(commit, 0)
        shard = self._shard(agreed, trainer, module, fresh=fresh)
        save = saver.begin if asynchronous else saver.save
        collectives.guarded("saving a checkpoint", lambda: save(shard))
        return agreed.target

    def _shard(
        self, commit: Commit, trainer: Trainer, module: LightningModule, *, fresh: bool
    ) -> Shard:
        mesh, place = self.mesh, self.groups.coordinate
        share = self._session.share if self._session is not None else None
        self.keep_local()
        tensors = model_tensors(module, share, place, mesh.num_stages - 1)
        state, values = optimizer_tensors(self.optimizers, module)
        lightning_state = self._lightning_state(trainer, fresh=fresh)
        loader = lightning_state["loops"]["fit_loop"]["state_dict"].pop("combined_loader", None)
        owns_extra = place.stage == mesh.num_stages - 1 and place.replica == 0
        own = {
            "position": EpochPosition.of(trainer, module, self.root_device, fresh=fresh).as_state(),
            "seeds": self._seeds_for(fresh=fresh).as_state(),
            "optimizer_values": values,
            "extra_state": extra_state(module) if owns_extra else {},
            "loader": loader,
            "steps": self.step_state(),
        }
        files = {rank_file(self.global_rank): safe_state(own)}
        if self.global_rank == 0:
            files[LIGHTNING_FILE] = safe_state(lightning_state)
        structure = Structure.of(module)
        return Shard(
            commit,
            {**tensors, **state},
            files,
            self._topology(trainer, structure).as_json(),
            [f"{MODEL}{name}" for name in structure.tensors],
        )

    def _lightning_state(self, trainer: Trainer, *, fresh: bool) -> dict[str, Any]:
        self._describes_only = True
        try:
            state: dict[str, Any] = trainer._checkpoint_connector.dump_checkpoint(
                weights_only=False
            )
        finally:
            self._describes_only = False
        del state["state_dict"]
        if fresh:
            state["loops"] = at_the_start_of_an_epoch(state["loops"])
        return state

    def step_state(self) -> dict[str, Any]:
        """Return what steps depend on beside the module; a subclass knows."""
        return {}

    def load_step_state(self, state: Mapping[str, Any]) -> None:
        """Take what `step_state` has returned."""

    def _topology(self, trainer: Trainer, structure: Structure) -> Topology:
        mesh, session = self.mesh, self._session
        partition = session.partition if session is not None else None
        plan = session.plan if session is not None else None
        share = session.share if session is not None else None
        owners = share.owners.parameters if share is not None else {}
        small = [rank_file(rank) for rank in range(mesh.world_size)]
        return Topology(
            step=trainer.global_step,
            epoch=trainer.current_epoch,
            batches=trainer.fit_loop.epoch_loop.batch_progress.current.ready,
            structure=structure,
            optimizer_groups=self._names.groups,
            layers=None if partition is None else [[r.start, r.stop] for r in partition.ranges],
            micro_batches=None if plan is None else list(plan.micro_batches.sizes),
            schedule={}
            if plan is None
            else {"name": plan.schedule_name, "plan": plan.digest, "loss": str(self.options.loss)},
            layout=Layout(
                num_stages=mesh.num_stages,
                num_replicas=mesh.num_replicas,
                backend=str(torch.distributed.get_backend()),
                pipelines=[mesh.pipeline_ranks(r) for r in range(mesh.num_replicas)],
                replicas=[mesh.replica_ranks(s) for s in range(mesh.num_stages)],
                shared_parameters={n: list(s) for n, s in owners.items() if len(s) > 1},
            ),
            versions=versions(lightning=lightning.__version__),
            small_files=[LIGHTNING_FILE, *small],
            planned={} if session is None else session.planner.record(),
        )

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        if not self._describes_only:
            return super().lightning_module_state_dict()
        assert self.lightning_module is not None
        return _described(self.lightning_module)

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        if not self._describes_only:
            return super().optimizer_state(optimizer)
        inner = unwrapped(optimizer)
        index = next(i for i, o in enumerate(self.optimizers) if unwrapped(o) is inner)
        return named_settings(optimizer, self._names.groups[index])

    # -- restoring ----------------------------------------------------------------------------

    @override
    def load_checkpoint(
        self, checkpoint_path: str | Path, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Read Lightning's state; the tensors follow when Lightning asks for them to be loaded."""
        self._source = self._position = self._logged = None
        found = find_sound(checkpoint_path, self._collectives, self.mesh, self.global_rank)
        if found is None:
            return super().load_checkpoint(checkpoint_path, weights_only)
        module = self.lightning_module
        assert module is not None
        self._source = source = ShardSource.open(found)
        state = source.lightning_state()
        state["state_dict"] = source.described_model()
        if module.trainer.state.fn == TrainerFn.FITTING:
            place = self.mesh.coordinate(self.global_rank)
            self.load_step_state(source.step_state(self.mesh, place))
            loader = source.own_rank_state(self.mesh, place)["loader"]
            if loader is not None:
                state["loops"]["fit_loop"]["state_dict"]["combined_loader"] = loader
            self._position = self._logged = source.position(self.mesh, place, module)
            # Lightning does not know that the loader will be moved (`on_train_start`).
            self._not_resumable.begin()
        return state

    @override
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        if self._source is None:
            super().load_model_state_dict(checkpoint, strict=strict)
            return
        module = self.lightning_module
        assert module is not None
        self._source.require_untouched(checkpoint["state_dict"])
        self._source.load_model(module, strict=strict)
        if self._division is not None:
            self._division.read_later(self._source.find, strict=strict)
        topology = self._source.topology
        if self._source.is_like(self.mesh):
            self.session.recorded = RecordedPlan.of(topology.layers, topology.micro_batches)

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        if self._source is None:
            super().load_optimizer_state_dict(checkpoint)
            return
        self._source.check_groups(self._names.groups)
        for optimizer, recorded in zip(
            self.optimizers, checkpoint["optimizer_states"], strict=True
        ):
            load_settings(optimizer, recorded["param_groups"])
        # Until the module is cut, each rank holds all of it, but need not hold all this state.
        self._has_pending_optimizer_state = True
        if not self._will_be_cut:
            self._load_pending()

    @override
    def keep_local(self) -> None:
        super().keep_local()
        self._load_pending()

    def _load_pending(self) -> None:
        if self._has_pending_optimizer_state:
            self._has_pending_optimizer_state = False
            self._load_optimizer_state()

    def _load_optimizer_state(self) -> None:
        """Give the parameters that are here their optimizer's state."""
        module, source = self.lightning_module, self._source
        assert module is not None
        assert source is not None
        here = {name for name, p in module.named_parameters() if not p.is_meta}
        state = source.optimizer_state(here)
        for index, optimizer in enumerate(self.optimizers):
            order = [name for group in self._names.groups[index] for name in group]
            numbered = {i: state[name] for i, name in enumerate(order) if name in state}
            settings = named_settings(optimizer, self._names.groups[index])["param_groups"]
            whole = {"state": numbered, "param_groups": settings}
            optimizer.load_state_dict(self._names.local_state(index, optimizer, whole))

    # -- where in an epoch --------------------------------------------------------------------

    def _seeds_for(self, *, fresh: bool) -> LoaderSeeds:
        if self._seeds is not None and not fresh:
            return self._seeds
        seeds = LoaderSeeds(self.root_device, self._loaders())
        seeds.before_iterator = seeds.now()
        return seeds

    def _loaders(self) -> list[object]:
        """The training's loaders, once Lightning has processed all of them."""
        module = self.lightning_module
        loader = module.trainer.fit_loop._combined_loader if module is not None else None
        return [] if loader is None else list(loader.flattened)

    @override
    def process_dataloader(self, dataloader: object) -> object:
        trainer = self.lightning_module.trainer if self.lightning_module is not None else None
        processed = super().process_dataloader(dataloader)
        if trainer is not None and trainer.training and trainer.fit_loop._combined_loader is None:
            before = [] if self._seeds is None else self._seeds.loaders
            self._seeds = LoaderSeeds(self.root_device, [*before, processed])
            self._seeds.note_set_up()
        return processed

    def note_epoch_start(self) -> None:
        """Note the random state in which an epoch's loader begins; a callback calls this."""
        if self._seeds is None:
            self._seeds = LoaderSeeds(self.root_device)
        self._seeds.loaders = self._loaders()  # Lightning may have loaded them anew
        self._seeds.note_epoch()

    @override
    def on_train_start(self) -> None:
        super().on_train_start()
        position, self._position = self._position, None
        module, source = self.lightning_module, self._source
        if position is None or module is None or source is None:
            return
        seeds = LoaderSeeds(self.root_device, self._loaders())
        recorded = source.own_rank_state(self.mesh, self.mesh.coordinate(self.global_rank))
        seeds.load(recorded["seeds"], is_made=position.batches == 0)
        self._seeds = seeds
        position.move_loader(module.trainer, seeds)
        position.load_metrics(module)

    def _after_step(self) -> None:
        """Finish resuming within the first step: nothing of the epoch is missing any more."""
        logged, self._logged = self._logged, None
        if logged is None:
            return
        self._not_resumable.end()
        module = self.lightning_module
        assert module is not None
        # Else Lightning would skip what monitors the epoch's metrics at its end.
        module.trainer.fit_loop.restarting = False
        logged.add_logged(module.trainer, module)

    def any_rank(self, wish: bool) -> bool:  # noqa: FBT001 -- a vote
        """Return whether any rank wishes; collective, over the connections of the saves."""
        assert self._collectives is not None
        return self._collectives.guarded(
            "agreeing on a checkpoint", lambda: self.saver.any_rank(wish=wish)
        )

    # -- the end ------------------------------------------------------------------------------

    def finish_saves(self) -> None:
        """Wait for a checkpoint that is being written; collective.

        Raises:
            CheckpointError: It failed.
        """
        if self._saver is not None and self._collectives is not None:
            self._collectives.guarded("waiting for a checkpoint", self._saver.finish)

    def poll_saves(self) -> None:
        """Raise the error of a checkpoint that failed while it was being written."""
        if self._saver is not None:
            self._saver.poll()

    def finish_restoring(self) -> None:
        """Load what has waited for a step, if the run was over already; collective."""
        if self._collectives is not None:
            self._collectives.guarded("loading the optimizers' state", self._load_pending)
            if not self._is_divided:
                self._load_waiting()

    def _close_saver(self) -> None:
        saver, self._saver = self._saver, None
        self._has_pending_optimizer_state, self._waiting_states = False, None
        self._not_resumable.end()
        self._source = self._position = self._logged = self._seeds = None
        if saver is not None:
            saver.close()


def _described(module: LightningModule) -> dict[str, Any]:
    """Return a state dict of tensors without data, for hooks that look at names and shapes."""
    return {
        name: value.to("meta") if isinstance(value, torch.Tensor) else value
        for name, value in module.state_dict().items()
    }
