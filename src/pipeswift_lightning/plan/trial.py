"""From move to move: whether the gain of the last one came, and when the next one may be made."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from pipeswift_lightning.plan.partition import Partition
from pipeswift_lightning.plan.rebalance import Blame, Decision, RebalanceError, RebalancePolicy

__all__ = ["Judgement", "RebalanceState"]

_CLEAR = 0.5  # Of the other blame's error: below this, a blame was clearly right.


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """Whether the gain of a move came.

    Attributes:
        decision: What was predicted.
        step_s: What a step has taken since.
        kept: Whether the move stands.
    """

    decision: Decision
    step_s: float
    kept: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class RebalanceState:
    """What is remembered from move to move.

    Attributes:
        rejected: Partitions whose gain did not come.
        quiet_until: The step before which nothing moves.
        trial: The move that has not been judged yet.
        blame: What the last move has shown to be to blame, if it did.

    Example:
        >>> old, new = Partition((0, 2), 4), Partition((0, 1), 4)
        >>> decision = Decision(
        ...     partition=old, best=new, busy_s=(9, 5), step_s=10.0, predicted_s=8.0, moves=True
        ... )
        >>> policy = RebalancePolicy(cool_down=30)
        >>> judgement, state = RebalanceState().begun(decision).judged(9.5, 100, policy)
        >>> judgement.kept, state.may_move(129), state.may_move(130), state.rejected == {new}
        (False, False, True, True)
    """

    rejected: frozenset[Partition] = field(default_factory=frozenset)
    quiet_until: int = 0
    trial: Decision | None = None
    blame: Blame | None = None

    def may_move(self, step: int) -> bool:
        """Whether layers may move after ``step`` steps."""
        return self.trial is None and step >= self.quiet_until

    def begun(self, decision: Decision) -> "RebalanceState":
        """Return the state after a move."""
        return replace(self, trial=decision)

    def refused(self, partition: Partition, step: int, policy: RebalancePolicy) -> "RebalanceState":
        """Return the state after a move to ``partition`` turned out to be impossible."""
        return replace(
            self,
            rejected=self.rejected | {partition},
            quiet_until=step + policy.cool_down,
            trial=None,
        )

    def judged(
        self,
        step_s: float,
        step: int,
        policy: RebalancePolicy,
        busy_s: Sequence[float] | None = None,
    ) -> tuple[Judgement, "RebalanceState"]:
        """Return whether the gain came, and the state afterwards.

        Args:
            step_s: What a step takes since the move.
            step: Number of steps so far.
            policy: What share of the gain must have come.
            busy_s: What each stage computes in a step since; None if that is not known.

        Raises:
            RebalanceError: There was no move.
        """
        trial = self.trial
        if trial is None:
            message = (
                "no move waits to be judged. Rule: judged() follows begun(). Remedy: ask may_move()"
            )
            raise RebalanceError(message)
        gained_s, promised_s = trial.step_s - step_s, trial.step_s - trial.predicted_s
        judgement = Judgement(
            decision=trial, step_s=step_s, kept=gained_s >= policy.kept_share * promised_s
        )
        after = replace(self, blame=_blamed(trial, busy_s or ()))
        if not judgement.kept:
            return judgement, after.refused(trial.best, step, policy)
        return judgement, replace(after, quiet_until=step + policy.cool_down, trial=None)


def _blamed(decision: Decision, busy_s: Sequence[float]) -> Blame | None:
    """Return the blame whose prediction is clearly nearer to what was measured."""
    errors = sorted(
        (sum(abs(a - b) for a, b in zip(predicted, busy_s, strict=True)), blame)
        for blame, predicted in decision.predicted_busy_s.items()
        if busy_s
    )
    if len(errors) > 1 and errors[0][0] < _CLEAR * errors[1][0]:
        return errors[0][1]
    return None
