"""Modules whose batches have samples of many lengths, costs to plan them with, and random plans."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader

from pipeswift_lightning.plan.candidates import Candidate
from pipeswift_lightning.plan.cost_model import CostModel, LayerModel, TimeModel
from pipeswift_lightning.plan.formation import Formation
from pipeswift_lightning.plan.search import Choice, choose_plan
from pipeswift_lightning.plan.workload import Workload
from pipeswift_lightning.runtime.packed import PackedBatch, pack_samples
from tests.helpers.modules import VOCABULARY, WIDTH, Base, Block
from tests.helpers.networks import MaskedTransformer, Padded, Ragged, pad

LAYERS = 4
WIDEST = 9  # than any row of `Ragged`, by one token


def costs(layers: int = LAYERS, *, error: float = 0.0) -> CostModel:
    """Costs with which another order always pays."""
    times = TimeModel(fixed_s=1e-4, token_s=1e-3, square_s=1e-5)
    layer = LayerModel(
        forward=times,
        backward=times.plus(times),
        static_bytes=1000,
        output_bytes_per_token=8,
        activation_bytes_per_token=64,
    )
    first = replace(layer, forward=times.plus(times))
    return CostModel(layers=(first, *[layer] * (layers - 1)), relative_error=error)


def loader(collate: Any = pad, num: int = 37, batch_size: int = 8) -> DataLoader:
    return DataLoader(Ragged(num), batch_size=batch_size, collate_fn=collate)


class Sessions(Padded):
    """Two samples in a row are of one session; the lengths are told."""

    length_dims = {"ids": 1, "mask": [1]}  # noqa: RUF012 -- as a user writes it

    def sample_lengths(self, batch: Any) -> list[int]:
        return batch["mask"].sum(1).tolist()

    def sample_sessions(self, batch: Any) -> Tensor:
        return torch.arange(len(batch["ids"])) // 2


class PaddingCounts(Padded):
    """A mean over all positions, padding too."""

    def per_sample(self, batch: Any) -> Tensor:
        logits = self.model(batch["ids"], mask=batch["mask"])
        found = functional.cross_entropy(logits.transpose(1, 2), batch["ids"], reduction="none")
        return found.mean(1)


class FixedWidth(Padded):
    """Its network takes rows of one width only, which the loader's batches all have."""

    def __init__(self) -> None:
        super().__init__()
        self.model = _Positioned()


class _Positioned(MaskedTransformer):
    def __init__(self) -> None:
        super().__init__()
        self.places = nn.Parameter(torch.linspace(-1, 1, WIDEST)[None, :, None])

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        return super().forward(ids, mask) * self.places


def pad_to_widest(rows: Sequence[Tensor]) -> dict[str, Any]:
    """Collate rows into batches of one width."""
    longer = functional.pad(rows[0], (0, WIDEST - len(rows[0])))
    batch = pad([longer, *rows[1:]])
    return {**batch, "names": [f"row {len(row)}" for row in rows]}


class Returning(Padded):
    """Returns what it has found of each sample."""

    def __init__(self) -> None:
        super().__init__()
        self.returned: list[Tensor] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        per_sample = self.per_sample(batch)
        return {"loss": per_sample.mean(), "each": per_sample.detach(), "ids": batch["ids"]}

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.returned += [outputs["each"], outputs["ids"].double()]
        total = sum(
            float((x * torch.arange(1, 1 + len(x)).view(-1, *[1] * (x.dim() - 1))).sum())
            for x in self.returned
        )
        self.log("returned", total)


class Translated(Padded):
    """Has a target for each source, of a length of its own."""

    def per_sample(self, batch: Any) -> Tensor:
        source, mask, target = batch["src"], batch["mask"], batch["tgt"]
        logits = (self.model(source, mask=mask) * mask[..., None]).sum(1)
        missed, real = -logits.log_softmax(1).gather(1, target), target > 0
        return (missed * real).sum(1) / real.sum(1)


def translation(source: Sequence[int], target: Sequence[int], last: int) -> dict[str, Tensor]:
    """A batch of rows of these lengths, whose targets all end in the same token."""
    draw = torch.Generator().manual_seed(5)
    rows = [torch.randint(1, VOCABULARY, (n,), generator=draw) for n in (*source, *target)]
    src, tgt = (
        nn.utils.rnn.pad_sequence(part, batch_first=True)
        for part in (rows[: len(source)], rows[len(source) :])
    )
    for row, length in zip(tgt, target, strict=True):
        row[length - 1] = last
    return {"src": src, "mask": src > 0, "tgt": tgt}


def token_rows(rows: Sequence[Tensor]) -> dict[str, Tensor]:
    """Collate as Hugging Face does, with a mask of pairs beside."""
    ids = nn.utils.rnn.pad_sequence(list(rows), batch_first=True)
    mask = (ids > 0).long()
    seen = mask[:, None, None, :].bool() & torch.ones(ids.shape[1], ids.shape[1]).tril().bool()
    labels = ids.masked_fill(ids == 0, -100)
    labels[:, 0] = -100
    return {"input_ids": ids, "attention_mask": mask, "seen": seen, "labels": labels}


class Tokens(Base):
    """A mean over tokens, whose masks are four-dimensional."""

    def __init__(self, *, own_loss: bool = False) -> None:
        super().__init__()
        self.model = _Language(own_loss=own_loss)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        found = self.model(batch["input_ids"], batch["seen"], batch["labels"])
        loss = found if found.dim() == 0 else _mean(found, batch["labels"])
        self.log("train/loss", loss, on_step=True, on_epoch=True)
        return loss


def _mean(logits: Tensor, labels: Tensor) -> Tensor:
    return functional.cross_entropy(logits[:, :-1].mT, labels[:, 1:])


class _Language(nn.Module):
    def __init__(self, *, own_loss: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self.own_loss = own_loss

    def forward(self, ids: Tensor, seen: Tensor, labels: Tensor | None = None) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x, mask=seen)
        logits = self.head(x)
        return logits if labels is None or not self.own_loss else _mean(logits, labels)


def with_labels(rows: Sequence[Tensor]) -> PackedBatch:
    return pack_samples([{"ids": row, "labels": _shifted(row)} for row in rows])


def _shifted(row: Tensor) -> Tensor:
    return torch.cat([row[1:], torch.tensor([-100])])


class Packed(Base):
    """A mean over tokens of samples in one row, each blind to the others."""

    def __init__(self, *, own_loss: bool = False) -> None:
        super().__init__()
        self.model = _Language(own_loss=own_loss)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        owner = torch.repeat_interleave(batch["lengths"])
        seen = (owner[:, None] == owner[None, :]).tril()[None, None]
        logits = self.model(batch["ids"][None], seen)[0]
        loss = functional.cross_entropy(logits, batch["labels"])
        self.log("train/loss" if self.training else "val/loss", loss, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.training_step(batch, batch_idx)


packed = partial(loader, with_labels)


def packed_and_validated() -> tuple[DataLoader, DataLoader]:
    return packed(num=21), packed(num=13)


def quick_choice(workload: Workload, **options: Any) -> Choice:
    """Search little: a test's plan need not be a good one."""
    return choose_plan(workload, **{**options, "evaluations": 0})


def random_choice(workload: Workload, seed: int, **options: Any) -> Choice:
    """Choose any plan at all, alike on all ranks."""
    choice = quick_choice(workload, **options)
    if workload.partition is None:
        return choice
    draw = np.random.default_rng([seed, *workload.lengths])
    n, p = len(workload.lengths), workload.num_stages
    m = int(draw.integers(1, n + 1))
    ids, ends = draw.permutation(n), np.sort(draw.choice(np.arange(1, n), m - 1, replace=False))
    samples = tuple(tuple(map(int, part)) for part in np.split(ids, ends))
    name = str(draw.choice(["1f1b", "gpipe"]))
    depths = np.sort(draw.integers(1, m + 1, size=p))[::-1]
    chosen: Candidate = replace(
        choice.chosen,
        formation=Formation(samples),
        schedule_name=name,
        warm_up=tuple(map(int, depths)) if name == "1f1b" else None,
    )
    return replace(choice, chosen=chosen)
