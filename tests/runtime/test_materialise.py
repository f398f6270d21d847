"""Tensors on the meta device get data in place, the same whatever else is made real."""

from collections.abc import Collection

import pytest
import torch
from torch import Tensor, nn

from pipeswift_lightning.runtime.materialise import MaterialiseError, Materialiser, absent_names


def nothing(names: Collection[str]) -> Tensor | None:
    return None


def reset(child: nn.Module) -> bool:
    method = getattr(child, "reset_parameters", None)
    if method is None:
        return False
    method()
    return True


def materialiser(module: nn.Module, find=nothing) -> Materialiser:
    return Materialiser(module, find=find, initialise=reset, seed=1)


def network() -> nn.Module:
    with torch.device("meta"):
        return nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 2))


def test_a_share_has_the_values_that_the_whole_has() -> None:
    whole, share = network(), network()
    materialiser(whole).parameters(absent_names(whole))
    torch.manual_seed(9)  # the global generators do not matter
    before = torch.default_generator.get_state()
    materialiser(share).parameters(["2.weight", "2.bias"])
    assert torch.equal(torch.default_generator.get_state(), before)
    assert absent_names(share) == {"0.weight", "0.bias", "1.weight", "1.bias"}
    assert torch.equal(share[2].weight, whole[2].weight)
    assert not torch.equal(whole[0].weight.flatten(), whole[2].weight.flatten())


def test_an_optimizer_keeps_the_parameters_that_it_holds() -> None:
    module = network()
    optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
    module[0].bias.requires_grad_(False)
    materialiser(module).parameters(absent_names(module))
    assert [id(p) for p in optimizer.param_groups[0]["params"]] == list(
        map(id, module.parameters())
    )
    assert not module[0].bias.requires_grad
    assert not any(p.is_meta for p in optimizer.param_groups[0]["params"])


def test_buffers_are_made_without_the_parameters() -> None:
    module = network()
    materialiser(module).buffers()
    assert module[1].running_var.tolist() == [1, 1, 1]
    assert module[1].weight.is_meta


def test_tied_parameters_are_read_under_any_name_and_set_once() -> None:
    module = network()
    module[2].bias = None
    module.head = nn.Linear(3, 2, device="meta")
    module.head.weight = module[2].weight
    held = {"head.weight": torch.ones(2, 3)}
    find = lambda names: next((held[n] for n in names if n in held), None)  # noqa: E731
    materialiser(module, find).parameters(absent_names(module))
    assert module.head.weight is module[2].weight
    assert module[2].weight.eq(1).all()  # the head's bias was initialised, its weight left alone
    assert not module.head.bias.isnan().any()


def test_a_tensor_of_another_shape_is_refused() -> None:
    module = network()
    with pytest.raises(MaterialiseError, match=r"0.weight has the shape \[3, 2\], but .* \[1\]"):
        materialiser(module, lambda names: torch.ones(1)).parameters(["0.weight"])


class Silent(nn.Module):
    """Says nothing of how its tensors are set, or forgets one."""

    def __init__(self) -> None:
        super().__init__()
        self.forgotten = nn.Parameter(torch.zeros(2))


class Forgetful(Silent):
    def reset_parameters(self) -> None:
        pass


@pytest.mark.parametrize("kind", [Silent, Forgetful])
def test_what_nothing_sets_is_named(kind: type[nn.Module]) -> None:
    with torch.device("meta"):
        module = nn.Sequential(kind())
    with pytest.raises(MaterialiseError, match=r"0.forgotten is on the meta .* Rule: .* Remedy: "):
        materialiser(module).parameters(["0.forgotten"])
