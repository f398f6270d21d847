"""Networks in the styles that users bring along."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from tests.helpers.modules import (
    VOCABULARY,
    WIDTH,
    Base,
    Block,
    Language,
    Regression,
    Start,
    Transformer,
    stack,
)


class MiddleFunctions(Transformer):
    """Functions with parameters of their own stand between the blocks."""

    def configure_pipeline(self) -> list[Any]:
        first, second, *rest = self.blocks
        start = Start(self.embed, self.position)
        return [start, first, lambda x: self.norm(x), second, *rest, self.norm_then_head]

    def norm_then_head(self, x: Tensor) -> Tensor:
        return self.head(x)

    def forward(self, ids: Tensor) -> Tensor:
        for layer in self.configure_pipeline():
            ids = layer(ids)
        return ids


class Repeated(nn.Module):
    """One block is called between the others each time."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(5))

    def forward(self, x: Tensor) -> Tensor:
        shared, *others = self.layers
        for layer in others:
            x = shared(layer(x).tanh()).sin()
        return x


class Crossed(nn.Module):
    """The last layer has the first one's matrix, two have one bias."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(5))
        self.layers[4].weight = self.layers[0].weight
        self.layers[3].bias = self.layers[1].bias

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        return x


class Recomputing(nn.Module):
    """Activation checkpointing around each block, dropout inside."""

    def __init__(self, dropout: float = 0.0, *, reentrant: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block(dropout) for _ in range(4))
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self.reentrant = reentrant

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant) if self.training else block(x)
        return self.head(x)


class RecomputingInside(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = Block()

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.block, x, use_reentrant=False)


class Encoder(nn.Module):
    """torch's own encoder, with a padding mask."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        layer = nn.TransformerEncoderLayer(
            WIDTH, 2, 12, dropout=0.0, batch_first=True, norm_first=True
        )
        self.encoder = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.encoder(self.embed(ids), src_key_padding_mask=ids == 0)
        return self.head(hidden)


class Recurrent(nn.Module):
    """Recurrent layers return a tuple, whose second part is thrown away."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(nn.LSTM(WIDTH, WIDTH, batch_first=True) for _ in range(4))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            found, _ = layer(x)
            x = x + found
        return self.head(x)


class Rotary(nn.Module):
    """Buffers that the code between layers and the layers use; a constant that is not saved."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.register_buffer("angles", torch.randn(5, WIDTH), persistent=False)
        self.register_buffer("shift", torch.randn(WIDTH))
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        angles = self.angles[: ids.shape[1]].to(x.dtype)
        for block in self.blocks:
            x = block(x * angles.cos() + self.shift, bias=angles.sin()[None, None])
        return self.head(x)


class Itself(Base):
    """The LightningModule is the network; its step calls ``self``."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.d = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        return self.d(self.c(self.b(self.a(x).tanh()).tanh()).tanh())

    def per_sample(self, batch: Any) -> Tensor:
        x, y = batch
        return (self(x) - y).pow(2).mean(1)


class Late(Base):
    """Builds its network in configure_model."""

    def __init__(self) -> None:
        super().__init__()
        self.net: nn.Module | None = None

    def configure_model(self) -> None:
        if self.net is None:
            self.net = stack()

    def per_sample(self, batch: Any) -> Tensor:
        assert self.net is not None
        return (self.net(batch[0]) - batch[1]).pow(2).mean(1)


class Before(Regression):
    """A parameter is used before the network, and once more after it."""

    def __init__(self) -> None:
        super().__init__(stack())
        self.gain = nn.Parameter(torch.full((WIDTH,), 1.1))

    def per_sample(self, batch: Any) -> Tensor:
        x, y = batch
        return (self.net(x * self.gain) * self.gain - y).pow(2).mean(1)


class Regularised(Language):
    """The loss has a penalty on every weight."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss: Tensor = super().training_step(batch, batch_idx)
        return loss + 0.01 * sum(p.pow(2).sum() for p in self.parameters())


class Momentum(Language):
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9, nesterov=True)


class Auxiliary(nn.Module):
    """Each block adds to a penalty that is returned beside the logits."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Penalised() for _ in range(4))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        x = self.embed(ids)
        penalties = []
        for block in self.blocks:
            x, penalty = block(x)
            penalties.append(penalty)
        return self.head(x), torch.stack(penalties).sum(0)


class Penalised(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.linear(x).tanh()
        return x, x.pow(2).mean((1, 2))


class WithAuxiliary(Language):
    def per_sample(self, batch: Any) -> Tensor:
        (ids,) = batch
        logits, penalty = self.model(ids[:, :-1])
        found = functional.cross_entropy(logits.transpose(1, 2), ids[:, 1:], reduction="none")
        return found.mean(1) + 0.1 * penalty


class ManySets(Language):
    """Validates on two sets."""

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        per_sample = self.per_sample(batch)
        self.log("val/loss", per_sample.mean())
        self.log(f"val/own{dataloader_idx}", per_sample.mean() * 2, add_dataloader_idx=False)
