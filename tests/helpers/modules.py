"""Small LightningModules in the styles that users write, and the data for them."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset, TensorDataset

WIDTH, VOCABULARY, LENGTH = 6, 11, 5


def vectors(num: int = 37) -> TensorDataset:
    draw = torch.Generator().manual_seed(1)
    x = torch.randn(num, WIDTH, generator=draw, dtype=torch.float64)
    return TensorDataset(x, x.roll(1, 1).tanh() + 0.1)


def tokens(num: int = 37) -> TensorDataset:
    draw = torch.Generator().manual_seed(2)
    return TensorDataset(torch.randint(VOCABULARY, (num, LENGTH + 1), generator=draw))


def loader(data: Callable[[], Dataset], batch_size: int = 8, **kwargs: Any) -> DataLoader:
    return DataLoader(data(), batch_size=batch_size, **kwargs)


def loaders(data: Callable[[], Dataset], **kwargs: Any) -> Callable[[], DataLoader]:
    return partial(loader, data, **kwargs)


class Base(LightningModule):
    """AdamW with weight decay, a scheduler that moves each step, and two ways to log, or all."""

    rate = 0.05
    logs_all = False  # Lightning takes a third of a fit's time for what :func:`logging_all` adds.

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.rate, weight_decay=0.1)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: 1 / (1 + 0.1 * s))
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "interval": "step"},
        }

    def log_all(self, prefix: str, per_sample: Tensor, training: bool = True) -> None:
        n = len(per_sample)
        mean, both = per_sample.mean(), {"on_step": training, "on_epoch": True}
        worst, best, total = per_sample.max(), per_sample.min(), per_sample.sum()
        self.log(f"{prefix}/loss", mean, prog_bar=True, **both)
        self.log(f"{prefix}/total", total, reduce_fx="sum", sync_dist=True, **both)
        if not self.logs_all:
            return
        self.log(f"{prefix}/synced", mean, sync_dist=True, batch_size=n, **both)
        self.log_dict({f"{prefix}/a": mean * 2, f"{prefix}/b": mean + 1}, **both)
        self.log(f"{prefix}/worst", worst, reduce_fx="max", on_step=False, on_epoch=True)
        self.log(f"{prefix}/best", best, reduce_fx=torch.min, sync_dist=True, **both)
        self.log(f"{prefix}/count", n, reduce_fx="sum", on_step=False, on_epoch=True)
        self.log(f"{prefix}/plain", mean)

    def per_sample(self, batch: Any) -> Tensor:
        raise NotImplementedError

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        per_sample = self.per_sample(batch)
        self.log_all("train", per_sample)
        return per_sample.mean()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log_all("val", self.per_sample(batch), training=False)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log_all("test", self.per_sample(batch), training=False)


def logging_all(module: Base) -> Base:
    """Let ``module`` log in every way there is."""
    module.logs_all = True
    return module


class Regression(Base):
    """Any network from vectors to vectors."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.net = network

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def per_sample(self, batch: Any) -> Tensor:
        x, y = batch
        return (self.net(x) - y).pow(2).mean(1)

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.net(batch[0])


def stack() -> nn.Sequential:
    linear = partial(nn.Linear, WIDTH, WIDTH)
    return nn.Sequential(
        linear(), nn.Tanh(), linear(), nn.GELU(), nn.LayerNorm(WIDTH), linear(), nn.Tanh(), linear()
    )


class Block(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.mix = nn.Linear(WIDTH, 3 * WIDTH, bias=False)  # a key's bias has no gradient
        self.out = nn.Linear(WIDTH, WIDTH)
        self.dropout = dropout

    def forward(self, x: Tensor, mask: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
        q, k, v = self.mix(self.norm(x)).unsqueeze(1).chunk(3, dim=-1)
        if bias is not None:
            q, k = q + bias, k + bias
        attended = functional.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None
        )
        mixed = functional.dropout(self.out(attended.squeeze(1)), self.dropout, self.training)
        return x + mixed


class Transformer(nn.Module):
    """Embeddings, a list of blocks and a head, in ordinary code."""

    def __init__(self, num_blocks: int = 4, dropout: float = 0.0, tied: str = "") -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.position = nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block(dropout) for _ in range(num_blocks))
        self.norm = nn.LayerNorm(WIDTH)
        self.tied = tied
        if tied != "functional":
            self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        if tied == "module":
            self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids) + self.position(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        x = self.norm(x)
        if self.tied == "functional":
            return functional.linear(x, self.embed.weight)
        return self.head(x)


class HookedTransformer(Transformer):
    """Names its layers itself; its forward calls them."""

    def __init__(self) -> None:
        super().__init__()
        self.start = Start(self.embed, self.position)
        self.end = nn.Sequential(self.norm, self.head)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.start(ids)
        for block in self.blocks:
            x = block(x)
        return self.end(x)

    def configure_pipeline(self) -> list[nn.Module]:
        return [self.start, *self.blocks, self.end]


class Start(nn.Module):
    def __init__(self, embed: nn.Module, position: nn.Module) -> None:
        super().__init__()
        self.embed = embed
        self.position = position

    def forward(self, ids: Tensor) -> Tensor:
        return self.embed(ids) + self.position(torch.arange(ids.shape[1]))


class ChainedTransformer(Transformer):
    """Names fresh wrappers and functions, which are called in turn in place of its forward."""

    def configure_pipeline(self) -> list[Any]:
        return [
            Start(self.embed, self.position),
            *self.blocks,
            lambda x: self.norm(x),
            self.head,
        ]


class Language(Base):
    """Next-token loss of any network from ids to logits."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.model = network

    def per_sample(self, batch: Any) -> Tensor:
        (ids,) = batch
        logits = self.model(ids[:, :-1])
        return functional.cross_entropy(logits.transpose(1, 2), ids[:, 1:], reduction="none").mean(
            1
        )

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.model(batch[0][:, :-1])
