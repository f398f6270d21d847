import itertools

import torch

from pipeswift_lightning.runtime.rng import preserved_rng, reseeder, stream_seed

CPU = torch.device("cpu")


def test_seeds_of_small_keys_do_not_collide() -> None:
    seeds = {stream_seed(*key) for key in itertools.product(range(12), repeat=4)}
    assert len(seeds) == 12**4
    assert all(0 <= seed < 1 << 63 for seed in seeds)
    assert stream_seed(1) != stream_seed(1, 0)
    assert stream_seed(-1) >= 0


def test_a_layer_draws_the_same_whatever_ran_before() -> None:
    reseed = reseeder(CPU, 3, 1)
    with preserved_rng(CPU):
        reseed(2, False)
        gap = torch.rand(2)
        reseed(2, True)
        first = torch.rand(2)
        torch.rand(5)
        reseed(2, False)
        reseed(2, True)
        assert torch.equal(torch.rand(2), first)
    assert not torch.equal(gap, first)


def test_the_global_stream_is_left_alone() -> None:
    torch.manual_seed(0)
    want = torch.rand(2)
    torch.manual_seed(0)
    with preserved_rng(CPU):
        reseeder(CPU, 1)(0, True)
        torch.rand(7)
    assert torch.equal(torch.rand(2), want)
