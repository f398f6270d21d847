"""Tiny random Hugging Face models within plain LightningModules, and batches for them."""

import os
from collections.abc import Callable
from contextlib import nullcontext
from functools import wraps
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
import transformers
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils.data import DataLoader

from pipeswift_lightning import PipeSwiftStrategy
from tests.helpers.parity import make_trainer

VOCABULARY, LENGTH, SAMPLES, PAD = 32, 7, 30, 0
SMALL = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "max_position_embeddings": 32,
    "pad_token_id": PAD,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


class InDouble(TorchFunctionMode):
    """Make models that cast to float32 (in norms, softmax and losses) stay in float64.

    Sums of float32 depend on how a batch is split, by more than the tests allow. Only calls of this
    thread are changed, so a checkpoint that another thread is writing is none of them.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        func = Tensor.double if func is Tensor.float else func
        given = {k: _doubled(v) for k, v in (kwargs or {}).items()}
        return func(*map(_doubled, args), **given)


def _doubled(value: Any) -> Any:
    return torch.float64 if value is torch.float32 else value


def made_double(model: nn.Module) -> nn.Module:
    """Run a model's forward `InDouble` once its parameters are in double precision."""
    forward = model.forward

    @wraps(forward)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        is_double = next(model.parameters()).dtype is torch.float64
        with InDouble() if is_double else nullcontext():
            return forward(*args, **kwargs)

    model.forward = wrapped
    return model


def causal_loss(logits: Tensor, labels: Tensor, vocab_size: int, **_: Any) -> Tensor:
    """Hugging Face's loss of causal models, but in the dtype of the logits (theirs: float32)."""
    flat = logits[:, :-1].reshape(-1, vocab_size)
    return functional.cross_entropy(flat, labels[:, 1:].reshape(-1), ignore_index=-100)


class HuggingFace(LightningModule):
    """What a user writes: the model gives the loss."""

    def __init__(self, model: nn.Module, rate: float = 0.01) -> None:
        super().__init__()
        self.model = model
        self.rate = rate

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        out = self.model(**batch)
        self.log("train/loss", out.loss, on_step=True, on_epoch=True)
        return out.loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val/loss", self.model(**batch).loss)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=self.rate, weight_decay=0.1)


class LossOutside(HuggingFace):
    """The model gives logits; the loss of each sample is the mean of its tokens'."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        labels = batch.pop("labels")[:, 1:]
        logits = self.model(**batch).logits[:, :-1]
        each = functional.cross_entropy(logits.mT, labels, reduction="none", ignore_index=-100)
        counts = (labels != -100).sum(1).clamp(min=1)
        loss = (each.sum(1) / counts).mean()
        self.log("train/loss", loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        labels = batch.pop("labels")
        self.log("val/loss", self.model(**batch).logits.pow(2).mean() + labels.double().mean())


def text(num: int = SAMPLES) -> list[dict[str, Tensor]]:
    """Sentences of 3 to 7 tokens, padded; the padding's labels are ignored."""
    draw = torch.Generator().manual_seed(5)
    rows = []
    for _ in range(num):
        length = int(torch.randint(3, LENGTH + 1, (), generator=draw))
        ids = torch.randint(3, VOCABULARY, (LENGTH,), generator=draw)
        mask = (torch.arange(LENGTH) < length).long()
        ids = torch.where(mask.bool(), ids, PAD)
        labels = torch.where(mask.bool(), ids, -100)
        rows.append({"input_ids": ids, "attention_mask": mask, "labels": labels})
    return rows


def text_loaders() -> tuple[DataLoader, DataLoader]:
    return DataLoader(text(), batch_size=8), DataLoader(text(7), batch_size=8)


def causal(name: str, **changes: Any) -> nn.Module:
    """A causal language model of a family, small and random."""
    config = getattr(transformers, f"{name}Config")(**{**SMALL, **changes})
    model = transformers.AutoModelForCausalLM.from_config(config)
    model.loss_function = causal_loss
    return made_double(model)


def gpt2() -> nn.Module:
    return causal(
        "GPT2",
        n_embd=16,
        n_layer=4,
        n_head=4,
        n_positions=32,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
    )


def checkpointed() -> nn.Module:
    """Recomputes its blocks in the backward pass, which `InDouble` does not reach."""
    model = causal("Llama")
    del model.forward
    model.gradient_checkpointing_enable()
    return model


CAUSAL: dict[str, Callable[[], nn.Module]] = {
    "Llama": lambda: causal("Llama"),
    "Llama, tied": lambda: causal("Llama", tie_word_embeddings=True),
    "Llama, checkpointed": checkpointed,
    "Llama, eager": lambda: causal("Llama", attn_implementation="eager"),
    "Qwen2": lambda: causal("Qwen2"),
    "Qwen3": lambda: causal("Qwen3", tie_word_embeddings=True),
    "Mistral": lambda: causal("Mistral", sliding_window=4),
    "Gemma": lambda: causal("Gemma"),
    "Gemma2": lambda: causal("Gemma2", sliding_window=4, query_pre_attn_scalar=4),
    "Gemma3": lambda: causal("Gemma3Text", sliding_window=4, query_pre_attn_scalar=4),
    "GPT-2": gpt2,
}


def validating_trainer() -> Trainer:
    """A Trainer over the harness's ranks, in float32, whose model comes from nowhere."""
    strategy = PipeSwiftStrategy(micro_batches=2)
    return make_trainer(strategy, precision="32-true", limit_val_batches=1)


# -- encoders ---------------------------------------------------------------------------------


def bert(kind: str) -> nn.Module:
    """BERT with a head: ``"MaskedLM"`` or ``"SequenceClassification"``."""
    dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    config = transformers.BertConfig(**SMALL, **dropout, num_labels=3)
    return made_double(getattr(transformers, f"BertFor{kind}")(config))


def vit() -> nn.Module:
    config = transformers.ViTConfig(
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=4,
        num_attention_heads=4,
        image_size=8,
        patch_size=4,
        num_channels=1,
        num_labels=3,
    )
    return made_double(transformers.ViTForImageClassification(config))


def masked_text() -> tuple[DataLoader, DataLoader]:
    """A third of the tokens is to be guessed; in some samples none is."""
    draw = torch.Generator().manual_seed(6)
    rows = text()
    for row in rows:
        chosen = torch.rand(LENGTH, generator=draw) < torch.rand((), generator=draw) * 0.6
        row["labels"] = torch.where(chosen, row["labels"], -100)
        row["input_ids"] = torch.where(chosen, 3, row["input_ids"])
    return DataLoader(rows, batch_size=8), DataLoader(rows[:7], batch_size=8)


def classified_text() -> tuple[DataLoader, DataLoader]:
    rows = [{**row, "labels": row["input_ids"].sum() % 3} for row in text()]
    return DataLoader(rows, batch_size=8), DataLoader(rows[:7], batch_size=8)


def images() -> tuple[DataLoader, DataLoader]:
    draw = torch.Generator().manual_seed(7)
    rows = [
        {
            "pixel_values": torch.randn(1, 8, 8, generator=draw, dtype=torch.float64),
            "labels": torch.randint(3, (), generator=draw),
        }
        for _ in range(SAMPLES)
    ]
    return DataLoader(rows, batch_size=8), DataLoader(rows[:7], batch_size=8)


Make = tuple[Callable[[], nn.Module], Callable[[], tuple[DataLoader, DataLoader]]]
ENCODERS: dict[str, Make] = {
    "BERT, masked": (lambda: bert("MaskedLM"), masked_text),
    "BERT, classes": (lambda: bert("SequenceClassification"), classified_text),
    "ViT": (vit, images),
}


# -- vision and language ----------------------------------------------------------------------

IMAGE, IMAGE_START, GRID = 30, 31, (1, 4, 4)  # tokens; an image has 4 by 4 patches, merged 2 by 2
PATCH = 3 * 2 * 4 * 4  # colours, frames, height, width


def vision_language(name: str) -> nn.Module:
    """A model of the Qwen-VL kind: vision blocks, then language blocks."""
    vision = {
        "depth": 3,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_heads": 2,
        "patch_size": 4,
        "temporal_patch_size": 2,
        "spatial_merge_size": 2,
        "out_hidden_size": 16,
        **VISION[name],
    }
    text = {**SMALL, "rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 0]}}
    config = getattr(transformers, f"{name}Config")(
        vision_config=vision,
        text_config=text,
        image_token_id=IMAGE,
        vision_start_token_id=IMAGE_START,
        tie_word_embeddings=True,
    )
    model = getattr(transformers, f"{name}ForConditionalGeneration")(config)
    model.loss_function = causal_loss
    return made_double(model)


VISION: dict[str, dict[str, Any]] = {
    "Qwen2VL": {"embed_dim": 16, "hidden_size": 16},
    "Qwen2_5_VL": {"fullatt_block_indexes": [1], "window_size": 8},
    "Qwen3VL": {"deepstack_visual_indexes": [0, 1], "num_position_embeddings": 16},
}


def images_in_text() -> tuple[DataLoader, DataLoader]:
    """One image a sample, at any place; the samples are padded."""
    draw = torch.Generator().manual_seed(8)
    rows = []
    for row in text(SAMPLES):
        ids = torch.cat(
            [torch.tensor([5, IMAGE_START, *[IMAGE] * 4]), row["input_ids"].clamp(max=29)]
        )
        mask = torch.cat([torch.ones(6, dtype=torch.long), row["attention_mask"]])
        labels = torch.cat([torch.full((6,), -100), row["labels"]])
        rows.append(
            {
                "input_ids": ids,
                "attention_mask": mask,
                "labels": labels,
                "mm_token_type_ids": (ids == IMAGE).int(),
                "pixel_values": torch.randn(16, PATCH, generator=draw, dtype=torch.float64),
                "image_grid_thw": torch.tensor(GRID),
            }
        )
    return DataLoader(rows, batch_size=8), DataLoader(rows[:7], batch_size=8)


class VisionLanguage(HuggingFace):
    """The processor packs the patches of all images into one row; here the step does."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step(_packed(batch), batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        super().validation_step(_packed(batch), batch_idx)


def _packed(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    return {**batch, "pixel_values": batch["pixel_values"].flatten(0, 1)}


MULTIMODAL: dict[str, Make] = {
    name: (lambda name=name: vision_language(name), images_in_text) for name in VISION
}

ALL: dict[str, Make] = {n: (m, text_loaders) for n, m in CAUSAL.items()} | ENCODERS | MULTIMODAL


# -- LoRA -------------------------------------------------------------------------------------


def lora(layers: list[int] | None = None) -> nn.Module:
    """A frozen Llama with adapters, in all its layers or in some."""
    import peft

    model = causal("Llama", tie_word_embeddings=True)
    config = peft.LoraConfig(
        r=2,
        target_modules=["q_proj", "v_proj"],
        layers_to_transform=layers,
        init_lora_weights=False,
        task_type="CAUSAL_LM",
    )
    return peft.get_peft_model(model, config)


class Adapted(HuggingFace):
    """Gives the optimizer what it trains."""

    def configure_optimizers(self) -> Any:
        trained = [p for p in self.parameters() if p.requires_grad]
        return torch.optim.AdamW(trained, lr=self.rate, weight_decay=0.1)


ADAPTED: dict[str, Make] = {
    "LoRA": (lora, text_loaders),
    "LoRA, last layer": (lambda: lora([3]), text_loaders),
    "LoRA, first layer": (lambda: lora([0]), text_loaders),
}
ALL |= ADAPTED
