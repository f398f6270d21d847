"""Counting instead of measuring: known numbers, and nothing runs."""

from functools import partial

import pytest
import torch
from torch import Tensor, nn

from pipeswift_lightning.examples.gpt import GPT
from pipeswift_lightning.runtime.profiler import ProfileError, Subject, flops_model
from tests.runtime.profiler.networks import Delicate, delicate_batch, loss_of

CPU = torch.device("cpu")


def test_a_transformer_built_on_the_meta_device() -> None:
    dim, vocabulary = 8, 32
    with torch.device("meta"):
        gpt = GPT(vocabulary, dim=dim, num_heads=2, num_layers=3, max_len=16)

    def run(tokens: Tensor) -> Tensor:
        return gpt(tokens, tokens >= 0).sum()

    batches = [torch.zeros(b, n, dtype=torch.int64) for b in (1, 2) for n in (4, 8, 16)]
    model = flops_model(Subject(gpt, list(gpt.blocks), run, CPU), batches, flops_per_s=1.0)
    first, middle, last = model.layers
    # 12 dim^2 weights and two products of queries, keys and values: 2 operations each, twice back.
    assert middle.forward.token_s == pytest.approx(2 * 12 * dim**2)
    assert middle.forward.square_s == pytest.approx(4 * dim)
    assert middle.backward.token_s == pytest.approx(4 * 12 * dim**2)
    assert middle.backward.square_s == pytest.approx(8 * dim)
    assert first.forward == middle.forward  # a look-up costs nothing
    head = last.forward.token_s - middle.forward.token_s
    assert head == pytest.approx(2 * dim * vocabulary)
    assert middle.output_bytes_per_token == 4 * dim
    assert middle.activation_bytes_per_token >= 16 * 4 * dim
    assert model.relative_error == 0.25
    assert all(p.is_meta for p in gpt.parameters())


def test_layers_of_every_kind_are_counted_and_left_alone() -> None:
    network = Delicate()
    before = {name: (id(t), t.tolist()) for name, t in network.state_dict(keep_vars=True).items()}
    generator = torch.get_rng_state()
    subject = Subject(network, list(network.blocks), partial(loss_of, network), CPU)
    batches = [delicate_batch(2, 3), delicate_batch(2, 6)]
    model = flops_model(subject, batches, flops_per_s=1e9, fixed_s=1e-5)
    assert all(layer.forward.fixed_s >= 0 for layer in model.layers)
    assert model.layers[3].forward.token_s > model.layers[2].forward.token_s  # the head is there
    after = {name: (id(t), t.tolist()) for name, t in network.state_dict(keep_vars=True).items()}
    assert after == before
    assert all(p.grad is None for p in network.parameters())
    assert torch.equal(torch.get_rng_state(), generator)


def test_layers_that_need_data_are_guessed_from_their_weights() -> None:
    class Routed(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) if x.sum().item() > 0 else x

    network = nn.Sequential(nn.Linear(4, 4), Routed(4, 4))
    subject = Subject(network, list(network), network, CPU)
    batches = [torch.ones(n, 4) for n in (2, 5)]
    model = flops_model(subject, batches, flops_per_s=1.0)
    assert [round(layer.forward.token_s) for layer in model.layers] == [32, 32]
    with pytest.raises(ProfileError, match=r"flops_per_s=0 takes for ever\. Rule: above 0"):
        flops_model(subject, batches, flops_per_s=0)
