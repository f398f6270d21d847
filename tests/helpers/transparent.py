"""Modules whose steps do what only whole steps can: manual optimisation, several calls."""

import copy
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader
from torchmetrics import MeanSquaredError

from tests.helpers.modules import WIDTH, vectors


class Block(nn.Module):
    def __init__(self, *, recompute: bool = False) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.recompute = recompute

    def inner(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(x))

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.inner, x, use_reentrant=False) if self.recompute else self.inner(x)


def stack(num: int = 4, *, recompute: bool = False) -> nn.Sequential:
    return nn.Sequential(*(Block(recompute=recompute) for _ in range(num)))


def two_loaders(batch_size: int = 8, num: int = 30) -> tuple[DataLoader, DataLoader]:
    return DataLoader(vectors(num), batch_size=batch_size), DataLoader(vectors(11), batch_size=8)


def noise_like(x: Tensor, batch_idx: int) -> Tensor:
    """Draws that do not depend on the global generator, whose streams a pipeline keys anew."""
    generator = torch.Generator().manual_seed(batch_idx)
    return torch.randn(x.shape, generator=generator, dtype=x.dtype)


class Manual(LightningModule):
    """One network, one optimizer, stepped by hand after every second batch, with a scheduler."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.net = stack(5)
        self.head = nn.Linear(WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.tensor(1.3))

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        return functional.mse_loss(self.head(self.net(x * self.scale)), y)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        loss = self.loss(batch)
        self.log("loss", loss, prog_bar=True, on_step=True, on_epoch=True)
        self.manual_backward(loss / 2)
        if batch_idx % 2:
            self.clip_gradients(optimizer, 0.3, "norm")
            optimizer.step()
            optimizer.zero_grad()
            self.lr_schedulers().step()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", self.loss(batch))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.02, weight_decay=0.1)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.95)]


class Gan(LightningModule):
    """Two networks, two optimizers, toggled; the discriminator sees real and fake by itself."""

    def __init__(self, num_discriminator: int = 4, rows: int | None = None) -> None:
        super().__init__()
        self.rows = rows
        self.automatic_optimization = False
        self.generator = stack(4)
        self.discriminator = nn.Sequential(
            *(Block() for _ in range(num_discriminator - 1)), nn.Linear(WIDTH, 1)
        )

    def forward(self, z: Tensor) -> Tensor:
        return self.generator(z)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        real, _ = batch
        optimizer_g, optimizer_d = self.optimizers()
        z = noise_like(real[: self.rows], batch_idx)

        self.toggle_optimizer(optimizer_g)
        loss = functional.softplus(-self.discriminator(self(z))).mean()
        self.log("g", loss, prog_bar=True)
        optimizer_g.zero_grad()
        self.manual_backward(loss)
        optimizer_g.step()
        self.untoggle_optimizer(optimizer_g)

        self.toggle_optimizer(optimizer_d)
        true = functional.softplus(-self.discriminator(real)).mean()
        false = functional.softplus(self.discriminator(self(z).detach())).mean()
        optimizer_d.zero_grad()
        self.manual_backward(true)
        self.manual_backward(false)
        optimizer_d.step()
        self.untoggle_optimizer(optimizer_d)
        self.log_dict({"true": true, "false": false}, on_step=True, on_epoch=True)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        with torch.no_grad():
            self.log("val", self.discriminator(self(batch[0])).mean())

    def on_validation_epoch_end(self) -> None:
        """Shows samples, as every GAN does: outside of any step."""
        with torch.no_grad():
            self.log("sample", self(torch.ones(5, WIDTH, dtype=torch.float64)).mean())

    def configure_optimizers(self) -> Any:
        return [
            torch.optim.Adam(self.generator.parameters(), lr=0.01, betas=(0.5, 0.99)),
            torch.optim.Adam(self.discriminator.parameters(), lr=0.02, betas=(0.5, 0.99)),
        ], []


class CarelessGan(Gan):
    """Toggles nothing, detaches nothing: walks one graph twice."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        real, _ = batch
        optimizer_g, optimizer_d = self.optimizers()
        fake = self(noise_like(real, batch_idx))
        score = self.discriminator(fake)
        false = (
            functional.softplus(score).mean()
            + functional.softplus(-self.discriminator(real)).mean()
        )
        loss = functional.softplus(-score).mean()
        optimizer_g.zero_grad()
        self.manual_backward(loss, retain_graph=True)
        generator = [
            None if p.grad is None else p.grad.clone() for p in self.generator.parameters()
        ]
        optimizer_d.zero_grad()
        self.manual_backward(false)
        optimizer_d.step()
        for parameter, gradient in zip(self.generator.parameters(), generator, strict=True):
            parameter.grad = gradient
        optimizer_g.step()
        self.log_dict({"g": loss, "d": false})


class Siamese(LightningModule):
    """Two views through one network, under automatic optimisation."""

    def __init__(self, *, recompute: bool = False) -> None:
        super().__init__()
        self.net = stack(4, recompute=recompute)
        self.project = nn.Linear(WIDTH, 3)
        self.error = MeanSquaredError()
        self.error.distributed_available_fn = lambda: False  # so that one rank can fit alone

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        a = functional.normalize(self.project(self.net(x)), dim=-1)
        b = functional.normalize(self.project(self.net(y[: len(x)])), dim=-1)
        loss = functional.cross_entropy(a @ b.T / 0.2, torch.arange(len(a)))
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        a = self.net(x)  # once: a sanity check shows nothing of the two calls in training
        self.log("val", (a - y).pow(2).mean())
        self.error(a, y)
        self.log("error", self.error)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.02)


class LateTwice(Siamese):
    """Calls its network once in training, and twice in the validation that follows."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = functional.mse_loss(self.net(batch[0]), batch[1])
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", (self.net(batch[0]) - self.net(batch[1])).pow(2).mean())


class MeanTeacher(LightningModule):
    """A target network under ``no_grad``, which follows the other after each batch."""

    def __init__(self) -> None:
        super().__init__()
        self.student = stack(5)
        self.teacher = copy.deepcopy(self.student).requires_grad_(False)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        out = self.student(x)
        with torch.no_grad():
            target = self.teacher(x + 0.1 * noise_like(x, batch_idx))
            start = self.student(x[:3])  # other shapes, and no graph
        loss = functional.mse_loss(out, y) + functional.mse_loss(out, target)
        loss = loss + 0.1 * functional.mse_loss(self.student(start), y[:3])
        self.log("loss", loss)
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        pairs = zip(self.student.parameters(), self.teacher.parameters(), strict=True)
        for mine, target in pairs:
            target.data.mul_(0.9).add_(mine.data, alpha=0.1)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.student.parameters(), lr=0.05, momentum=0.9)


class ConditionalStack(nn.Module):
    """Gives the condition to each block; its first and last share a weight; returns a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(5))
        self.blocks[4].linear.weight = self.blocks[0].linear.weight

    def forward(self, x: Tensor, condition: Tensor, *, scale: Tensor) -> dict[str, Tensor]:
        first = x
        for block in self.blocks:
            x = block(x + condition) * scale
        return {"out": x, "skip": first + x, "sign": x > 0}


class Conditional(LightningModule):
    """Arguments that need gradients on each stage, hooks, and gradients that are only looked at."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(3, WIDTH)
        self.scale = nn.Parameter(torch.tensor(0.9))
        self.net = ConditionalStack()
        for parameter in self.net.parameters():
            parameter.register_hook(lambda gradient: 0.5 * gradient)

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        condition = self.embed(torch.arange(len(x)) % 3)
        out = self.net(x, condition, scale=self.scale)
        loss = functional.mse_loss(out["out"], y) + 0.1 * out["skip"].pow(2).mean()
        return loss * out["sign"].double().mean()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        near = x.clone().requires_grad_()
        (slope,) = torch.autograd.grad(self.loss(near, y), near)  # leaves .grad alone
        loss = self.loss(x, y) + self.loss(x + 0.1 * slope.sign(), y)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.02)


class Parts(LightningModule):
    """Calls parts of a child, whose own forward is never called, and members of a container."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.coder = nn.Module()
        self.coder.encoder, self.coder.decoder = stack(3), stack(2)
        self.tables = nn.ModuleDict({"start": stack(3), "end": nn.Linear(WIDTH, WIDTH)})

    def training_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        optimizer = self.optimizers()
        optimizer.zero_grad()
        x = self.tables["end"](self.tables["start"](x))
        loss = functional.mse_loss(self.coder.decoder(self.coder.encoder(x)), y)
        self.manual_backward(loss)
        optimizer.step()
        self.log("loss", loss)

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=0.01)


class Penalty(Siamese):
    """Differentiates a gradient."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = batch[0].clone().requires_grad_()
        out = self.net(x)
        (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        return (slope.norm(dim=-1) - 1).pow(2).mean() + out.mean()


class Recomputed(Siamese):
    """Checkpoints the network's call itself."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        return (checkpoint(self.net, x, use_reentrant=False) - self.net(y)).pow(2).mean()
