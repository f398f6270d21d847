"""The members of a search: asked for, predicted, run, and told to the sampler."""

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from hydra.core.override_parser.types import ChoiceSweep, IntervalSweep, Override, RangeSweep
from hydra.core.utils import JobReturn
from hydra.errors import CompactHydraException
from omegaconf import DictConfig, OmegaConf
from rich.console import Console
from rich.table import Table

from pipeswift_lightning.jobs.prediction import StepPredictor
from pipeswift_lightning.jobs.result import JobResult, JobState

if TYPE_CHECKING:
    from optuna import Study, Trial

__all__ = ["Member", "Search", "SearchError", "SearchSpace"]

log = logging.getLogger(__name__)


class SearchError(CompactHydraException):
    """A search space that cannot be read, or a search with members that failed."""


@dataclass(frozen=True, slots=True)
class SearchSpace:
    """What may be chosen for each key.

    Args:
        overrides: Hydra's sweeps, by key. A key that is fixed is not searched.
        only_if: Keys that are chosen only where other keys have these values.
        fixed: Values of keys that the command line gives.

    Raises:
        SearchError: A condition is of a key, or on one, that is neither searched nor fixed, or on
            one that is chosen later.
    """

    overrides: Mapping[str, Override]
    only_if: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    fixed: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        searched = [key for key in self.overrides if key not in self.fixed]
        for key, needs in self.only_if.items():
            if key in self.fixed:
                continue
            if key not in searched:
                self._refuse(key, f"{key} is not searched")
            before = searched[: searched.index(key)]
            for other, value in needs.items():
                if other not in before and other not in self.fixed:
                    problem = "chosen later" if other in searched else "not searched"
                    self._refuse(key, f"it asks for {other}={value}, and {other} is {problem}")

    def _refuse(self, key: str, problem: str) -> NoReturn:
        message = (
            f"hydra.sweeper.only_if.{key}: {problem}. Rule: a condition is of a key that is "
            "searched, on keys that are chosen before it or fixed on the command line. Remedy: "
            f"write it with one of {', '.join(self.overrides) or 'no keys'}, which are searched in "
            "this order, or add the key to hydra.sweeper.params"
        )
        raise SearchError(message)

    def choose(self, trial: "Trial") -> dict[str, str]:
        """Return a value for each key, as the command line writes it.

        Raises:
            SearchError: An override is no sweep.
        """
        chosen: dict[str, str] = {}
        for key, override in self.overrides.items():
            needs, known = self.only_if.get(key, {}), {**self.fixed, **chosen}
            if key in self.fixed:
                continue
            if all(_is(known.get(other), value) for other, value in needs.items()):
                chosen[key] = str(_suggest(trial, key, override))
        return chosen


def _is(chosen: str | None, value: Any) -> bool:
    """Return whether what a command line would write is this value of a configuration.

    Example:
        >>> _is("null", None), _is("False", False), _is("1e-3", 0.001), _is("1f1b", "1f1b")
        (True, True, True, True)
        >>> _is(None, None), _is("2", 1)  # the first: not chosen at all
        (False, False)
    """
    if chosen is None:
        return False
    read = OmegaConf.from_dotlist([f"value={chosen}"])
    return chosen == str(value) or bool(read.value == value)


def _suggest(trial: "Trial", key: str, override: Override) -> Any:
    sweep = override.value()
    match sweep:
        case ChoiceSweep():
            return trial.suggest_categorical(key, list(override.sweep_string_iterator()))
        case RangeSweep():
            return trial.suggest_categorical(key, list(override.sweep_string_iterator()))
        case IntervalSweep():
            low: Any = sweep.start
            high: Any = sweep.end
            if isinstance(low, int) and isinstance(high, int):
                return trial.suggest_int(key, int(low), int(high), log="log" in sweep.tags)
            return trial.suggest_float(key, float(low), float(high), log="log" in sweep.tags)
        case _:
            message = (
                f"hydra.sweeper.params.{key}={sweep} is no sweep. Rule: choice(...), range(...), "
                "interval(...), or values with commas. Remedy: a fixed value belongs on the "
                f"command line ({key}={sweep})"
            )
            raise SearchError(message)


@dataclass(slots=True, kw_only=True)
class Member:
    """One member of the search.

    Args:
        number: Its number, and its folder in the sweep's.
        chosen: What was chosen for it.
        state: How it ended.
        value: What it returned; of a repeated one, what the first returned.
        predicted_step_s: Its step time by prediction, if there was one.
        note: Why it failed, was pruned or repeats another.
    """

    number: int
    chosen: dict[str, str]
    state: JobState = JobState.COMPLETED
    value: float | None = None
    predicted_step_s: float | None = None
    note: str | None = None


class Search:
    """Runs members one by one, and keeps count.

    Args:
        study: Optuna's, which chooses.
        space: What it may choose.
        run: Runs a member: its number and overrides.
        compose: Returns a member's configuration.
        predictor: Predicts step times; None runs every member.
        margin: By which share a predicted step may be longer than the best measured
            one of its kind.
        folder: The sweep's.
        fixed: Overrides of every member.
    """

    def __init__(  # noqa: PLR0913 -- what a sweeper has
        self,
        *,
        study: "Study",
        space: SearchSpace,
        run: Callable[[int, Sequence[str]], JobReturn],
        compose: Callable[[Sequence[str]], DictConfig],
        predictor: StepPredictor | None,
        margin: float,
        folder: Path,
        fixed: Sequence[str] = (),
    ) -> None:
        self._study = study
        self._space = space
        self._run = run
        self._compose = compose
        self._predictor = predictor
        self._margin = margin
        self._folder = folder
        self._fixed = fixed
        self.members: list[Member] = []

    def member(self, number: int) -> Member:
        """Ask for a member; run it, unless it has run before or is predicted to be slow."""
        from optuna.trial import TrialState

        trial = self._study.ask()
        member = Member(number=number, chosen=self._space.choose(trial))
        overrides = [*self._fixed, *(f"{key}={value}" for key, value in member.chosen.items())]
        if not (self._repeats(member) or self._is_slow(member, overrides)):
            self._measure(member, overrides)
        self.members.append(member)
        match member.state:
            case JobState.COMPLETED | JobState.REPEATED if member.value is not None:
                self._study.tell(trial, member.value)
            case JobState.PRUNED:
                self._study.tell(trial, state=TrialState.PRUNED)
            case _:
                self._study.tell(trial, state=TrialState.FAIL)
        self._write()
        return member

    def _repeats(self, member: Member) -> bool:
        first = next((m for m in self.members if m.chosen == member.chosen), None)
        if first is None:
            return False
        member.state, member.value = JobState.REPEATED, first.value
        member.note = f"the same as #{first.number}"
        return True

    def _is_slow(self, member: Member, overrides: Sequence[str]) -> bool:
        if self._predictor is None:
            return False
        cfg = self._compose(overrides)
        member.predicted_step_s = predicted_s = self._predictor.predict(cfg)
        best_s = self._predictor.best_measured_s(cfg)
        if predicted_s is None or best_s is None or predicted_s <= best_s * (1 + self._margin):
            return False
        member.state = JobState.PRUNED
        member.note = f"a step of {predicted_s:.4g} s is predicted, {best_s:.4g} s was measured"
        log.info(f"#{member.number} : {' '.join(overrides)} is not started: {member.note}")
        folder = self._folder / str(member.number)
        JobResult(state=JobState.PRUNED, error=member.note).write(folder)
        (folder / ".hydra").mkdir()  # as Hydra writes it of a member that runs
        OmegaConf.save(list(overrides), folder / ".hydra" / "overrides.yaml")
        return True

    def _measure(self, member: Member, overrides: Sequence[str]) -> None:
        answer = self._run(member.number, overrides)
        result = JobResult.of(answer)
        member.state, member.value, member.note = result.state, result.value, result.error
        if result.state is JobState.COMPLETED and result.value is None:
            member.state = JobState.FAILED
            member.note = "it returned no number: set optimized_metric"
        if self._predictor is not None and member.state is JobState.COMPLETED:
            self._predictor.learn(self._compose(overrides), self._folder_of(answer, member))

    def _folder_of(self, answer: JobReturn, member: Member) -> Path:
        found = None
        if answer.hydra_cfg is not None:
            found = OmegaConf.select(answer.hydra_cfg, "hydra.runtime.output_dir")
        return self._folder / str(member.number) if found is None else Path(found)

    def _write(self) -> None:
        text = json.dumps([asdict(member) for member in self.members], indent=2)
        (self._folder / "sweep.json").write_text(text + "\n")

    def finish(self) -> None:
        """Print the members, and write what was best.

        Raises:
            SearchError: Some members failed; names them.
        """
        Console().print(_table(self.members))
        try:
            best: Any = self._study.best_trial
        except ValueError:
            best = None  # nothing has been measured
        if best is not None:
            found = {"best_value": best.value, "best_params": best.params}
            (self._folder / "best.json").write_text(json.dumps(found, indent=2) + "\n")
        failed = [member for member in self.members if member.state is JobState.FAILED]
        if failed:
            reasons = "; ".join(f"#{member.number}: {member.note}" for member in failed)
            message = f"{len(failed)} of {len(self.members)} members failed: {reasons}"
            raise SearchError(message)


def _table(members: Sequence[Member]) -> Table:
    table = Table(title="Members of the sweep", title_justify="left")
    for name in ("#", "chosen", "value", "predicted step", "state"):
        table.add_column(name, overflow="fold")
    for member in members:
        value, step_s = member.value, member.predicted_step_s
        table.add_row(
            str(member.number),
            " ".join(f"{key}={text}" for key, text in member.chosen.items()),
            "" if value is None else f"{value:.6g}",
            "" if step_s is None else f"{step_s:.4g} s",
            member.state.value if member.note is None else f"{member.state.value}: {member.note}",
        )
    return table
