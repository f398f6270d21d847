"""A search asks, skips what it knows or predicts, runs the rest, and reports all of it."""

import json
from pathlib import Path

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.utils import JobReturn, JobStatus
from omegaconf import DictConfig, OmegaConf

from pipeswift_lightning.jobs.result import JobState
from pipeswift_lightning.jobs.search import Search, SearchError, SearchSpace
from pipeswift_lightning.runs.run_folder import RunFolder

optuna = pytest.importorskip("optuna")


def space(only_if=None, fixed=None, **sweeps: str) -> SearchSpace:
    parsed = OverridesParser.create().parse_overrides([f"{k}={v}" for k, v in sweeps.items()])
    return SearchSpace({o.get_key_element(): o for o in parsed}, only_if or {}, fixed or {})


class Known:
    """Predicts 10 s for b=3, and has measured 1 s."""

    learned = 0

    def learn(self, cfg: DictConfig, folder: Path) -> None:
        self.learned += 1

    def best_measured_s(self, cfg: DictConfig) -> float | None:
        return 1.0 if self.learned else None

    def predict(self, cfg: DictConfig) -> float | None:
        return 10.0 if cfg.b == 3 else None


def search(folder: Path, chosen: SearchSpace, predictor=None) -> tuple[Search, list]:
    """A search whose job returns a * b, and fails for a=2."""
    ran = []

    def run(number, overrides) -> JobReturn:
        cfg = OmegaConf.from_dotlist(list(overrides))
        ran.append(dict(cfg))
        if cfg.a == 2:
            return JobReturn(status=JobStatus.FAILED, _return_value=ValueError("a is 2\nmore"))
        return JobReturn(status=JobStatus.COMPLETED, _return_value=float(cfg.a * cfg.get("b", 1)))

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return Search(
        study=optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=1)),
        space=chosen,
        run=run,
        compose=lambda overrides: OmegaConf.from_dotlist(list(overrides)),
        predictor=predictor,
        margin=0.25,
        folder=folder,
        fixed=["c=0"],
    ), ran


def test_members_are_run_once_pruned_or_failed_and_all_are_reported(tmp_path, capsys) -> None:
    predictor = Known()
    found, ran = search(tmp_path, space(a="choice(1, 2)", b="choice(3, 4)"), predictor)
    for number in range(12):
        found.member(number)
    with pytest.raises(SearchError, match=r"1 of 12 members failed: #\d+: ValueError: a is 2$"):
        found.finish()
    by_state = {state: [m for m in found.members if m.state is state] for state in JobState}
    assert {(m.chosen["a"], m.chosen["b"]) for m in by_state[JobState.COMPLETED]} <= {
        ("1", "3"),
        ("1", "4"),
    }
    assert all(m.chosen["b"] == "3" for m in by_state[JobState.PRUNED])
    assert len(ran) == len(by_state[JobState.COMPLETED]) + len(by_state[JobState.FAILED])
    assert len({tuple(sorted(r.items())) for r in ran}) == len(ran)  # none of them twice
    assert predictor.learned == len(by_state[JobState.COMPLETED])
    pruned = by_state[JobState.PRUNED][0]
    assert pruned.note == "a step of 10 s is predicted, 1 s was measured"
    run = RunFolder.read(tmp_path / str(pruned.number))  # as recipes/compare.py reads it
    assert (run.status, run.error) == ("pruned", pruned.note)
    assert run.choices == {"c": "0", **pruned.chosen}
    assert json.loads((tmp_path / "best.json").read_text())["best_value"] == 4.0
    assert len(json.loads((tmp_path / "sweep.json").read_text())) == 12
    assert "pruned: a step of" in " ".join(capsys.readouterr().out.split())


def test_a_condition_leaves_a_key_alone(tmp_path) -> None:
    chosen = space({"b": {"a": 1}}, a="choice(1, 5)", b="choice(7)")
    found, ran = search(tmp_path, chosen)
    for number in range(8):
        found.member(number)
    assert {tuple(r.items()) for r in ran} == {
        (("c", 0), ("a", 1), ("b", 7)),
        (("c", 0), ("a", 5)),
    }
    found.finish()


@pytest.mark.parametrize(
    ("sweep", "value"), [("null", None), ("false", False), ("1e-3", 0.001), ("[1,2]", [1, 2])]
)
def test_a_condition_on_any_value(sweep, value) -> None:
    """None is written `null`, and once never matched."""
    trial = optuna.create_study().ask()
    chosen = space({"b": {"a": value}}, a=f"{sweep},{sweep}", b="choice(7)")
    assert chosen.choose(trial)["b"] == "7"


@pytest.mark.parametrize(
    ("only_if", "problem"),
    [
        ({"b": {"z": None}}, r"b: it asks for z=None, and z is not searched"),
        ({"z": {"a": 1}}, r"z: z is not searched"),
        ({"a": {"b": 7}}, r"a: it asks for b=7, and b is chosen later"),
        ({"a": {"a": 1}}, r"a: it asks for a=1, and a is chosen later"),
    ],
)
def test_a_condition_that_can_never_hold_is_refused_at_once(only_if, problem) -> None:
    rule = r"Rule: .* Remedy: .* a, b, which are searched"
    with pytest.raises(SearchError, match=rf"hydra\.sweeper\.only_if\.{problem}\. {rule}"):
        space(only_if, a="choice(1)", b="choice(7)")


def test_what_the_command_line_fixes_is_not_searched_and_conditions_know_it() -> None:
    for value, expected in (("1", {"b": "7"}), ("2", {})):
        chosen = space({"b": {"a": 1}}, {"a": value}, a="choice(1, 5)", b="choice(7)")
        assert chosen.choose(optuna.create_study().ask()) == expected
    fixed = space({"b": {"a": 1}}, {"b": "3"}, a="choice(1)", b="choice(7)")
    assert fixed.choose(optuna.create_study().ask()) == {"a": "1"}


@pytest.mark.parametrize(
    ("sweep", "low", "high", "kind"),
    [
        ("interval(0.5, 0.75)", 0.5, 0.75, float),
        ("int(interval(3, 9))", 3, 9, int),
        ("tag(log, interval(1e-4, 1e-2))", 1e-4, 1e-2, float),
        ("range(1, 4)", 1, 3, int),
    ],
)
def test_spaces_in_hydras_notation(sweep, low, high, kind) -> None:
    trial = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=0)).ask()
    text = space(a=sweep).choose(trial)["a"]
    assert low <= kind(text) <= high


def test_a_fixed_value_is_no_search_space() -> None:
    trial = optuna.create_study().ask()
    with pytest.raises(SearchError, match=r"params\.a=3 is no sweep.*Remedy"):
        space(a="3").choose(trial)
