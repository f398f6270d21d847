"""Moves layers to other stages while training goes on, if measured times say that it pays."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, cast

from lightning.pytorch import Trainer
from lightning.pytorch.utilities import rank_zero_info
from typing_extensions import override

from pipeswift_lightning.callbacks.pipeline import (
    CallbackError,
    ObservablePipeline,
    StepObserver,
    log_scalars,
)
from pipeswift_lightning.callbacks.step_window import StepWindow, measurement
from pipeswift_lightning.plan.partition import Partition
from pipeswift_lightning.plan.rebalance import (
    Decision,
    Measurement,
    RebalancePolicy,
    decide,
)
from pipeswift_lightning.plan.trial import Judgement, RebalanceState
from pipeswift_lightning.strategies.argument import (
    COUNT,
    SHARE,
    TEXT,
    Argument,
    checked,
    is_count,
    is_number,
)
from pipeswift_lightning.strategies.repartition import RepartitionError

__all__ = ["Rebalance", "Rebalanced"]

_SETTLING = 2  # Steps after a move that are not measured: new messages, allocations, compilation.


class _Moved(Protocol):
    @property
    def seconds(self) -> float: ...
    @property
    def num_bytes(self) -> int: ...


class _Movable(ObservablePipeline, Protocol):
    """A pipeline whose layers can move; `PipeSwiftStrategy` is one."""

    @property
    def partition(self) -> Partition | None: ...
    def why_fixed(self) -> str | None: ...
    def layer_costs(self) -> list[float]: ...
    def all_stages(self, what: str, value: Any) -> list[list[Any]]: ...
    def repartition(self, layers: Sequence[int]) -> _Moved: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Rebalanced:
    """One move.

    Attributes:
        batch: Number of batches before it.
        decision: From where to where, what a step took, and what was predicted.
        seconds: How long training stood still for it.
        num_bytes: What all ranks sent.
        judgement: Whether the gain came; None until that is known.
    """

    batch: int
    decision: Decision
    seconds: float
    num_bytes: int
    judgement: Judgement | None = None


_ARGUMENTS = {
    "every_n_steps": COUNT,
    "threshold": SHARE,
    "window": COUNT,
    "kept_share": Argument(
        "a share of the gain, from 0 to 1",
        "kept_share=0.5, say",
        lambda value: is_number(value) and 0 <= value <= 1,
    ),
    "cool_down": Argument(
        "a whole number, 0 or more", "cool_down=100, say", lambda value: is_count(value, least=0)
    ).or_none("every_n_steps"),
    "prefix": TEXT,
}


class Rebalance(StepObserver):
    """Move layers between stages when a shorter step is predicted, and back if it does not come.

    Each step, a rank notes its own times. Every ``every_n_steps`` batches, the medians over the
    last ``window`` are gathered; from them and the layers' costs the best partition is searched. If
    it is predicted to shorten the step by ``threshold`` or more, its layers move, with their
    optimizer state, between two steps: training goes on as if they had always been there. The next
    ``window`` steps tell whether the gain came. If less than ``kept_share`` of it did, the layers
    move back, and that partition is not tried again.

    All loggers are given ``rebalance/step_s`` (median step), ``rebalance/predicted_s`` and
    ``rebalance/stage_0_busy_s`` and so on at each look, and ``rebalance/moved_s`` at a move. Rank 0
    says what moved, what was predicted, and what came.

    On a GPU, times are the device's, which each step is waited for. Where every rank runs whole
    steps, stages are fixed, and it says so.

    Args:
        every_n_steps: Batches between two looks.
        threshold: Share of a step that a move must be predicted to gain.
        window: Number of steps that are measured.
        kept_share: Share of the predicted gain that must come for a move to stand.
        cool_down: Batches after a move was judged before the next may come; by default
            ``every_n_steps``.
        prefix: Of the names that are logged.

    Attributes:
        moves: What has moved so far, on every rank.
        decisions: What every look found.

    Raises:
        CallbackError: An argument is out of its range.
    """

    @checked(_ARGUMENTS, CallbackError)
    def __init__(
        self,
        every_n_steps: int = 200,
        threshold: float = 0.05,
        window: int = 50,
        *,
        kept_share: float = 0.5,
        cool_down: int | None = None,
        prefix: str = "rebalance",
    ) -> None:
        super().__init__()
        self.every_n_steps = every_n_steps
        self.window = window
        if window > every_n_steps:
            message = (
                f"Rebalance(every_n_steps={every_n_steps}, window={window}). Rule: a window lies "
                f"between two looks. Remedy: window={every_n_steps} or less"
            )
            raise CallbackError(message)
        self.policy = RebalancePolicy(
            threshold=threshold,
            kept_share=kept_share,
            cool_down=every_n_steps if cool_down is None else cool_down,
        )
        self.prefix = prefix
        self.moves: list[Rebalanced] = []
        self.decisions: list[Decision] = []
        self._state = RebalanceState()
        self._begin()

    @override
    def _begin(self) -> None:
        self.moves, self.decisions = [], []
        self._batches = 0
        self._due = self.every_n_steps
        self._told = False
        self._steps = StepWindow(self.window)
        # A trial and its batches are a run's own; a checkpoint brings what that run has rejected.
        self._state = RebalanceState(rejected=self._state.rejected)

    @override
    def state_dict(self) -> dict[str, Any]:
        rejected = sorted((p.starts, p.num_layers) for p in self._state.rejected)
        return {"rejected": [[list(starts), num_layers] for starts, num_layers in rejected]}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        rejected = [Partition(tuple(starts), n) for starts, n in state_dict["rejected"]]
        self._state = RebalanceState(rejected=frozenset(rejected))

    @override
    def _step_ended(self, trainer: Trainer, pipeline: ObservablePipeline) -> None:
        movable = cast("_Movable", pipeline)
        self._batches += 1  # on all ranks alike, whatever they measured
        if (plan := pipeline.plan) is not None:
            parts = self._step_parts(pipeline)
            self._steps.add(self._batches, plan, parts)
        # All ranks of all pipelines are in the same batch: so each of them looks now, or none.
        if self._batches >= self._due and movable.why_fixed() is None:
            self._look(trainer, movable)
        elif self._batches >= self._due and not self._told:
            self._tell_if_fixed(movable)

    def _tell_if_fixed(self, pipeline: _Movable) -> None:
        """Say once why layers never move, if it is not for gradients that wait."""
        partition = pipeline.partition
        if partition is None or partition.num_stages == 1:
            self._told = True
            rank_zero_info(f"Rebalance: {pipeline.why_fixed()}; layers stay where they are")

    def _look(self, trainer: Trainer, pipeline: _Movable) -> None:
        """Gather what was measured; judge the last move, or decide on the next; collective."""
        own = self._steps, pipeline.layer_costs()
        every = pipeline.all_stages("gathering the stages' times", own)
        measured = measurement([[steps for steps, _ in row] for row in every])
        # Each replica's costs are those of its own last batch: one's are taken, by all.
        costs: list[float] = every[0][0][1]
        self._due = self._batches + self.every_n_steps
        if measured is None:
            return
        if self._state.trial is not None:
            self._judge(trainer, pipeline, measured)
        elif self._state.may_move(self._batches):
            self._decide(trainer, pipeline, measured, costs)

    def _decide(
        self,
        trainer: Trainer,
        pipeline: _Movable,
        measured: Measurement,
        costs: Sequence[float],
    ) -> None:
        partition = pipeline.partition
        assert partition is not None
        rejected = [p for p in self._state.rejected if p.num_layers == partition.num_layers]
        blame = self._state.blame
        decision = decide(measured, partition, costs, self.policy, rejected, blame)
        self.decisions.append(decision)
        values = {"step_s": decision.step_s, "predicted_s": decision.predicted_s}
        values |= {f"stage_{stage}_busy_s": busy_s for stage, busy_s in enumerate(decision.busy_s)}
        log_scalars(trainer, {f"{self.prefix}/{name}": value for name, value in values.items()})
        if not decision.moves:
            return
        try:
            moved = pipeline.repartition(_sizes(decision.best))
        except RepartitionError as error:  # on all ranks alike, and nothing has changed
            self._state = self._state.refused(decision.best, self._batches, self.policy)
            rank_zero_info(f"Rebalance: {_sizes(decision.best)} is not tried again: {error}")
            return
        self._state = self._state.begun(decision)
        self._note(trainer, moved, decision)

    def _note(self, trainer: Trainer, moved: _Moved, decision: Decision) -> None:
        done = Rebalanced(
            batch=self._batches,
            decision=decision,
            seconds=moved.seconds,
            num_bytes=moved.num_bytes,
        )
        self.moves.append(done)
        log_scalars(trainer, {f"{self.prefix}/moved_s": moved.seconds})
        self._restart()
        busy = ", ".join(f"{1e3 * s:.1f}" for s in decision.busy_s)
        rank_zero_info(
            f"Rebalance: after batch {self._batches}, layers of the stages "
            f"{_sizes(decision.partition)} -> {_sizes(decision.best)}. The stages compute {busy} "
            f"ms of a step of {1e3 * decision.step_s:.1f} ms; {1e3 * decision.predicted_s:.1f} ms "
            f"are predicted ({-decision.gain:+.1%}). {decision.num_moved} layers, "
            f"{moved.num_bytes / 1e6:.2f} MB, moved in {1e3 * moved.seconds:.1f} ms"
        )

    def _restart(self) -> None:
        """Measure anew, once the first steps with other layers are over."""
        self._steps = StepWindow(self.window, after=self._batches + _SETTLING)
        self._due = self._batches + _SETTLING + self.window

    def _judge(self, trainer: Trainer, pipeline: _Movable, measured: Measurement) -> None:
        judgement, self._state = self._state.judged(
            measured.step_s, self._batches, self.policy, measured.busy_s
        )
        decision, step_s = judgement.decision, judgement.step_s
        log_scalars(trainer, {f"{self.prefix}/step_s": step_s})
        what = "kept"
        if not judgement.kept:
            stands, what = self._move_back(trainer, pipeline, decision)
            judgement = replace(judgement, kept=stands)
        self.moves[-1] = replace(self.moves[-1], judgement=judgement)
        rank_zero_info(
            f"Rebalance: {_sizes(decision.best)} is {what}: a step takes {1e3 * step_s:.1f} ms; "
            f"{1e3 * decision.step_s:.1f} ms before, {1e3 * decision.predicted_s:.1f} ms predicted "
            f"(measured {step_s / decision.step_s - 1:+.1%}, predicted {-decision.gain:+.1%})"
        )

    def _move_back(
        self, trainer: Trainer, pipeline: _Movable, decision: Decision
    ) -> tuple[bool, str]:
        """Undo a move; return whether it stands all the same, and what to say."""
        back = _sizes(decision.partition)
        try:
            moved = pipeline.repartition(back)
        except RepartitionError as error:  # on all ranks alike, and nothing has changed
            return True, f"not worth it, but stays, since {back} is refused ({error})"
        log_scalars(trainer, {f"{self.prefix}/moved_s": moved.seconds})
        self._restart()
        self._due += self.policy.cool_down
        return False, f"moved back to {back}, not to be tried again"


def _sizes(partition: Partition) -> list[int]:
    return [len(layers) for layers in partition.ranges]
