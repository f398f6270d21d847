"""What cannot be done, or what ranks do not agree on: refused with value, rule and remedy."""

from dataclasses import replace

import pytest
from lightning.pytorch import Trainer

from pipeswift_lightning import PipeSwiftStrategy
from pipeswift_lightning.runtime.mesh import MeshError
from pipeswift_lightning.strategies.contract import ContractError
from pipeswift_lightning.strategies.options import OptionError
from tests.helpers.casts import perform
from tests.helpers.faults import Ending
from tests.helpers.scenario import Scenario, run

SOON_S = 10.0


def check_all(endings: list[Ending], *words: str) -> None:
    for rank, ending in enumerate(endings):
        assert ending.code == 1, (rank, ending)
        assert ending.after_s < SOON_S, (rank, ending)
        for word in words:
            assert word in ending.said, f"rank {rank} does not say {word!r}:\n{ending.said}"


@pytest.mark.parametrize(
    ("scenario", "words"),
    [
        (
            Scenario(variant="ManualOptimization", num_layers=3),
            ["self.net has 3 layers, but 4 stages", "Rule: of the networks", "Remedy: stages=3"],
        ),
        (
            Scenario(num_layers=3),
            ["self.net has 3 layers, but 4 stages", "Rule: each stage has a", "Remedy: stages=3"],
        ),
    ],
)
def test_it_is_refused_before_any_process_starts(scenario: Scenario, words: list[str]) -> None:
    with pytest.raises(ContractError) as refused:
        run(scenario)  # here: this process would be rank 0
    for word in words:
        assert word in str(refused.value)


def test_numbers_that_do_not_fit_the_stages() -> None:
    with pytest.raises(MeshError, match=r"5 devices .* 2 stages\. Rule: .* Remedy: stages=1 or 5"):
        Trainer(strategy=PipeSwiftStrategy(stages=2), accelerator="cpu", devices=5, logger=False)
    strategy = PipeSwiftStrategy(recompute=[1, 2, 3])
    with pytest.raises(OptionError, match=r"has 3 entries\. Rule: one for each of the 2 stages\."):
        Trainer(strategy=strategy, accelerator="cpu", devices=2, logger=False)


@pytest.mark.parametrize(
    ("scenario", "words"),
    [
        (
            Scenario(variant="CallsTwice"),
            ["self.net is called twice in one step", "Rule:", "Remedy: call it once"],
        ),
        (
            Scenario(variant="CallsNever"),
            ["training_step did not call self.net", "Rule:", "Remedy: call it"],
        ),
        (
            Scenario(variant="TwoOptimizers"),
            ["returned several optimizers", "Rule: automatic", "Remedy: set self.automatic"],
        ),
        (
            Scenario(variant="LooksTwice"),
            ["TwiceSGD evaluates a training step more than once", "Rule:", "Remedy: a first-order"],
        ),
        (
            Scenario(variant="UsesParameters"),
            ["uses the parameter net.0.linear.weight itself", "Rule:", "Remedy: compute"],
        ),
        (
            Scenario(batch_size=3),
            ["a batch of 3 samples cannot be split into 4", "Rule:", "Remedy: micro_batches=3"],
        ),
        (
            Scenario(variant="SkipsOneMicroBatch"),
            ["returned None for micro-batches [2] of 4", "Rule:", "Remedy: return a zero loss"],
        ),
        (
            Scenario(variant="DataDependentShapes"),
            ["float32[1, 8]", "float32[2, 8]", "Rule:", "Remedy: PipeSwiftStrategy(dynamic_shapes"],
        ),
    ],
    ids=lambda value: value.variant if isinstance(value, Scenario) else "",
)
def test_it_is_refused_on_all_ranks(scenario: Scenario, words: list[str]) -> None:
    check_all(perform(replace(scenario, devices=2)), *words)


@pytest.mark.parametrize(
    ("scenario", "words"),
    [
        (
            Scenario(variant="OtherSamples", rank=2),
            ["samples (checksum): ranks 0, 1, 3:", "rank 2"],
        ),
        (
            Scenario(variant="OtherShape", rank=3, batch_size=4),
            ["batch: ranks 0, 1, 2: float32[4, 8]; rank 3: float32[8, 8]"],
        ),
        (
            Scenario(variant="ShorterLoader", num_batches=6),
            ["batches in an epoch: ranks 0, 2, 3: 6; rank 1: 4"],
        ),
        (
            Scenario(rank=2, other_options={"schedule": "gpipe"}),
            ["schedule: ranks 0, 1, 3: auto; rank 2: gpipe"],
        ),
        (
            # Its mesh is another one: connections would be opened that nobody accepts.
            Scenario(rank=2, other_options={"stages": 2}),
            ["stages: ranks 0, 1, 3: None; rank 2: 2"],
        ),
    ],
    ids=["samples", "shape", "shorter loader", "schedule", "stages"],
)
def test_ranks_that_differ_learn_in_what(scenario: Scenario, words: list[str]) -> None:
    check_all(perform(scenario), "about to do different things", *words, "Rule:", "Remedy:")


@pytest.mark.parametrize(
    ("scenario", "waits"),
    [
        (Scenario(callbacks=("OneRankWaits",), rank=2), "rank 2: at the barrier only here"),
        (
            Scenario(variant="ShorterStream", rank=2, num_batches=4, trainer={"max_epochs": 1}),
            "comparing batch and plan",
        ),
    ],
    ids=["collective on one rank", "shorter stream"],
)
def test_ranks_that_part_are_told_where_each_waits(scenario: Scenario, waits: str) -> None:
    """Nobody failed, and nobody can go on: once a hang until the backend's half hour was over."""
    endings = perform(scenario)
    check_all(endings, "Pipeline stopped: rank 2 (stage 2) failed: deadlock", waits)
