"""A small causal language model over bytes, written as for one device.

Shapes: ``B`` samples, ``T`` tokens a sample (padded), ``C`` channels, ``V`` tokens in all.
"""

import math
from functools import partial
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.types import OptimizerLRSchedulerConfig
from torch import Tensor, nn
from torch.nn import functional
from typing_extensions import override

__all__ = ["GPT", "Block", "GPTModule", "per_sample_loss", "warm_up_cosine"]


class Block(nn.Module):
    """A pre-norm transformer block: causal self-attention, then a feed-forward layer.

    Args:
        dim: Channels ``C``, a multiple of ``num_heads``.
        num_heads: Attention heads.
        dropout: Share of the channels dropped after each of the two halves.
    """

    def __init__(self, dim: int, num_heads: int, dropout: float) -> None:
        super().__init__()
        if dim % num_heads:
            message = f"dim must be a multiple of num_heads, got {dim=} and {num_heads=}"
            raise ValueError(message)
        self.num_heads = num_heads
        self.attention_norm = nn.LayerNorm(dim)
        self.qkv = nn.Linear(dim, 3 * dim)
        self.projection = nn.Linear(dim, dim)
        self.feed_forward_norm = nn.LayerNorm(dim)
        self.feed_forward = nn.Sequential(
            nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim)
        )
        self.dropout = nn.Dropout(dropout)

    @override
    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        """Return ``[B, T, C]`` from ``x`` of ``[B, T, C]`` and a boolean ``mask`` of ``[B, T]``.

        ``mask`` is true at real tokens. A position sees itself and the real tokens before it, so a
        row is never empty (softmax over nothing is NaN) wherever the padding lies.
        """
        x = x + self.dropout(self._attend(self.attention_norm(x), mask))
        y: Tensor = x + self.dropout(self.feed_forward(self.feed_forward_norm(x)))
        return y

    def _attend(self, x: Tensor, mask: Tensor) -> Tensor:
        length = x.shape[1]
        square = torch.ones(length, length, dtype=torch.bool, device=x.device)
        itself = torch.eye(length, dtype=torch.bool, device=x.device)
        visible = (square.tril() & mask[:, None, None, :]) | itself  # [B, 1, T, T]
        heads = self.qkv(x).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        query, key, value = heads.unbind(0)  # each [B, heads, T, C / heads]
        mixed = functional.scaled_dot_product_attention(query, key, value, attn_mask=visible)
        y: Tensor = self.projection(mixed.transpose(1, 2).flatten(2))
        return y


class GPT(nn.Module):
    """Token and position embedding, blocks, a final norm, and a head tied to the embedding.

    Args:
        vocab_size: Tokens ``V``, padding included.
        dim: Channels ``C``.
        num_heads: Attention heads of a block.
        num_layers: Blocks.
        max_len: Longest sample, in tokens.
        dropout: Dropout of the blocks.
    """

    def __init__(
        self,
        vocab_size: int = 257,
        dim: int = 128,
        num_heads: int = 4,
        num_layers: int = 8,
        max_len: int = 256,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, dim)
        self.position = nn.Embedding(max_len, dim)
        self.blocks = nn.ModuleList(Block(dim, num_heads, dropout) for _ in range(num_layers))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, vocab_size, bias=False)
        self.apply(_initialise)
        self.head.weight = self.embedding.weight

    @override
    def forward(self, tokens: Tensor, mask: Tensor) -> Tensor:
        """Return logits ``[B, T, V]`` for ``tokens`` of ``[B, T]``; ``mask`` as for a block."""
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.embedding(tokens) + self.position(positions)
        for block in self.blocks:
            x = block(x, mask)
        logits: Tensor = self.head(self.norm(x))
        return logits


def _initialise(module: nn.Module) -> None:
    """Draw weights small enough for a tied head: the first loss is then about ``log(V)``."""
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)


def per_sample_loss(logits: Tensor, targets: Tensor, mask: Tensor) -> Tensor:
    """Return each sample's mean cross-entropy over its real tokens, in nats.

    Args:
        logits: ``[B, T, V]``.
        targets: Next tokens, ``[B, T]``.
        mask: True where ``targets`` is real, ``[B, T]``; at least once a sample.

    Returns:
        ``[B]``.
    """
    token_loss = functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
    token_loss = token_loss.view_as(targets).masked_fill(~mask, 0.0)
    return token_loss.sum(1) / mask.sum(1)


def warm_up_cosine(step: int, *, warm_up_steps: int, total_steps: float) -> float:
    """Return the learning rate's factor: a linear rise, then half a cosine down to a tenth.

    Args:
        step: Optimiser steps done.
        warm_up_steps: Length of the rise.
        total_steps: Where the cosine ends; infinite means no fall.

    Example:
        >>> [warm_up_cosine(s, warm_up_steps=2, total_steps=4) for s in (0, 1, 2, 4)]
        [0.5, 1.0, 1.0, 0.1]
    """
    if step < warm_up_steps:
        return (step + 1) / warm_up_steps
    if math.isinf(total_steps):
        return 1.0
    done = min(1.0, (step - warm_up_steps) / max(1.0, total_steps - warm_up_steps))
    return 0.1 + 0.45 * (1.0 + math.cos(math.pi * done))


class GPTModule(LightningModule):
    """Train a :class:`GPT` with AdamW, a warm-up and a cosine.

    The loss is the mean over samples of a loss that each sample has for itself. Splitting a batch
    of ``N`` samples into micro-batches of ``n_i`` and weighting their losses by ``n_i / N`` is then
    exact, whatever the lengths; a mean over all tokens of the batch would need other weights.

    A batch is a mapping with ``tokens``, ``targets`` and ``mask``, each ``[B, T]``.

    Args:
        vocab_size: Tokens in the vocabulary, padding included.
        dim: Channels.
        num_heads: Attention heads of a block.
        num_layers: Blocks.
        max_len: Longest sample, in tokens.
        dropout: Dropout of the blocks.
        lr: Highest learning rate.
        weight_decay: AdamW's decay of the matrices; vectors and embeddings are not decayed.
        warm_up_steps: Optimiser steps until ``lr`` is reached.
    """

    def __init__(  # noqa: PLR0913 -- one argument a hyper-parameter, so `model.dim=` works
        self,
        vocab_size: int = 257,
        dim: int = 128,
        num_heads: int = 4,
        num_layers: int = 8,
        max_len: int = 256,
        dropout: float = 0.0,
        lr: float = 3e-3,
        weight_decay: float = 0.1,
        warm_up_steps: int = 20,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.lr = lr
        self.weight_decay = weight_decay
        self.warm_up_steps = warm_up_steps
        self.model = GPT(vocab_size, dim, num_heads, num_layers, max_len, dropout)

    @override
    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        """Return the batch's loss, and log it as ``train/loss``."""
        loss = self._loss(batch)
        self.log("train/loss", loss, prog_bar=True, batch_size=len(batch["tokens"]))
        return loss

    @override
    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        """Return the batch's loss, and log it as ``val/loss``."""
        loss = self._loss(batch)
        size = len(batch["tokens"])
        self.log("val/loss", loss, prog_bar=True, batch_size=size, sync_dist=True)
        return loss

    def flops_per_batch(self, batch: dict[str, Tensor]) -> int:
        """Return the FLOPs of a step: 6 a parameter and token, and attention's; for `JobReport`.

        Positions are looked up, so they cost none; padding is computed too, so it counts.
        """
        samples, length = batch["tokens"].shape
        layers, dim = self.hparams["num_layers"], self.hparams["dim"]
        looked_up = self.hparams["max_len"] * dim
        parameters = sum(p.numel() for p in self.parameters()) - looked_up
        return int(samples * length * (6 * parameters + 12 * layers * dim * length))

    def _loss(self, batch: dict[str, Tensor]) -> Tensor:
        logits = self.model(batch["tokens"], batch["mask"])
        return per_sample_loss(logits, batch["targets"], batch["mask"]).mean()

    @override
    def configure_optimizers(self) -> OptimizerLRSchedulerConfig:
        """Return AdamW with two groups (decayed matrices; the rest) and a schedule by step."""
        decayed: list[Any] = []
        others: list[Any] = []
        for name, parameter in self.model.named_parameters():
            matrix = parameter.ndim >= 2 and not name.startswith(("embedding", "position"))
            (decayed if matrix else others).append(parameter)
        optimizer = torch.optim.AdamW(
            [
                {"params": decayed, "weight_decay": self.weight_decay},
                {"params": others, "weight_decay": 0.0},
            ],
            lr=self.lr,
            betas=(0.9, 0.95),
        )
        factor = partial(
            warm_up_cosine,
            warm_up_steps=self.warm_up_steps,
            total_steps=self.trainer.estimated_stepping_batches,
        )
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": schedule, "interval": "step"},
        }
