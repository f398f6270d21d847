"""Fine-tune a Hugging Face model: text, images, or both; all its weights, or adapters (LoRA).

The model computes its own loss, a mean over the labels that are not -100.
"""

from collections.abc import Mapping
from contextlib import nullcontext
from functools import partial
from importlib import import_module
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from typing_extensions import override

from pipeswift_lightning.examples.gpt import warm_up_cosine

__all__ = ["HuggingFaceModule"]


def _package(name: str) -> Any:
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        message = (
            f"this example needs {name}, which is not installed. Remedy: "
            "pip install 'pipeswift-lightning[hf]'"
        )
        raise ModuleNotFoundError(message) from error


class HuggingFaceModule(LightningModule):
    """Train a Hugging Face model with AdamW, a warm-up and a cosine.

    A batch is a mapping of the model's own arguments, ``labels`` among them.

    Args:
        auto_class: Which head: ``"AutoModelForCausalLM"``, ``"AutoModelForImageClassification"``,
            ``"AutoModelForImageTextToText"`` and so on.
        name: A model's name or folder; ``None`` makes a random one from ``config``.
        config: The configuration of a random model: ``model_type`` and what differs from its
            defaults.
        lora: Arguments of ``peft.LoraConfig``; ``None`` trains all weights.
        meta: Build the model on the meta device, so that each rank reads its stage's weights alone:
            from the strategy's ``weights=``, or none.
        lr: Highest learning rate.
        weight_decay: AdamW's decay.
        warm_up_steps: Optimiser steps until ``lr`` is reached.

    Raises:
        ValueError: Neither ``name`` nor ``config`` is given.
    """

    def __init__(  # noqa: PLR0913 -- one argument a hyper-parameter, so `model.lr=` works
        self,
        auto_class: str = "AutoModelForCausalLM",
        name: str | None = None,
        config: Mapping[str, Any] | None = None,
        lora: Mapping[str, Any] | None = None,
        *,
        meta: bool = False,
        lr: float = 1e-3,
        weight_decay: float = 0.1,
        warm_up_steps: int = 10,
    ) -> None:
        super().__init__()
        if name is None and config is None:
            message = "name=None and config=None: give a model's name, or the configuration of one"
            raise ValueError(message)
        self.save_hyperparameters()
        self.auto_class = auto_class
        self.name = name
        self.config = dict(config or {})
        self.lora = dict(lora) if lora is not None else None
        self.meta = meta
        self.lr = lr
        self.weight_decay = weight_decay
        self.warm_up_steps = warm_up_steps
        self.model: nn.Module | None = None

    @override
    def configure_model(self) -> None:
        """Build the model, once."""
        if self.model is not None:
            return
        transformers = _package("transformers")
        kind = getattr(transformers, self.auto_class)
        if self.name is not None and not self.meta:
            model = kind.from_pretrained(self.name)
        else:
            configs = transformers.AutoConfig
            found = configs.from_pretrained(self.name) if self.name is not None else None
            with torch.device("meta") if self.meta else nullcontext():
                model = kind.from_config(found or configs.for_model(**self.config))
        if self.lora is not None:
            peft = _package("peft")
            model = peft.get_peft_model(model, peft.LoraConfig(**self.lora))
        self.model = model

    def _loss(self, batch: Mapping[str, Tensor]) -> Tensor:
        assert self.model is not None
        if "image_grid_thw" in batch:  # such models take the patches of all images in one row
            batch = {**batch, "pixel_values": batch["pixel_values"].flatten(0, 1)}
        loss: Tensor = self.model(**batch).loss
        return loss

    @override
    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        """Return the batch's loss, and log it as ``train/loss``."""
        loss = self._loss(batch)
        self.log("train/loss", loss, prog_bar=True, batch_size=len(batch["labels"]))
        return loss

    @override
    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        """Log ``val/loss``."""
        size = len(batch["labels"])
        self.log("val/loss", self._loss(batch), prog_bar=True, batch_size=size, sync_dist=True)

    @override
    def configure_optimizers(self) -> Any:
        """Return AdamW over what is trained, and a schedule a step."""
        trained = [p for p in self.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=self.lr, weight_decay=self.weight_decay)
        factor = partial(
            warm_up_cosine,
            warm_up_steps=self.warm_up_steps,
            total_steps=float(self.trainer.estimated_stepping_batches),
        )
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "interval": "step"},
        }

    def tokens_per_batch(self, batch: Mapping[str, Tensor]) -> Tensor:
        """Count what the report's throughput is about: tokens, or images where there is no text."""
        mask = batch.get("attention_mask")
        return mask.sum() if mask is not None else torch.tensor(len(batch["labels"]))
