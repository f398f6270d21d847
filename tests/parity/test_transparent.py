"""Steps that every rank runs whole: manual optimisation, several calls, several networks."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
from lightning.pytorch import LightningModule

from tests.helpers.parity import Failures, compare, plain
from tests.helpers.transparent import (
    CarelessGan,
    Gan,
    Manual,
    MeanTeacher,
    Siamese,
    two_loaders,
)


@dataclass(frozen=True)
class Case:
    module: Callable[[], LightningModule]
    options: dict[str, Any] = field(default_factory=dict)
    trainer: dict[str, Any] = field(default_factory=dict)


CASES = {
    "manual": Case(Manual, {"micro_batches": [3, 1, 4]}),
    "gan": Case(Gan, {"micro_batches": 3}),
    "gan, small discriminator": Case(lambda: Gan(1), {"micro_batches": 3}),
    "gan, one graph": Case(CarelessGan, {"micro_batches": 2}),
    "siamese": Case(Siamese, {"micro_batches": 3}, {"accumulate_grad_batches": 2}),
    "siamese, recomputed": Case(lambda: Siamese(recompute=True), {"micro_batches": 3}),
    "teacher": Case(MeanTeacher, {"network": ["student", "teacher"], "micro_batches": 3}),
}


def _check() -> None:
    failures = Failures()
    for name, case in CASES.items():
        module = case.module
        options = {"max_epochs": 5, **case.trainer}
        want = plain(lambda m=module: m().double(), two_loaders, **options)
        compare(
            failures,
            name,
            lambda m=module: m().double(),
            two_loaders,
            case.options,
            want,
            **options,
        )
    failures.check()


@pytest.mark.world_size(2, deadline_s=120)
def test_two_stages() -> None:
    _check()


@pytest.mark.slow
@pytest.mark.world_size(4, deadline_s=120)
def test_four_stages() -> None:
    _check()
