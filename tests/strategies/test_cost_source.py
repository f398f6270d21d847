"""Where costs come from and are kept, and what happens if something goes wrong with them."""

import time
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from pipeswift_lightning.plan.costs import Link
from pipeswift_lightning.plan.profile import CostProfile, LayerProfile, LayerSample
from pipeswift_lightning.strategies import measuring
from pipeswift_lightning.strategies.assembly_times import AssemblyPart, AssemblyTimes
from pipeswift_lightning.strategies.cost_source import from_rank_zero
from pipeswift_lightning.strategies.measuring import (
    COST_FILE,
    Between,
    CostSource,
    completed,
    cost_path,
    keep_costs,
)


class UnsendableError(Exception):
    def __init__(self, one: int, other: int) -> None:
        super().__init__(f"{one} and {other}")


def fail(error: Exception) -> None:
    assert dist.get_rank() == 0
    raise error


@pytest.mark.world_size(2, deadline_s=60)
def test_any_error_of_the_first_rank_is_raised_on_all() -> None:
    with pytest.raises(KeyError, match="mask") as found:
        from_rank_zero(lambda: fail(KeyError("mask")))
    assert "rank 0" in "".join(found.value.__notes__)
    expected = UnsendableError if dist.get_rank() == 0 else RuntimeError
    with pytest.raises(expected, match="1 and 2"):
        from_rank_zero(lambda: fail(UnsendableError(1, 2)))
    assert from_rank_zero(lambda: 3) == 3


def test_measuring_is_timed_apart_from_planning(monkeypatch: pytest.MonkeyPatch) -> None:
    def slow(*_: Any) -> None:
        time.sleep(0.05)

    monkeypatch.setattr(measuring, "C10dTransport", lambda *_: None)
    monkeypatch.setattr(measuring, "shared_link", slow)
    monkeypatch.setattr(measuring, "measure_overhead", lambda *_: 0.0)
    monkeypatch.setattr(measuring, "measured_costs", slow)
    groups: Any = SimpleNamespace(mesh=SimpleNamespace(num_stages=2), pipeline=None)
    unused: Any = SimpleNamespace(num_layers=1)
    times = AssemblyTimes()
    source = CostSource("measure", unused, unused, groups, nullcontext, times)
    with times.timing(AssemblyPart.PLAN):
        source.reader(unused, unused, unused)()
    assert times.seconds["plan"] < 0.05 < 0.1 <= times.seconds["profile"]


def test_costs_are_kept_in_a_local_folder(tmp_path: Path) -> None:
    def path(dirpath: str | None, root: Any = tmp_path) -> Path:
        callbacks = [SimpleNamespace(), SimpleNamespace(dirpath=dirpath)]
        trainer: Any = SimpleNamespace(callbacks=callbacks, default_root_dir=root)
        return cost_path(trainer)

    assert path("s3://bucket/run") == path(None) == tmp_path / COST_FILE
    assert path(str(tmp_path / "kept")) == tmp_path / "kept" / COST_FILE
    assert path("s3://bucket/run", "gs://bucket") == Path.cwd() / COST_FILE


def a_profile() -> CostProfile:
    sample = LayerSample(forward_s=1.0, backward_s=2.0)
    layer = LayerProfile(
        name="a", parameter_bytes=1, gradient_bytes=1, optimizer_bytes=1, samples=(sample,)
    )
    return CostProfile(shapes=((1, 2),), layers=(layer,))


def test_a_kept_profile_stays_as_it_is_but_for_what_it_lacks(tmp_path: Path) -> None:
    path = tmp_path / COST_FILE
    kept = a_profile()  # of one stage: no link, no overhead
    assert completed(kept, Between(), path) == kept
    assert not path.exists()
    first = Between(Link(latency_s=1e-3), 2e-3)
    found = completed(kept, first, path)
    assert (found.link, found.overhead_s) == (first.link, 2e-3)
    assert CostProfile.from_json(path.read_text()) == found
    assert found.model().overhead_s == 2e-3
    path.unlink()
    assert completed(found, Between(Link(latency_s=5.0), 7.0), path) == found
    assert not path.exists(), "there is nothing new to keep"


def test_a_folder_that_cannot_be_written_does_not_end_the_run(tmp_path: Path) -> None:
    profile = a_profile()
    (tmp_path / "file").touch()
    with pytest.warns(UserWarning, match="could not be kept in"):
        keep_costs(profile, tmp_path / "file" / COST_FILE)
    keep_costs(profile, tmp_path / "folder" / COST_FILE)
    assert (tmp_path / "folder" / COST_FILE).exists()
