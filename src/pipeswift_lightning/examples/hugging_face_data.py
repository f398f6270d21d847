"""Batches as Hugging Face's models take them, with nothing to download.

Text comes from the same files as the other example's; images are the handwritten digits that
scikit-learn brings along (UCI, 1,797 real ones of 8 by 8 grey pixels).
"""

from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from typing import Any, cast

import torch
from lightning.pytorch import LightningDataModule
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from typing_extensions import override

from pipeswift_lightning.examples.text import PAD, TextDataModule

__all__ = ["CausalTextDataModule", "DigitsDataModule", "collate_causal", "digit_as_text"]

_IGNORED = -100
IMAGE_TOKEN, IMAGE_START = 10, 11  # after the ten digits
PATCH, MERGE, FRAMES = 2, 2, 2  # pixels of a patch, patches of a token, frames that an image fills


def collate_causal(
    samples: Sequence[bytes], encode: Callable[[bytes], Sequence[int]] = list, pad: int = PAD
) -> dict[str, Tensor]:
    """Make one batch of ``B`` samples, padded at the end to the longest, ``T``.

    Returns:
        ``input_ids``, ``attention_mask`` and ``labels`` (-100 at the padding), each ``[B, T]``.

    Example:
        >>> collate_causal([b"abc", b"de"])["labels"].tolist()
        [[97, 98, 99], [100, 101, -100]]
    """
    rows = [torch.tensor(encode(sample)) for sample in samples]
    ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=pad)
    lengths = torch.tensor([len(row) for row in rows])
    mask = torch.arange(ids.shape[1]) < lengths[:, None]
    labels = ids.masked_fill(~mask, _IGNORED)
    return {"input_ids": ids, "attention_mask": mask.long(), "labels": labels}


class CausalTextDataModule(TextDataModule):
    """The other example's text, as bytes or as a tokenizer's tokens.

    Args:
        tokenizer: A tokenizer's name or folder; ``None`` takes bytes as tokens.
        max_len: Longest sample, in bytes.
        **text: As for `TextDataModule`.
    """

    def __init__(self, tokenizer: str | None = None, max_len: int = 256, **text: Any) -> None:
        super().__init__(max_len=max_len, **text)
        self.tokenizer = tokenizer

    @override
    def _loader(self, samples: list[bytes], *, shuffle: bool) -> DataLoader[bytes]:
        collate: Callable[..., Any] = collate_causal
        if self.tokenizer is not None:
            tokens = import_module("transformers").AutoTokenizer.from_pretrained(self.tokenizer)
            pad = tokens.pad_token_id if tokens.pad_token_id is not None else tokens.eos_token_id
            encode = partial(_encode, tokens)
            collate = partial(collate_causal, encode=encode, pad=pad)
        return DataLoader(
            cast("Dataset[bytes]", samples),
            batch_size=self.batch_size,
            shuffle=shuffle,
            collate_fn=collate,
            num_workers=self.num_workers,
        )


def _encode(tokenizer: Any, sample: bytes) -> list[int]:
    ids: list[int] = tokenizer(sample.decode(errors="replace"))["input_ids"]
    return ids


def digit_as_text(image: Tensor, label: int) -> dict[str, Tensor]:
    """Return a digit as a question and its answer, for a model of the Qwen-VL kind.

    The text is: start of image, a token for each 2 by 2 patches, the digit. Only the digit counts.

    Args:
        image: Grey values, ``[H, W]``, multiples of a token's 4 pixels.
        label: Which digit it is.

    Example:
        >>> sample = digit_as_text(torch.zeros(8, 8), 7)
        >>> sample["input_ids"].tolist(), sample["pixel_values"].shape
        ([11, 10, 10, 10, 10, 7], torch.Size([16, 24]))
    """
    rows, columns = image.shape[0] // PATCH, image.shape[1] // PATCH
    # Patches in blocks that a token merges: block row, block column, row, column.
    blocks = image.reshape(rows // MERGE, MERGE, PATCH, columns // MERGE, MERGE, PATCH)
    grey = blocks.permute(0, 3, 1, 4, 2, 5).reshape(rows * columns, 1, 1, PATCH, PATCH)
    patches = grey.expand(-1, 3, FRAMES, -1, -1).reshape(rows * columns, -1)
    num_tokens = rows * columns // MERGE**2
    ids = torch.tensor([IMAGE_START, *[IMAGE_TOKEN] * num_tokens, label])
    labels = torch.full_like(ids, _IGNORED)
    labels[-1] = label
    return {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "labels": labels,
        "mm_token_type_ids": (ids == IMAGE_TOKEN).int(),
        "pixel_values": patches,
        "image_grid_thw": torch.tensor([1, rows, columns]),
    }


class DigitsDataModule(LightningDataModule):
    """Handwritten digits: images with their class, or questions about images with their answer.

    Args:
        as_text: Whether the model reads image and answer as one text, `digit_as_text`.
        batch_size: Samples a batch.
        val_every: Each ``val_every``-th sample is kept for validation.

    Raises:
        ModuleNotFoundError: In ``setup``: scikit-learn is not installed.
    """

    def __init__(self, *, as_text: bool = False, batch_size: int = 32, val_every: int = 10) -> None:
        super().__init__()
        self.as_text = as_text
        self.batch_size = batch_size
        self.val_every = val_every
        self.samples: list[dict[str, Tensor]] = []

    @override
    def setup(self, stage: str) -> None:
        """Read the digits, once."""
        if self.samples:
            return
        try:
            digits = import_module("sklearn.datasets").load_digits()
        except ModuleNotFoundError as error:
            message = (
                "the digits come with scikit-learn, which is not installed. Remedy: "
                "pip install 'pipeswift-lightning[hf]'"
            )
            raise ModuleNotFoundError(message) from error
        images = torch.tensor(digits.images, dtype=torch.float32) / 8 - 1
        labels = torch.tensor(digits.target)
        for image, label in zip(images, labels, strict=True):
            plain = {"pixel_values": image[None], "labels": label}
            self.samples.append(digit_as_text(image, int(label)) if self.as_text else plain)

    @override
    def train_dataloader(self) -> DataLoader[Any]:
        """Return shuffled batches of the training digits."""
        chosen = [s for i, s in enumerate(self.samples) if i % self.val_every]
        return self._loader(chosen, shuffle=True)

    @override
    def val_dataloader(self) -> DataLoader[Any]:
        """Return the validation digits, in order."""
        return self._loader(self.samples[:: self.val_every], shuffle=False)

    def _loader(self, samples: list[Any], *, shuffle: bool) -> DataLoader[Any]:
        return DataLoader(
            cast("Dataset[Any]", samples), batch_size=self.batch_size, shuffle=shuffle
        )
