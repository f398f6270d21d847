"""Networks whose parts meet in unusual ways, and batches of unusual shapes."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import Dataset

from tests.helpers.modules import VOCABULARY, WIDTH, Base, Block, Language, Regression


class MaskedTransformer(nn.Module):
    """Every block gets the padding mask and the positions; lengths differ from batch to batch."""

    def __init__(self, num_blocks: int = 4) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(num_blocks))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        x = self.embed(ids)
        length = ids.shape[1]
        seen = mask[:, None, None, :] & torch.ones(length, length, dtype=torch.bool).tril()
        positions = torch.arange(length).to(x) / 10
        bias = positions[None, None, :, None].expand(len(ids), 1, length, WIDTH)
        for layer in self.layers:
            x = layer(x, mask=seen, bias=bias)
        return self.head(x * mask.unsqueeze(-1))


class Ragged(Dataset[Any]):
    """Sentences of any length; a batch is padded to its longest."""

    def __init__(self, num: int = 37) -> None:
        draw = torch.Generator().manual_seed(3)
        lengths = torch.randint(2, 9, (num,), generator=draw).tolist()
        self.rows = [torch.randint(1, VOCABULARY, (n,), generator=draw) for n in lengths]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Tensor:
        return self.rows[index]


def pad(rows: Sequence[Tensor]) -> dict[str, Any]:
    ids = nn.utils.rnn.pad_sequence(list(rows), batch_first=True)
    return {"ids": ids, "mask": ids > 0, "names": [f"row {len(r)}" for r in rows], "extra": None}


class Padded(Base):
    """A loss that each sample has for itself, whatever the padding."""

    def __init__(self) -> None:
        super().__init__()
        self.model = MaskedTransformer()

    def per_sample(self, batch: Any) -> Tensor:
        assert batch["extra"] is None
        assert len(batch["names"]) == len(batch["ids"])
        logits = self.model(batch["ids"], mask=batch["mask"])
        found = functional.cross_entropy(logits.transpose(1, 2), batch["ids"], reduction="none")
        return (found * batch["mask"]).sum(1) / batch["mask"].sum(1)


class UNet(nn.Module):
    """Late layers take the outputs of early ones."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.middle = nn.ModuleList([nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)])
        self.up = nn.ModuleList(nn.Linear(2 * WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        saved = []
        for layer in self.down:
            x = layer(x).tanh()
            saved.append(x)
        for layer in self.middle:
            x = layer(x)
        for layer in self.up:
            x = layer(torch.cat([x, saved.pop()], dim=-1))
        return x


class Mix(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, x0: Tensor) -> Tensor:
        return self.linear(x).tanh() + 0.5 * x0


class Residual(nn.Module):
    """Each block gets the embedded input again."""

    def __init__(self) -> None:
        super().__init__()
        self.start = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Mix() for _ in range(5))
        self.scale = nn.Parameter(torch.full((5,), 0.9))

    def forward(self, x: Tensor) -> Tensor:
        x = x0 = functional.rms_norm(self.start(x), (WIDTH,))
        for i, block in enumerate(self.blocks):
            x = block(x, x0) * self.scale[i]
        return x


def named(state: tuple[Tensor, ...]) -> dict[str, Tensor]:
    return dict(zip(("x", "total", "count"), state, strict=True))


class PairBlock(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.kind = kind

    def forward(self, state: Any) -> Any:
        x, total, count = state.values() if self.kind == "dict" else state
        x = self.linear(x).sin()
        found = (x, total + x.pow(2).sum(1), count + 1)
        return named(found) if self.kind == "dict" else found


class Structured(nn.Module):
    """Blocks that take and return tuples or dicts; a count without a gradient among them."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(PairBlock(kind) for _ in range(5))
        self.kind = kind

    def forward(self, x: Tensor) -> Tensor:
        state: Any = (x, x.new_zeros(len(x)), torch.zeros(len(x), dtype=torch.int64))
        if self.kind == "dict":
            state = named(state)
        for block in self.blocks:
            state = block(state)
        x, total, count = state.values() if self.kind == "dict" else state
        return x + (total / count)[:, None]


class Noisy(Regression):
    """Draws noise before the network, and after it."""

    def per_sample(self, batch: Any) -> Tensor:
        x, y = batch
        scale = torch.rand(len(x), 1)
        found = self.net(x + torch.randn_like(x) * scale)
        return (found - y + 0.01 * torch.randn_like(y)).pow(2).mean(1)


class NoisyBetween(nn.Module):
    """Draws between its layers, for use further on; drops out within and between them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(5))

    def forward(self, x: Tensor) -> Tensor:
        noise = []
        for layer in self.layers:
            x = layer(x).tanh()
            noise.append(torch.rand(len(x), 1))
            x = functional.dropout(x, 0.2, self.training)
            x = x * noise[len(noise) // 2]
        return x * noise[1] * noise[3]


class Temperature(Language):
    """A parameter of the module itself takes part in the loss."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__(network)
        self.temperature = nn.Parameter(torch.tensor(1.3))
        self.shift = nn.Parameter(torch.zeros(VOCABULARY))

    def per_sample(self, batch: Any) -> Tensor:
        (ids,) = batch
        logits = self.model(ids[:, :-1]) / self.temperature + self.shift
        return functional.cross_entropy(logits.transpose(1, 2), ids[:, 1:], reduction="none").mean(
            1
        )


@dataclasses.dataclass
class Inner:
    y: Tensor
    names: list[str]
    nothing: None = None


@dataclasses.dataclass
class Outer:
    x: Tensor
    inner: Inner
    scale: float = 1.0


class Nested(Regression):
    def per_sample(self, batch: Any) -> Tensor:
        assert len(batch.inner.names) == len(batch.x)
        assert batch.inner.nothing is None
        return (self.net(batch.x) * batch.scale - batch.inner.y).pow(2).mean(1)


def nest(rows: Sequence[tuple[Tensor, Tensor]]) -> Outer:
    x, y = (torch.stack(column) for column in zip(*rows, strict=True))
    return Outer(x, Inner(y, [str(i) for i in range(len(x))]), scale=0.5)


class Frozen(Language):
    """The early part needs no gradients: stages with nothing to train, and none to send back."""

    def __init__(self, network: nn.Module, num_frozen: int) -> None:
        super().__init__(network)
        for part in (network.embed, network.position, *network.blocks[:num_frozen]):
            part.requires_grad_(False)

    def configure_optimizers(self) -> Any:
        trained = [p for p in self.parameters() if p.requires_grad]
        return torch.optim.AdamW(trained, lr=self.rate, weight_decay=0.1)


class Grouped(Language):
    """Weight decay for matrices only, and a rate of its own for the embeddings."""

    def configure_optimizers(self) -> Any:
        named = list(self.named_parameters())
        return torch.optim.AdamW(
            [
                {"params": [p for n, p in named if "embed" in n], "lr": 0.01},
                {"params": [p for n, p in named if "embed" not in n and p.dim() > 1]},
                {"params": [p for _, p in named if p.dim() <= 1], "weight_decay": 0.0},
            ],
            lr=self.rate,
            weight_decay=0.1,
        )


class Partial(nn.Module):
    """A layer that every other batch leaves without a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.unused = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        return x
