"""Give the stages other layers while training goes on, with all that belongs to them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any, NoReturn

from torch import nn

from pipeswift_lightning.plan.partition import Partition, explicit_partition
from pipeswift_lightning.runtime.agreement import require_agreement
from pipeswift_lightning.runtime.communication import CommunicationError
from pipeswift_lightning.runtime.ownership import Owners, find_owners
from pipeswift_lightning.runtime.relocation import Relocation, parcels
from pipeswift_lightning.runtime.room import StepPeak, forget_peak, needed_bytes, room_bytes
from pipeswift_lightning.strategies.layer_costs import layer_costs
from pipeswift_lightning.strategies.observed_strategy import ObservedStrategy
from pipeswift_lightning.strategies.optimizers import unwrapped

__all__ = ["MovableStrategy", "Moved", "RepartitionError"]


class RepartitionError(RuntimeError):
    """Layers cannot move, or not now."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Moved:
    """What a change of the stages has cost.

    Attributes:
        seconds: How long training stood still for it.
        num_bytes: What all ranks sent, each rounded up to a KiB.
    """

    seconds: float
    num_bytes: int


class MovableStrategy(ObservedStrategy):
    """Moves layers between stages.

    Args:
        **kwargs: As for `ObservedStrategy`.
    """

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._between_steps = True
        self._step_peak = StepPeak()

    def _begin_step(self) -> None:
        """Note that a step's gradients wait from now on."""
        self._between_steps = False

    def _end_step(self) -> None:
        """Note that the optimizer has used all gradients; callbacks have not run yet."""
        self._between_steps = True
        if self.mesh.num_stages > 1:  # else layers never move
            self._step_peak.note(self.root_device)

    @property
    def partition(self) -> Partition | None:
        """The layers of each stage; None before the first step, and where ranks run whole steps."""
        return self._session.partition if self._session is not None else None

    def why_fixed(self) -> str | None:
        """Say why layers cannot move now; None if they can."""
        session = self._session
        if self.mesh.num_stages == 1:
            return "there is one stage, which has all layers"
        if session is None or session.partition is None:
            if session is not None and session.transparent is not None:
                return "every rank runs whole steps (transparent mode), in which stages are fixed"
            return "no step has run yet, so no stage has its layers"
        if not self._between_steps:
            return "a step is under way: its gradients wait, or the optimizer has not used them"
        return None

    def layer_costs(self) -> list[float]:
        """Return profiled or estimated costs of the layers, in call order; ratios count only.

        Profiled ones are for this replica's last batch: other replicas may have others.

        Raises:
            RepartitionError: The module has not been cut.
        """
        session = self._session
        if session is None or session.partition is None:
            self._refuse("the costs of layers are not known")
        known = session.planner.layer_costs()
        if known is not None:
            return known
        return layer_costs(session.module, session.network.layers, session.trace)

    def all_stages(self, what: str, value: Any) -> list[list[Any]]:
        """Return every rank's object, by replica and stage; collective over all ranks.

        Args:
            what: What is done, for the report should it fail.
            value: This rank's object; it is pickled.
        """
        if self._collectives is None:
            return [[value]]
        return self._collectives.gather_over_ranks(what, value)

    def repartition(self, layers: Sequence[int]) -> Moved:
        """Give the stages ``layers`` layers from the next step on; collective over all ranks.

        Between steps only. The layers' parameters, gradients, buffers and optimizer state go from
        the stage that had them to the one that gets them; training goes on as if they had always
        been there.

        Args:
            layers: Number of layers of each stage, as for ``partition``.

        Raises:
            RepartitionError: Layers cannot move now, or a device has no room for what would come to
                it; nothing has changed.
            PartitionError: The numbers do not fit the network's; nothing has changed.
            DisagreementError: The ranks want different stages; nothing has changed.
        """
        why = self.why_fixed()
        if why is not None:
            self._refuse(why)
        session, collectives = self.session, self._collectives
        assert session.partition is not None
        assert collectives is not None
        new = explicit_partition(session.partition.num_layers, layers_per_stage=layers)
        if new.num_stages != self.mesh.num_stages:
            self._refuse(f"{list(layers)} are {new.num_stages} stages, not {self.mesh.num_stages}")
        start_s = perf_counter()
        self.keep_local()  # a callback may have added groups to the optimizers
        network = session.network
        owners = find_owners(session.module, network.module, network.layers, session.trace, new)
        self._prepare(session.partition, new, owners)
        try:
            sent_bytes = self._move(new, owners)
        except CommunicationError as error:
            raise self._watch.root_cause(error, self.mesh) from None
        facts = {"stages": str(new.starts)}
        kib = collectives.guarded(
            "waiting for all layers to have moved",
            lambda: require_agreement(facts, None, self.root_device, remark=-(-sent_bytes // 1024)),
        )
        forget_peak(self.root_device)
        return Moved(seconds=perf_counter() - start_s, num_bytes=1024 * sum(kib))

    def _prepare(self, old: Partition, new: Partition, owners: Owners) -> None:
        """Make sure that all ranks want the same, and have room for it, before anything changes."""
        share, collectives = self.session.share, self._collectives
        assert share is not None
        assert collectives is not None
        travel = parcels(share.owners, owners)
        facts = {
            "stages so far": str(old.starts),
            "new stages": str(new.starts),
            "what moves": str(travel),
        }
        needed = needed_bytes(share, travel, [unwrapped(o) for o in self.optimizers])
        mine, later = (len(partition.ranges[share.stage]) for partition in (old, new))
        step_bytes = self._step_peak.num_bytes
        needed += step_bytes * max(0, later - mine) / mine
        lacks = needed > room_bytes(self.root_device, step_bytes)
        every = collectives.guarded(
            "agreeing on other stages",
            lambda: require_agreement(facts, None, self.root_device, remark=int(lacks)),
        )
        if any(every):
            full = [rank for rank, is_full in enumerate(every) if is_full]
            msg = (
                f"ranks {full} have no room for the layers that would come to them. Rule: a device "
                "holds its stage's parameters with all that belongs to them, and what a step "
                "takes. Remedy: recompute=True, or leave these layers where they are"
            )
            raise RepartitionError(msg)

    def _move(self, new: Partition, owners: Owners) -> int:
        """Move what has to; return how many bytes this rank has sent."""
        session, module = self.session, self.lightning_module
        share = session.share
        assert module is not None
        assert share is not None

        def pack(name: str, parameter: nn.Parameter) -> list[tuple[Any, Mapping[int, Any]]]:
            return self._names.belongings(self.optimizers, name, parameter)

        session.repartition(new, owners)
        progress = self._watch.progress
        before = progress.doing
        relocation = Relocation(share, self.groups, self.root_device, progress)
        came = relocation.run(owners, pack)
        self._names.move(self.optimizers, module, came)
        progress.mark(before)
        return relocation.sent_bytes

    @staticmethod
    def _refuse(why: str) -> NoReturn:
        msg = (
            f"layers cannot move between the stages: {why}. Rule: they move between two training "
            "steps of a pipeline of several stages, when the optimizer has used all gradients. "
            "Remedy: call it in on_train_batch_end, where why_fixed() is None"
        )
        raise RepartitionError(msg)
