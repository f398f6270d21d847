import math
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lightning.pytorch import Trainer
from torch.utils.flop_counter import FlopCounterMode

from pipeswift_lightning.examples import GPT, GPTModule, TextDataModule
from pipeswift_lightning.examples.gpt import Block, per_sample_loss, warm_up_cosine
from pipeswift_lightning.examples.text import collate

SMALL = {"dim": 16, "num_heads": 2, "num_layers": 2, "max_len": 32}


@pytest.fixture(scope="module")
def network() -> GPT:
    torch.manual_seed(0)
    return GPT(**SMALL).double()


def samples_of(lengths: list[int]) -> list[bytes]:
    rng = random.Random(0)
    return [rng.randbytes(n + 1) for n in lengths]


def losses(network: GPT, samples: list[bytes]) -> torch.Tensor:
    batch = collate(samples)
    logits = network(batch["tokens"], batch["mask"])
    return per_sample_loss(logits, batch["targets"], batch["mask"])


def test_padding_does_not_change_the_logits(network) -> None:
    short, long = samples_of([5, 30])
    alone, together = collate([short]), collate([short, long])
    expected = network(alone["tokens"], alone["mask"])
    padded = network(together["tokens"], together["mask"])[:1, :5]
    torch.testing.assert_close(padded, expected, rtol=0, atol=1e-12)


def test_masked_tokens_are_seen_by_no_other_position(network) -> None:
    tokens = collate(samples_of([10]))["tokens"]
    mask = torch.ones_like(tokens, dtype=torch.bool)
    mask[0, :3] = False  # padding in front: also no row of scores may be empty
    changed = tokens.clone()
    changed[0, :3] = 0
    logits, others = network(tokens, mask), network(changed, mask)
    torch.testing.assert_close(logits[0, 3:], others[0, 3:], rtol=0, atol=1e-12)
    assert logits.isfinite().all()
    mask[0, :3] = True
    assert not torch.allclose(network(tokens, mask)[0, 3:], network(changed, mask)[0, 3:])


def test_no_position_sees_the_future(network) -> None:
    batch = collate(samples_of([10]))
    changed = batch["tokens"].clone()
    changed[0, 6:] = 0
    before, after = network(batch["tokens"], batch["mask"]), network(changed, batch["mask"])
    torch.testing.assert_close(before[0, :6], after[0, :6], rtol=0, atol=1e-12)


@given(lengths=st.lists(st.integers(1, 32), min_size=2, max_size=6), data=st.data())
@settings(max_examples=10, deadline=None)
def test_weighted_micro_batch_losses_are_the_batchs(network, lengths, data) -> None:
    samples = samples_of(lengths)
    cut = data.draw(st.integers(1, len(samples) - 1))
    parts = (samples[:cut], samples[cut:])
    with torch.no_grad():
        whole = losses(network, samples).mean()
        weighted = sum(losses(network, p).mean() * len(p) / len(samples) for p in parts)
    torch.testing.assert_close(weighted, whole, rtol=0, atol=1e-12)


def test_first_loss_is_that_of_a_uniform_guess(network) -> None:
    assert losses(network, samples_of([32] * 8)).mean().item() == pytest.approx(
        math.log(257), abs=0.1
    )


def test_head_is_tied_to_the_embedding(network) -> None:
    assert network.head.weight is network.embedding.weight
    assert "head.weight" not in dict(network.named_parameters())


def test_only_the_network_has_parameters() -> None:
    module = GPTModule(**SMALL)
    assert {name.split(".")[0] for name, _ in module.named_parameters()} == {"model"}
    assert module.hparams.dim == 16


def test_heads_must_divide_the_channels() -> None:
    with pytest.raises(ValueError, match="dim=10 and num_heads=4"):
        Block(10, 4, 0.0)


def test_learning_rate_rises_then_falls() -> None:
    factors = [warm_up_cosine(s, warm_up_steps=5, total_steps=20) for s in range(25)]
    assert factors[:5] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])
    assert factors[5:21] == sorted(factors[5:21], reverse=True)
    assert factors[20:] == pytest.approx([0.1] * 5)
    assert warm_up_cosine(10**9, warm_up_steps=5, total_steps=math.inf) == 1.0


def test_loss_falls_and_every_parameter_is_in_one_group(tmp_path) -> None:
    torch.manual_seed(0)
    data = TextDataModule(batch_size=8, max_len=32, max_samples=200)
    module = GPTModule(**SMALL, warm_up_steps=2).double()
    trainer = Trainer(
        accelerator="cpu",
        devices=1,
        max_steps=30,
        precision="64-true",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=tmp_path,
    )
    trainer.fit(module, data)
    decayed, others = (group["params"] for group in trainer.optimizers[0].param_groups)
    assert len(decayed) == 4 * SMALL["num_layers"]  # the matrices
    assert len(decayed) + len(others) == len(list(module.parameters()))
    trainer.validate(module, data, verbose=False)
    assert trainer.callback_metrics["val/loss"].item() < 4.8  # from 5.55


def test_flops_are_those_that_torch_counts_and_attentions() -> None:
    module = GPTModule(**SMALL)
    tokens = torch.zeros(4, 32, dtype=torch.long)
    batch = {"tokens": tokens, "targets": tokens, "mask": tokens == 0}
    with FlopCounterMode(display=False) as counter:  # it knows no attention on a CPU
        module._loss(batch).backward()
    attention = 12 * SMALL["num_layers"] * SMALL["dim"] * 32 * tokens.numel()
    counted = counter.get_total_flops() + attention
    assert module.flops_per_batch(batch) == pytest.approx(counted, rel=0.05)
