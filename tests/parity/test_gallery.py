"""Module styles that users bring along, each against plain Lightning."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from pipeswift_lightning import PipeSwiftStrategy
from tests.helpers.gallery import (
    Auxiliary,
    Before,
    Crossed,
    Encoder,
    Itself,
    Late,
    ManySets,
    MiddleFunctions,
    Momentum,
    Recomputing,
    RecomputingInside,
    Recurrent,
    Repeated,
    Rotary,
    WithAuxiliary,
)
from tests.helpers.modules import (
    Language,
    Regression,
    Transformer,
    loader,
    loaders,
    tokens,
    vectors,
)
from tests.helpers.parity import Failures, compare, differences, fit, plain

Case = tuple[Callable[[], LightningModule], Callable[[], Any], dict[str, Any]]


def inside() -> nn.Sequential:
    ends = (nn.Embedding(11, 6), nn.Linear(6, 11))
    return nn.Sequential(ends[0], *[RecomputingInside() for _ in range(3)], ends[1])


def two_sets() -> tuple[Any, Any]:
    return loader(tokens), [loader(partial(tokens, 9)), loader(partial(tokens, 13))]


GALLERY: dict[str, Case] = {
    "functions in the middle": (lambda: Language(MiddleFunctions()), loaders(tokens), {}),
    "a block called often": (lambda: Regression(Repeated()), loaders(vectors), {}),
    "tied layers": (lambda: Regression(Crossed()), loaders(vectors), {"gradient_clip_val": 0.1}),
    "recomputing": (lambda: Language(Recomputing()), loaders(tokens), {}),
    "recomputing inside": (lambda: Language(inside()), loaders(tokens), {}),
    "torch's encoder": (lambda: Language(Encoder()), loaders(tokens), {}),
    "recurrent": (lambda: Language(Recurrent()), loaders(tokens), {}),
    "buffers": (lambda: Language(Rotary()), loaders(tokens), {}),
    "the module itself": (Itself, loaders(vectors), {"network": "self"}),
    "configure_model": (Late, loaders(vectors), {}),
    "a parameter before": (Before, loaders(vectors), {"network": "net"}),
    "momentum": (lambda: Momentum(Transformer(tied="functional")), loaders(tokens), {}),
    "auxiliary losses": (lambda: WithAuxiliary(Auxiliary()), loaders(tokens), {}),
    "two validation sets": (lambda: ManySets(Transformer()), two_sets, {}),
}


# What does not depend on where the cuts are is shown on two stages.
ANY_CUT = {"recomputing inside", "the module itself", "configure_model", "two validation sets"}


def _check(stages: int, left_out: set[str]) -> None:
    failures = Failures()
    for name, (module, data, given) in GALLERY.items():
        if name in left_out:
            continue
        length = {"max_epochs": 1} if stages == 2 else {"max_epochs": 2, "max_steps": 7}
        options: dict[str, Any] = {**length, **given}
        loss = "per_sample" if stages == 2 else "auto"  # which is found in the first steps
        network = options.pop("network", None)
        strategy = {"micro_batches": 3, "network": network, "loss": loss}
        want = plain(module, data, **options)
        compare(failures, f"{name}, {stages} stages", module, data, strategy, want, **options)
    failures.check()


@pytest.mark.world_size(2, deadline_s=120)
def test_two_stages() -> None:
    _check(2, set())


@pytest.mark.slow
@pytest.mark.world_size(4, deadline_s=120)
def test_four_stages() -> None:
    _check(4, ANY_CUT)


@pytest.mark.world_size(2, deadline_s=120)
def test_recomputed_layers_drop_what_they_dropped_before() -> None:
    class Kept(Recomputing):
        def forward(self, ids: Tensor) -> Tensor:
            x = self.embed(ids)
            for block in self.blocks:
                x = block(x)
            return self.head(x)

    strategy = partial(PipeSwiftStrategy, micro_batches=3, loss="per_sample")
    want = fit(lambda: Language(Kept(0.3)), loaders(tokens), strategy(), max_epochs=3)
    got = fit(lambda: Language(Recomputing(0.3)), loaders(tokens), strategy(), max_epochs=3)
    assert differences(got, want) == []


@pytest.mark.world_size(2, deadline_s=120)
def test_a_reentrant_checkpoint_on_a_cut_is_refused() -> None:
    def module() -> LightningModule:
        return Language(Recomputing(reentrant=True))

    with pytest.raises(Exception, match="use_reentrant=False"):
        fit(module, loaders(tokens), PipeSwiftStrategy(micro_batches=3), max_epochs=1)
