"""Whatever goes wrong on one rank, every rank ends quickly, with an error that says what and where.

These ranks are forked: Lightning takes them for children of its launcher. `test_launched` has the
cases that depend on who started whom.
"""

import pytest

from tests.helpers.casts import perform
from tests.helpers.faults import Ending
from tests.helpers.scenario import Scenario

VALIDATING = {"limit_val_batches": 50, "val_check_interval": 2}
QUICKLY_S = 3.0  # 0.1 to 0.3 on two quiet cores; the machine that runs the tests may be busy


def place_of(scenario: Scenario, *, micro_batch: bool = True) -> str:
    stage = scenario.rank % int(scenario.options.get("stages", scenario.devices))
    where = (
        f"stage {stage}, micro-batch {scenario.micro_batch}" if micro_batch else f"stage {stage}"
    )
    return f"rank {scenario.rank} ({where}) failed"


def check_others(scenario: Scenario, endings: list[Ending], *words: str) -> None:
    """Every other rank has ended by itself, with these words, once."""
    for rank, ending in enumerate(endings):
        if rank != scenario.rank:
            assert ending.code == 1, (rank, ending)
            assert ending.after_s < QUICKLY_S, (rank, ending)
            for word in words:
                assert word in ending.said, f"rank {rank} does not say {word!r}:\n{ending.said}"
            assert ending.said.count("Pipeline stopped") == 1, ending.said
            assert "gloo/transport" not in ending.said, ending.said
            assert len(ending.said.splitlines()) < 80, ending.said


def check_raise(scenario: Scenario, direction: str, *, micro_batch: bool = True) -> None:
    endings = perform(scenario)
    where = place_of(scenario, micro_batch=micro_batch)
    check_others(scenario, endings, where, direction, "ValueError: the user's own error")
    own = endings[scenario.rank]
    assert (own.code, own.after_s < QUICKLY_S) == (1, True), own
    # Its own error is the user's, whole, with a note of where it happened.
    assert "Pipeline stopped" not in own.said
    assert own.said.count("ValueError: the user's own error") == 1
    assert f"pipeswift: on {where.removesuffix(' failed')}, {direction}" in own.said


@pytest.mark.parametrize(
    ("fault", "direction", "rank"),
    [("forward", "Forward", 0), ("forward", "Forward", 3), ("backward", "Backward", 0)],
)
def test_an_exception_in_a_layer(fault: str, direction: str, rank: int) -> None:
    check_raise(Scenario(fault=fault, rank=rank, micro_batch=2), direction)


@pytest.mark.parametrize(("fault", "direction"), [("forward", "Forward"), ("backward", "Backward")])
def test_an_exception_in_a_layer_of_a_whole_step(fault: str, direction: str) -> None:
    check_raise(
        Scenario(fault=fault, rank=2, micro_batch=2, variant="ManualOptimization"), direction
    )


def test_a_rank_killed_in_the_backward_of_a_whole_step() -> None:
    scenario = Scenario(fault="backward", action="kill", rank=1, variant="ManualOptimization")
    check_others(scenario, perform(scenario), "rank 1 (stage 1, micro-batch 1)")


def test_an_exception_in_the_loss() -> None:
    check_raise(Scenario(fault="loss", rank=3), "Forward")


def test_an_exception_in_the_optimizer() -> None:
    check_raise(Scenario(fault="optimizer", rank=1), "between steps", micro_batch=False)


@pytest.mark.parametrize(("fault", "rank"), [("eval_forward", 0), ("validation_step", 1)])
def test_an_exception_in_validation(fault: str, rank: int) -> None:
    scenario = Scenario(fault=fault, rank=rank, step=0, devices=2, trainer=VALIDATING)
    endings = perform(scenario)
    check_others(
        scenario, endings, f"rank {rank} (stage {rank}", "ValueError: the user's own error"
    )


@pytest.mark.parametrize("fault", ["between", "loader", "setup"])
def test_an_exception_on_one_rank_outside_a_step(fault: str) -> None:
    """In a callback, in the dataset, in a set-up hook: the others are in a collective by then."""
    scenario = Scenario(fault=fault, rank=1, devices=2)
    endings = perform(scenario)
    check_others(scenario, endings, "rank 1 (stage 1) failed: ValueError: the user's own error")
    assert endings[1].code == 1


def test_an_exception_in_one_of_two_pipelines() -> None:
    check_raise(Scenario(fault="backward", rank=2, options={"stages": 2}), "Backward")


def test_a_callback_that_saves_on_an_exception_does_not_wait_for_the_others() -> None:
    """It once did for ever: they waited for the failing rank, which had told nobody yet."""
    scenario = Scenario(fault="forward", rank=2, callbacks=("SavesOnException",))
    endings = perform(scenario)
    assert all(e.code == 1 and e.after_s < QUICKLY_S for e in endings), endings
    assert "ValueError: the user's own error" in endings[2].said
    assert "hence not gathering the stages for a checkpoint" in endings[2].said


def test_an_interrupt_is_no_error_to_mend() -> None:
    scenario = Scenario(fault="forward", rank=2, action="interrupt")
    endings = perform(scenario)
    check_others(scenario, endings, f"{place_of(scenario)}: KeyboardInterrupt", "told to end")
    assert endings[2].code == 1


@pytest.mark.parametrize(
    ("fault", "direction", "rank"),
    [
        *(("forward", "Forward", rank) for rank in (0, 1, 3)),
        *(("backward", "Backward", rank) for rank in (0, 2)),
    ],
)
def test_a_rank_is_killed_in_a_step(fault: str, direction: str, rank: int) -> None:
    """Named to the micro-batch, though it strikes at once: no stamp in the store is that fresh."""
    scenario = Scenario(fault=fault, action="kill", rank=rank, micro_batch=3 - rank)
    endings = perform(scenario)
    check_others(
        scenario,
        endings,
        place_of(scenario),
        "killed: process",
        f"{direction}, in training batch 2 of epoch 0 (global step 2)",
    )


@pytest.mark.parametrize("rank", [0, 2])
def test_a_rank_is_killed_between_steps(rank: int) -> None:
    scenario = Scenario(fault="between", action="kill", rank=rank)
    endings = perform(scenario)
    check_others(scenario, endings, f"rank {rank} (stage {rank}) failed: killed")


@pytest.mark.parametrize(("action", "rank"), [("kill", 1), ("raise", 0)])
def test_a_rank_fails_while_layers_move(action: str, rank: int) -> None:
    """Two layers travel, 0 to 1 and 1 to 2: all ranks wait for the one that fails."""
    scenario = Scenario(
        fault="move",
        action=action,
        rank=rank,
        devices=3,
        num_layers=6,
        micro_batch=3,
        callbacks=("MovesLayers",),
    )
    endings = perform(scenario)
    cause = {"kill": "killed: process", "raise": "ValueError: the user's own error"}[action]
    check_others(scenario, endings, f"rank {rank} (stage {rank}", cause, "sending layers to stage")
    assert endings[rank].code == {"kill": -9, "raise": 1}[action]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_is_killed_in_validation(rank: int) -> None:
    scenario = Scenario(fault="eval_forward", action="kill", rank=rank, trainer=VALIDATING)
    endings = perform(scenario)
    check_others(
        scenario, endings, place_of(scenario), "killed: process", "Forward, in validation batch"
    )


def test_a_rank_is_killed_in_one_of_two_pipelines() -> None:
    scenario = Scenario(fault="forward", action="kill", rank=3, options={"stages": 2})
    endings = perform(scenario)
    check_others(scenario, endings, place_of(scenario), "killed: process")


def test_a_rank_that_ends_without_a_word_counts_as_killed() -> None:
    scenario = Scenario(fault="forward", action="exit", rank=1)
    check_others(scenario, perform(scenario), place_of(scenario), "is gone and left no report")


@pytest.mark.parametrize(("rank", "stages"), [(0, 4), (2, 4), (1, 2)])
def test_a_stopped_rank_is_named_and_ended(rank: int, stages: int) -> None:
    scenario = Scenario(
        fault="forward", action="stop", rank=rank, options={"stages": stages, "silence_s": 1.0}
    )
    endings = perform(scenario)
    check_others(scenario, endings, place_of(scenario), "silent for 1")
    assert endings[rank].code == -9  # no stopped orphan that wakes up later
    assert all(ending.after_s > 0.9 for ending in endings)
