"""Which weights a check leaves, also where the precision hardly tells them apart."""

from contextlib import nullcontext

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from pipeswift_lightning import PipeSwiftStrategy
from pipeswift_lightning.strategies.comparison import StepResult, compare
from pipeswift_lightning.strategies.loss_scope import LossPolicy
from pipeswift_lightning.strategies.loss_weights import Rule, Weighting, ranked, rules_for
from pipeswift_lightning.strategies.options import LossScope
from pipeswift_lightning.strategies.records import LogRecord, merge_records
from pipeswift_lightning.strategies.rounding import rounding_in_use, rounding_of
from tests.helpers import huggingface as hf

CPU = torch.device("cpu")
RULES = (Rule.SAMPLES, Rule.TOKENS)
SHARES = {Rule.SAMPLES: (0.5, 0.5), Rule.TOKENS: (0.3, 0.7)}
BF16 = rounding_of(torch.bfloat16)


def policy(*, told: bool = False) -> LossPolicy:
    return LossPolicy(LossScope.AUTO, RULES, told=told)


def step(chosen: LossPolicy, parts: list[float], whole: float | None, dtype: torch.dtype) -> None:
    """Check one step whose loss is a mean over tokens, unless ``whole`` is given."""
    losses = [torch.tensor(x, dtype=dtype) for x in parts]
    exact = 0.3 * parts[0] + 0.7 * parts[1] if whole is None else whole
    chosen.next_step(SHARES)
    of_batch = StepResult([torch.tensor(exact, dtype=dtype)], [[]], [4])
    of_parts = StepResult(losses, [[], []], [2, 2])
    chosen.learn(compare(of_batch, of_parts, SHARES, rounding_of(dtype)), SHARES)


def test_a_mean_over_tokens_is_found_in_half_precision() -> None:
    chosen = policy()
    for i in range(3):
        step(chosen, [2.0 + i / 7, 2.1 + i / 5], None, torch.bfloat16)
    assert chosen.rules == RULES  # both still fit
    for i in range(5):
        step(chosen, [2.0 + i / 7, 2.1 + i / 5], None, torch.bfloat16)
    assert chosen.rules == (Rule.TOKENS,)
    assert not chosen.whole


def test_until_rules_are_told_apart_the_one_that_fits_best_weighs() -> None:
    """A network's own loss is not computed whole: GPT-2's was weighted by samples at first."""
    chosen = policy()
    step(chosen, [2.0, 2.00005], None, torch.float32)  # by samples: 5e-6 off, as rounding may be
    assert chosen.rules == RULES
    assert chosen.weighting(SHARES).loss == SHARES[Rule.TOKENS]


def test_a_tie_is_never_settled_by_the_order_of_the_rules() -> None:
    chosen = policy()
    for _ in range(16):
        step(chosen, [2.0, 2.0], None, torch.bfloat16)
    assert chosen.whole


def test_a_tie_goes_to_the_likeliest_where_the_user_has_named_the_weights() -> None:
    chosen = policy(told=True)
    for _ in range(16):
        step(chosen, [2.0, 2.0], None, torch.bfloat16)
    assert chosen.rules == (Rule.SAMPLES,)
    assert not chosen.whole


def test_one_miss_at_rounding_level_is_checked_again_and_a_large_one_is_not() -> None:
    chosen = LossPolicy(LossScope.AUTO, (Rule.SAMPLES,))
    for _ in range(6):
        chosen.next_step({Rule.SAMPLES: (0.5, 0.5)})
    step(chosen, [2.0, 2.0], 2.0 * (1 + 2 * BF16), torch.bfloat16)
    assert not chosen.whole
    assert chosen.next_step({Rule.SAMPLES: (0.5, 0.5)}) == (LossScope.WHOLE_BATCH, True)
    with pytest.warns(UserWarning, match="since the last check"):
        step(chosen, [2.0, 2.0], 2.2, torch.bfloat16)
    assert chosen.whole


def test_a_constant_that_is_logged_holds_nothing_up_and_goes_with_the_loss() -> None:
    chosen = policy()
    records = [LogRecord("rate", torch.tensor(0.1), None, {})]
    for i in range(4):
        chosen.next_step(SHARES)
        losses = [torch.tensor(x, dtype=torch.float64) for x in (1.0, 2.0 + i)]
        whole = StepResult([0.3 * losses[0] + 0.7 * losses[1]], [records], [4])
        parts = StepResult(losses, [records, records], [2, 2])
        chosen.learn(compare(whole, parts, SHARES, 1e-9), SHARES)
    for _ in range(2):
        scope, check = chosen.next_step(SHARES)
    assert (scope, check) == (LossScope.PER_SAMPLE, False)
    assert chosen.weighting(SHARES) == Weighting((0.3, 0.7), {"rate": (0.3, 0.7)})


def test_values_that_cancel_out_are_compared_by_their_parts() -> None:
    whole = StepResult([torch.tensor(1e-12, dtype=torch.float64)], [[]], [4])
    losses = [torch.tensor(x, dtype=torch.float64) for x in (1.0, -1.0)]
    found = compare(whole, StepResult(losses, [[], []], [2, 2]), SHARES, 1e-9)
    assert found[""][Rule.SAMPLES] < 1 < found[""][Rule.TOKENS]


def test_a_resumed_run_goes_on_and_begins_anew_if_the_rules_are_others() -> None:
    chosen = policy()
    step(chosen, [1.0, 2.0], 5.0, torch.float64)
    assert chosen.whole
    for again, whole in (
        (policy(), True),
        (policy(told=True), False),
        (LossPolicy(LossScope.AUTO, (Rule.HOOK,)), False),
    ):
        again.load_state(chosen.state())
        assert again.whole is whole
    half, again = policy(), policy()
    step(half, [2.0, 2.1], None, torch.bfloat16)
    again.load_state(half.state())
    assert again.state() == half.state()


@pytest.mark.parametrize(
    ("dtype", "autocast", "want"),
    [
        (torch.float64, True, 1e-9),
        (torch.float32, False, 1e-5),
        (torch.float32, True, BF16),
        (torch.bfloat16, False, BF16),
    ],
)
def test_the_precision_in_use(dtype: torch.dtype, autocast: bool, want: float) -> None:
    context = lambda: torch.autocast("cpu", torch.bfloat16) if autocast else nullcontext()  # noqa: E731
    assert rounding_in_use(nn.Linear(1, 1, dtype=dtype), context, CPU) == want


def test_a_given_batch_size_comes_before_the_weights_of_an_unchecked_loss() -> None:
    def record(value: float, **options: int) -> LogRecord:
        return LogRecord(f"{options}", torch.tensor(value), None, options)

    weighting = Weighting((0.25, 0.75))
    records = [[record(0.0), record(0.0, batch_size=1)], [record(1.0), record(1.0, batch_size=1)]]
    by_loss, by_size = merge_records(records, [1, 1], weighting.of_log)
    assert isinstance(by_loss.value, Tensor)
    assert (by_loss.value, by_size.value) == (0.75, 0.5)


@pytest.mark.parametrize("weight", ["auto", "tokens"])
def test_a_causal_model_shifts_the_labels_of_its_own_loss_only(weight: str) -> None:
    scope = "per_sample" if weight == "tokens" else "auto"
    module = LightningModule()
    module.model = hf.causal("Llama")
    rules = rules_for(module, PipeSwiftStrategy(loss=scope, loss_weight=weight).options)
    tokens = [r for r in rules if r is not Rule.SAMPLES]
    assert ranked(tokens, own_loss=True)[0] is Rule.NEXT_TOKENS
    assert ranked(tokens, own_loss=False)[0] is Rule.TOKENS
