"""Networks whose costs are known, or whose modules are easily disturbed."""

import time
from typing import Any

import torch
from torch import Tensor, nn


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, forward_s: float, backward_s: float) -> Tensor:
        ctx.backward_s = backward_s
        time.sleep(forward_s)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        time.sleep(ctx.backward_s)
        return gradients[0], None, None


class Sleeping(nn.Module):
    """Takes ``fixed_s + token_s * tokens`` forward, and ``factor`` times that backward."""

    def __init__(self, fixed_s: float, token_s: float, factor: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.fixed_s, self.token_s, self.factor = fixed_s, token_s, factor

    def forward(self, x: Tensor) -> Tensor:
        seconds = self.fixed_s + self.token_s * x.numel()
        return _Sleep.apply(x * self.weight, seconds, self.factor * seconds)


class Delicate(nn.Module):
    """Tied weights, masks, integers, dropout, BatchNorm, an LSTM, frozen, in place, skips."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 6)
        self.blocks = nn.ModuleList(
            [
                Masked(nn.Linear(6, 6)),
                nn.LSTM(6, 6, batch_first=True),
                Masked(nn.BatchNorm1d(6)),
                nn.Sequential(nn.Linear(6, 6), nn.ReLU(inplace=True), nn.Dropout(0.5)),
            ]
        )
        for parameter in self.blocks[0].parameters():
            parameter.requires_grad_(False)
        self.head = nn.Linear(6, 11)
        self.head.weight = self.embedding.weight
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, tokens: Tensor, mask: Tensor, scale: float) -> Tensor:
        self.calls += 1
        early = self.embedding(tokens) + 0.1 * torch.randn(())
        x = self.blocks[0](early, mask=mask)
        x *= scale
        x, _ = self.blocks[1](x)
        x = self.blocks[2](x, mask=mask)
        x = self.blocks[3](x + early)
        return self.head(x)


class Masked(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor, *, mask: Tensor) -> Tensor:
        return self.inner((x * mask[..., None]).flatten(0, 1)).unflatten(0, x.shape[:2])


def delicate_batch(rows: int, length: int) -> tuple[Tensor, Tensor, float]:
    tokens = torch.arange(rows * length).view(rows, length) % 11
    return tokens, tokens != 3, 0.5


def loss_of(network: nn.Module, micro_batch: Any) -> Tensor:
    return network(*micro_batch).float().logsumexp(-1).mean()
