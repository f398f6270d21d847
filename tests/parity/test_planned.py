"""Steps that costs have planned, against plain Lightning: every kind of plan trains the same."""

import gzip
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lightning.pytorch import Callback, LightningModule
from torch import Tensor
from torch.utils.data import DataLoader

from pipeswift_lightning import PipeSwiftStrategy
from pipeswift_lightning.callbacks import TimelineTrace, TopologyCheckpoint
from pipeswift_lightning.plan.costs import CostError
from pipeswift_lightning.strategies import planning
from pipeswift_lightning.strategies.options import OptionError
from tests.helpers.networks import Padded, pad
from tests.helpers.parity import TOLERANCE, Failures, Outcome, compare, fit, lone_trainer, plain
from tests.helpers.planned import (
    Packed,
    PaddingCounts,
    Returning,
    Sessions,
    Tokens,
    Translated,
    costs,
    loader,
    packed,
    packed_and_validated,
    quick_choice,
    random_choice,
    token_rows,
    translation,
)

few_packed = partial(packed, num=21)
padded, tokens = partial(loader, num=21), partial(loader, token_rows, num=21)
BY_TOKENS = {"loss": "per_sample", "loss_weight": "tokens"}
NOW = {"loss": "per_sample"}

Case = tuple[Callable[[], LightningModule], Callable[[], Any], dict[str, Any], dict[str, Any]]
CASES: dict[str, Case] = {
    "found": (Padded, padded, {}, {}),
    "from the start": (Padded, padded, NOW, {}),
    "gpipe": (Padded, padded, {**NOW, "schedule": "gpipe"}, {}),
    "deep": (Padded, padded, {**NOW, "schedule": "1f1b", "warm_up": 2.0}, {}),
    "told number": (Padded, padded, {**NOW, "micro_batches": 3}, {}),
    "told sizes": (Padded, padded, {**NOW, "micro_batches": [3, 3, 2]}, {}),
    "uniform": (Padded, padded, {**NOW, "partition": "uniform"}, {}),
    "told layers": (Padded, padded, {**NOW, "partition": [1, 3]}, {}),
    "memory": (Padded, padded, {**NOW, "memory_limit": 8e3}, {}),
    "all padding": (Padded, padded, {**NOW, "trim": False}, {}),
    "trimming is told": (Padded, padded, {**NOW, "trim": True}, {}),
    "padding counts": (PaddingCounts, padded, NOW, {}),
    "sessions": (Sessions, padded, NOW, {}),
    "tokens": (Tokens, tokens, {}, {}),
    "tokens, told": (Tokens, tokens, BY_TOKENS, {}),
    "own loss": (lambda: Tokens(own_loss=True), tokens, {}, {}),
    "packed": (Packed, few_packed, {}, {}),
    "packed, told": (Packed, few_packed, BY_TOKENS, {}),
    "packed, validated": (Packed, packed_and_validated, {}, {}),
    "packed, told, validated": (Packed, packed_and_validated, BY_TOKENS, {}),
    "accumulated": (Padded, padded, NOW, {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1}),
    "returned": (Returning, padded, NOW, {}),
}


PLAIN: dict[Any, Outcome] = {}


@pytest.fixture(scope="module")
def cost_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("costs") / "costs.json"
    path.write_text(costs().to_json())
    return path


def check(failures: Failures, name: str, case: Case, path: Path | str, **more: Any) -> None:
    module, data, options, trainer = case
    trainer = {"max_epochs": 2 if options.get("loss") is None else 1, **trainer}
    key = (module, data, str({**trainer, "default_root_dir": None}))
    if key not in PLAIN:
        PLAIN[key] = plain(module, data, **trainer)
    strategy = {"costs": path, **options, **more}
    compare(failures, name, module, data, strategy, PLAIN[key], **trainer)


@pytest.mark.world_size(2, deadline_s=240)
def test_every_kind_of_plan_equals_one_device(cost_file: Path) -> None:
    failures = Failures()
    planning.choose_plan = quick_choice
    for name, case in CASES.items():
        check(failures, name, case, cost_file)
    for seed in range(2):
        planning.choose_plan = partial(random_choice, seed=seed)
        check(failures, f"random {seed}", CASES["from the start"], cost_file)
    check(failures, "random, packed", CASES["packed, told"], cost_file)
    measured = {"from the start": ["once"], "packed, told": ["once", "from the file of before"]}
    for name, times in measured.items():
        folder = cost_file.parent / name
        module, data, options, _ = CASES[name]
        for again in times:
            case = module, data, options, {"default_root_dir": folder}
            check(failures, f"{name}, measured {again}", case, "measure")
        assert (folder / "pipeswift_costs.json").exists()
    failures.check()


@pytest.mark.world_size(4, deadline_s=240)
def test_plans_of_four_stages_and_of_replicas(cost_file: Path) -> None:
    failures = Failures()
    planning.choose_plan = quick_choice
    for name in ("from the start", "packed, told"):
        check(failures, f"{name}, 4 stages", CASES[name], cost_file)
    module, data = Padded, partial(loader, num=24)
    strategy = {**NOW, "stages": 2}  # without costs; other tests compare that with DDP
    want = fit(module, data, PipeSwiftStrategy(**strategy), max_epochs=1)
    compare(
        failures, "replicas", module, data, {**strategy, "costs": cost_file}, want, max_epochs=1
    )
    failures.check()


class Seen(Padded):
    """Notes the shapes that its network sees."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: list[tuple[int, ...]] = []
        self.model.register_forward_pre_hook(self._note, with_kwargs=True)

    def _note(self, _: Any, args: Any, kwargs: Any) -> None:
        self.shapes.append(tuple(args[0].shape))


def fit_alone(
    module: LightningModule, strategy: Any, data: Any, steps: int = 2, **options: Any
) -> None:
    torch.manual_seed(0)
    trainer = lone_trainer(
        strategy, max_steps=steps, precision="64-true", num_sanity_val_steps=0, **options
    )
    trainer.fit(module, data)


@pytest.mark.parametrize(
    ("planned", "data"),
    [(True, loader), (False, loader), (True, packed), (False, packed)],
    ids=["planned", "with padding", "packed, planned", "packed"],
)
def test_a_timeline_tells_the_tokens_of_each_micro_batch(
    cost_file: Path, tmp_path: Path, planned: bool, data: Any
) -> None:
    strategy = PipeSwiftStrategy(
        costs=cost_file if planned else None,
        micro_batches=4,
        **(BY_TOKENS if data is packed else NOW),
    )
    batch = next(iter(data(num=8)))
    lengths = batch.lengths if data is packed else batch["mask"].sum(1).tolist()
    if not planned and data is loader:
        lengths = [batch["ids"].shape[1]] * 8
    order: list[list[int]] = [[0, 1], [2, 3], [4, 5], [6, 7]]

    class Record(Callback):
        def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
            order[:] = trainer.strategy.session.planner.record().get("micro_batches", order)

    trace = TimelineTrace(1, tmp_path, png=False)
    module = Packed() if data is packed else Padded()
    fit_alone(module, strategy, data(num=8), 1, callbacks=[trace, Record()])
    (file,) = (tmp_path / "timelines").glob("*.gz")
    slices = [
        e for e in json.loads(gzip.decompress(file.read_bytes()))["traceEvents"] if e["ph"] == "X"
    ]
    told = {
        e["name"]: (e["args"]["samples"], e["args"]["tokens"])
        for e in slices
        if e["cat"] == "forward"
    }
    assert told == {
        f"F{i}": (len(part), sum(lengths[k] for k in part)) for i, part in enumerate(order)
    }


def test_padding_is_cut_off_in_micro_batches_of_unequal_sizes(cost_file: Path) -> None:
    module = Seen()
    strategy = PipeSwiftStrategy(costs=cost_file, micro_batches=4, loss="per_sample", trim=True)
    record: list[dict[str, Any]] = []

    class Record(Callback):
        def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
            record.append(trainer.strategy.session.planner.record())

    fit_alone(module, strategy, loader(num=8), 1, callbacks=[Record()])
    assert sorted(i for part in record[0]["micro_batches"] for i in part) == list(range(8))
    assert sorted({shape[1] for shape in module.shapes}) != [8], module.shapes
    assert len({shape[1] for shape in module.shapes}) > 1
    assert sum(shape[0] for shape in module.shapes[-4:]) == 8


@settings(max_examples=5, deadline=None)
@given(seed=st.integers(0, 2**31))
def test_any_plan_trains_as_plain_lightning_does(cost_file: Path, seed: int) -> None:
    found = []
    for strategy in (
        "auto",
        PipeSwiftStrategy(costs=cost_file, micro_batches=4, loss="per_sample"),
    ):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(planning, "choose_plan", partial(random_choice, seed=seed))
            torch.manual_seed(0)  # both begin alike, whatever ran before in this process
            module = Padded()
            fit_alone(module, strategy, loader(num=16))
        found.append(dict(module.named_parameters()))
    for name, parameter in found[0].items():
        assert (parameter - found[1][name]).abs().max() <= TOLERANCE, name


OTHERS = [translation([5, 4, 6, 3], [2, 3, 3, 1], 1), translation([3, 7, 4, 6], [4, 2, 3, 1], 2)]
LONE = [translation([6, 6, 6, 5], [6, 6, 6, 6], last) for last in (7, 8)]
ALIKE = [translation([6, 6, 5, 5], [6, 6, 6, 6], 9)]


@pytest.mark.parametrize(
    ("batches", "trim"),
    [([*LONE, *OTHERS, *LONE], True), ([*OTHERS, *OTHERS[:1], *ALIKE, *OTHERS], "auto")],
    ids=["a lone last token", "last tokens that are alike"],
)
def test_real_tokens_that_look_like_padding_are_not_cut_off(
    cost_file: Path, batches: list[Any], trim: Any
) -> None:
    found = []
    planned = PipeSwiftStrategy(costs=cost_file, micro_batches=4, loss="per_sample", trim=trim)
    for strategy in ("auto", planned):
        torch.manual_seed(0)
        module = Translated()
        trainer = lone_trainer(strategy, max_epochs=1, precision="64-true", num_sanity_val_steps=0)
        trainer.fit(module, DataLoader(batches, batch_size=None))
        found.append(dict(module.named_parameters()))
    for name, parameter in found[0].items():
        assert (parameter - found[1][name]).abs().max() <= TOLERANCE, name


class Wider(Padded):
    """Tells of a tensor that only training batches have."""

    length_dims = {"ids": 1, "mask": 1, "wide": 1}  # noqa: RUF012 -- as a user writes it

    def sample_lengths(self, batch: Any) -> Tensor:
        return (batch["wide"] > 0).sum(1)


def lengths_of_mask(module: Padded, batch: Any) -> Tensor:
    return batch["mask"].sum(1)


def widened(rows: Any) -> dict[str, Any]:
    batch = pad(rows)
    return {**batch, "wide": batch["ids"]}


@pytest.mark.parametrize("told", [True, False])
def test_hooks_of_training_batches_may_not_fit_a_sanity_check(cost_file: Path, told: bool) -> None:
    kind = Wider if told else type("OnlyDims", (Wider,), {"sample_lengths": lengths_of_mask})
    module = kind()
    strategy = PipeSwiftStrategy(costs=cost_file, micro_batches=2, loss="per_sample")
    trainer = lone_trainer(strategy, max_steps=1, precision="64-true", num_sanity_val_steps=1)
    trainer.fit(module, loader(widened, num=8), loader(num=4))
    assert trainer.global_step == 1


@pytest.mark.parametrize("number", [2, 1, None])
def test_one_stage_is_planned_whatever_its_first_batch_is(
    cost_file: Path, number: int | None
) -> None:
    active = []

    class Record(Callback):
        def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
            active.append(trainer.strategy.session.planner.active)

    strategy = PipeSwiftStrategy(costs=cost_file, micro_batches=number, loss="per_sample")
    trainer = lone_trainer(strategy, max_steps=1, num_sanity_val_steps=1, callbacks=[Record()])
    trainer.fit(Padded(), loader(num=8), loader(num=1))
    assert active == [number == 2]


def test_one_stage_measures_its_own_costs(tmp_path: Path) -> None:
    active, found = [], []

    class Record(Callback):
        def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
            planner = getattr(trainer.strategy, "session", None)
            active.append(planner is not None and planner.planner.choice is not None)

    measuring = PipeSwiftStrategy(costs="measure", micro_batches=4, loss="per_sample")
    for strategy in ("auto", measuring):
        torch.manual_seed(0)
        module = Padded()
        fit_alone(module, strategy, loader(), callbacks=[Record()], default_root_dir=tmp_path)
        found.append(dict(module.named_parameters()))
    assert active == [False, False, True, True]
    assert (tmp_path / "pipeswift_costs.json").exists()
    for name, parameter in found[0].items():
        assert (parameter - found[1][name]).abs().max() <= TOLERANCE, name


def test_costs_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    for text, problem in (
        (None, "cannot be read"),
        ("{}", "is no cost model"),
        (costs(3).to_json(), "has 3 layers, but a step calls 4"),
    ):
        path = tmp_path / "costs.json"
        if text is not None:
            path.write_text(text)
        strategy = PipeSwiftStrategy(costs=path, micro_batches=2)
        with pytest.raises(CostError, match=rf"(?s){problem}.* Rule: .* Remedy: "):
            fit_alone(Padded(), strategy, loader(num=4), steps=1)


@pytest.mark.parametrize(
    "wrong",
    [{"partition": "halves"}, {"trim": "never"}, {"memory_limit": 0}, {"memory_limit": [1, 0]}],
)
def test_options_that_mean_nothing_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(OptionError, match=r" is not allowed. Rule: "):
        PipeSwiftStrategy(**wrong)


def test_the_plan_is_in_a_checkpoint_and_a_resumed_run_makes_the_same(
    cost_file: Path, tmp_path: Path
) -> None:
    def run(steps: int, **options: Any) -> tuple[Padded, list[Any]]:
        strategy = PipeSwiftStrategy(costs=cost_file, micro_batches=4, loss="per_sample")
        saved = TopologyCheckpoint(tmp_path / options.pop("folder"), every_n_steps=2)
        torch.manual_seed(0)
        module = Padded()
        trainer = lone_trainer(
            strategy,
            max_steps=steps,
            precision="64-true",
            num_sanity_val_steps=0,
            callbacks=[saved],
        )
        trainer.fit(module, loader(num=32), **options)
        described = json.loads((saved.latest(saved.dirpath) / "topology.json").read_text())
        return module, described["planned"]

    straight, whole = run(4, folder="straight")
    run(2, folder="resumed")
    resumed, again = run(
        4, folder="resumed", ckpt_path=TopologyCheckpoint.latest(tmp_path / "resumed")
    )
    assert whole["micro_batches"] == again["micro_batches"]
    for name, parameter in straight.named_parameters():
        assert torch.equal(parameter, dict(resumed.named_parameters())[name]), name
