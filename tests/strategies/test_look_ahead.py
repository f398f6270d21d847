"""The next batch is planned beside the present step, where drawing it early changes nothing."""

import copy
import pickle
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, Sampler

from pipeswift_lightning import PipeSwiftStrategy
from pipeswift_lightning.runtime.peekable import Peekable
from pipeswift_lightning.strategies import planning
from tests.helpers.distributed import fork_server
from tests.helpers.networks import Padded, Ragged, pad
from tests.helpers.parity import TOLERANCE, lone_trainer
from tests.helpers.planned import costs, quick_choice

THREAD = "pipeswift-plan"


class Streamed(IterableDataset[Tensor]):
    """Has no length, so Lightning itself is a batch ahead."""

    def __iter__(self) -> Iterator[Tensor]:
        return iter(Ragged(40).rows)


class OwnSampler(Sampler[int]):
    """May draw whatever it likes, whenever it is asked."""

    def __iter__(self) -> Iterator[int]:
        return (int(torch.randint(40, ())) for _ in range(40))

    def __len__(self) -> int:
        return 40


class Failing(Ragged):
    def __getitem__(self, index: int) -> Tensor:
        if index == 25:
            raise LookupError("row 25 is broken")
        return super().__getitem__(index)


@pytest.fixture
def planned_in(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the threads that have planned batches."""
    names: list[str] = []

    def choose(*args: Any, **options: Any) -> Any:
        names.append(threading.current_thread().name)
        return quick_choice(*args, **options)

    monkeypatch.setattr(planning, "choose_plan", choose)
    return names


def fit(strategy: Any, data: DataLoader, **options: Any) -> tuple[Padded, Any]:
    torch.manual_seed(0)
    module = Padded()
    trainer = lone_trainer(strategy, precision="64-true", **{"max_epochs": 2, **options})
    trainer.fit(module, data)
    return module, trainer


def planned(folder: Path) -> PipeSwiftStrategy:
    path = folder / "costs.json"
    path.write_text(costs().to_json())
    return PipeSwiftStrategy(costs=path, micro_batches=4, loss="per_sample", trim=True)


def rows(data: Any = None, **options: Any) -> DataLoader:
    data = data or Ragged(40)
    if options.get("num_workers"):  # a fork of this process, with its threads, may die
        options["multiprocessing_context"] = fork_server()
    return DataLoader(data, batch_size=8, collate_fn=pad, **options)


@pytest.mark.parametrize(
    ("options", "ahead"),
    [
        ({"num_workers": 1, "shuffle": True}, 8),  # all but the first of each epoch of 5
        ({"num_workers": 1, "persistent_workers": True}, 4),  # its second epoch is planned already
        ({"shuffle": True}, 0),
        ({"num_workers": 1, "sampler": OwnSampler()}, 0),
        ({"data": Streamed()}, 4),
    ],
    ids=["workers", "persistent workers", "no workers", "own sampler", "streamed"],
)
def test_batches_are_planned_ahead_and_train_the_same(
    tmp_path: Path, planned_in: list[str], options: dict[str, Any], ahead: int
) -> None:
    want, _ = fit("auto", rows(**options))
    got, trainer = fit(planned(tmp_path), rows(**options))
    # Padding is known once two places have held it, so the first batch may be planned twice.
    assert planned_in.count(THREAD) in (ahead, ahead - 1), planned_in
    assert trainer.global_step == 10
    for name, parameter in want.named_parameters():
        assert (parameter - got.get_parameter(name)).abs().max() <= TOLERANCE, name


def test_an_epoch_that_ends_early_leaves_nothing_behind(
    tmp_path: Path, planned_in: list[str]
) -> None:
    options = {"limit_train_batches": 2, "max_epochs": 3}
    want, _ = fit("auto", rows(num_workers=1), **options)
    got, trainer = fit(planned(tmp_path), rows(num_workers=1), **options)
    assert THREAD in planned_in
    assert trainer.global_step == 6
    assert not [t for t in threading.enumerate() if t.name == THREAD]
    assert (
        want.get_parameter("model.head.weight") - got.get_parameter("model.head.weight")
    ).abs().max() <= TOLERANCE


def test_a_loader_that_fails_does_so_at_its_batch(tmp_path: Path, planned_in: list[str]) -> None:
    steps = []
    for strategy in ("auto", planned(tmp_path)):
        torch.manual_seed(0)
        trainer = lone_trainer(strategy, precision="64-true", max_epochs=1)
        with pytest.raises(LookupError, match="row 25 is broken"):
            trainer.fit(Padded(), rows(Failing(40), num_workers=1))
        steps.append(trainer.global_step)
    assert steps == [3, 3]


def test_what_is_peeked_at_late_stays_where_it_is() -> None:
    letters = Peekable(iter("abc"))
    turn = letters.turn
    assert next(letters) == "a"
    with pytest.raises(LookupError, match="turn"):
        letters.peek(turn)  # a thread that was not woken in time must not draw another
    assert [letters.peek(), *letters] == ["b", "b", "c"]


def test_a_copy_of_a_loader_has_no_iterator_of_its_own() -> None:
    letters = Peekable(iter("abc"))
    assert copy.copy(letters) is copy.deepcopy([letters])[0] is None
    assert pickle.loads(pickle.dumps({"iterator": letters})) == {"iterator": None}


def test_a_sampler_that_draws_from_a_shared_generator_is_left_alone(
    tmp_path: Path, planned_in: list[str]
) -> None:
    draw = torch.Generator().manual_seed(1)
    sampler = RandomSampler(range(40), replacement=True, generator=draw)
    fit(planned(tmp_path), rows(num_workers=1, sampler=sampler), max_epochs=1)
    assert THREAD not in planned_in


def test_an_interrupted_training_leaves_no_thread_and_no_batch(
    tmp_path: Path, planned_in: list[str]
) -> None:
    class Stopped(Padded):
        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx == 2:
                raise RuntimeError("stopped")

    strategy = planned(tmp_path)
    torch.manual_seed(0)
    trainer = lone_trainer(strategy, precision="64-true", max_epochs=1)
    with pytest.raises(RuntimeError, match="stopped"):
        trainer.fit(Stopped(), rows(num_workers=1))
    assert THREAD in planned_in
    assert not [t for t in threading.enumerate() if t.name == THREAD]
    assert strategy._steps is not None
    assert strategy._steps._last is not None
    assert strategy._steps._last.batch is strategy._steps._last.source is None
