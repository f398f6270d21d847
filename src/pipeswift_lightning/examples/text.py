"""Text as bytes, with nothing to download: the Python standard library, or any text of yours.

Bytes are their own token ids, 0 to 255; ``PAD`` is the one id beyond them.
"""

import ast
import os
import sysconfig
import warnings
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from textwrap import dedent
from typing import cast

import torch
from lightning.pytorch import LightningDataModule
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from typing_extensions import override

__all__ = ["PAD", "TextDataModule", "collate", "definitions", "paragraphs"]

PAD = 256
DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
SKIPPED_FOLDERS = frozenset({"__pycache__", "idlelib", "site-packages", "test", "tests"})


def text_files(root: Path, suffix: str = "") -> Iterator[Path]:
    """Yield the files under ``root`` in sorted order, tests and hidden files left out.

    Args:
        root: A folder, or one file.
        suffix: Ending the names must have.
    """
    if root.is_file():
        yield root
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = sorted(
            name for name in subfolders if name not in SKIPPED_FOLDERS and name[0] != "."
        )
        yield from (
            Path(folder, name) for name in sorted(names) if name.endswith(suffix) and name[0] != "."
        )


def definitions(source: str) -> Iterator[str]:
    r"""Yield each function of a Python source, and each class up to its first function.

    No line is yielded twice, so that no sample holds another one.

    Raises:
        SyntaxError: ``source`` is not Python.

    Example:
        >>> list(definitions("class A:\n  x = 1\n  def f(self): ...\n"))
        ['class A:\n  x = 1', 'def f(self): ...']
    """
    lines = source.split("\n")  # not splitlines(): a form feed ends no line for ast
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # old escape sequences in the sources
        nodes: list[ast.stmt] = list(reversed(ast.parse(source).body))
    while nodes:
        node = nodes.pop()
        if not isinstance(node, DEFINITIONS):
            continue
        last = node.end_lineno or node.lineno
        if isinstance(node, ast.ClassDef):
            inner = [n for n in node.body if isinstance(n, DEFINITIONS)]
            last = min([last, *(_first_line(n) - 1 for n in inner)])
            nodes.extend(reversed(node.body))
        yield dedent("\n".join(lines[_first_line(node) - 1 : last]))


def _first_line(node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) -> int:
    return min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])


def paragraphs(text: str) -> Iterator[str]:
    r"""Yield the pieces of ``text`` between blank lines.

    Example:
        >>> list(paragraphs("one\ntwo\n\n\nthree\n"))
        ['one\ntwo', 'three']
    """
    lines: list[str] = []
    for line in [*text.split("\n"), ""]:
        if line.strip():
            lines.append(line.rstrip())
        elif lines:
            yield "\n".join(lines)
            lines = []


def _standard_library(root: Path, max_bytes: int) -> Iterator[bytes]:
    for file in text_files(root, ".py"):
        try:
            found = list(definitions(file.read_text(encoding="utf-8")))
        except (SyntaxError, ValueError):
            continue  # not UTF-8, or kept broken on purpose
        yield from (text.encode()[:max_bytes] for text in found)


def _any_text(root: Path, max_bytes: int) -> Iterator[bytes]:
    for file in text_files(root):
        try:
            text = file.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue  # not text
        for data in map(str.encode, paragraphs(text)):
            yield from (data[i : i + max_bytes] for i in range(0, len(data), max_bytes))


def collate(samples: Sequence[bytes]) -> dict[str, Tensor]:
    """Make one batch of ``B`` samples, padded at the end to the longest, ``T``.

    Returns:
        ``tokens`` and ``targets`` (the next byte), ``[B, T]``, ``PAD`` where there is none;
        ``mask``, ``[B, T]``, true at real tokens; ``lengths``, ``[B]``.

    Example:
        >>> {name: value.tolist() for name, value in collate([b"abc", b"de"]).items()}["tokens"]
        [[97, 98], [100, 256]]
    """
    lengths = torch.tensor([len(sample) - 1 for sample in samples])
    longest = int(lengths.max()) + 1
    text = torch.full((len(samples), longest), PAD)
    for row, sample in zip(text, samples, strict=True):
        row[: len(sample)] = torch.frombuffer(bytearray(sample), dtype=torch.uint8)
    mask = torch.arange(longest - 1) < lengths[:, None]
    tokens = text[:, :-1].masked_fill(~mask, PAD)  # a sample's last byte is only a target
    return {"tokens": tokens, "targets": text[:, 1:], "mask": mask, "lengths": lengths}


class TextError(FileNotFoundError, ValueError):
    """There is no text, or too little of it."""


class TextDataModule(LightningDataModule):
    """Samples of text, cut at ``max_len`` tokens: most are short and a few are long.

    Without ``path`` a sample is a function or class of the Python standard library that runs this.
    With it, a sample is a paragraph of a text file; longer ones are split. The order, the samples
    and the split into training and validation (one in ``val_every``) are the same on every rank.

    Args:
        path: A text file, or a folder of them. None means the standard library.
        batch_size: Samples a batch.
        max_len: Longest sample, in tokens (bytes).
        max_samples: How many samples to read before stopping.
        val_every: Each ``val_every``-th sample is kept for validation, at least 2.
        num_workers: Processes that load data.

    Raises:
        FileNotFoundError: In ``setup``: there is nothing at ``path``.
        ValueError: In ``setup``: fewer than two samples at ``path``.
    """

    def __init__(
        self,
        path: str | None = None,
        batch_size: int = 32,
        max_len: int = 256,
        max_samples: int = 4096,
        val_every: int = 10,
        num_workers: int = 0,
    ) -> None:
        super().__init__()
        if val_every < 2:
            message = (
                f"val_every={val_every} leaves nothing to train on. Rule: 2 or more. Remedy: "
                "val_every=10, say"
            )
            raise ValueError(message)
        self.path = path
        self.batch_size = batch_size
        self.max_len = max_len
        self.max_samples = max_samples
        self.val_every = val_every
        self.num_workers = num_workers
        self.train_samples: list[bytes] = []
        self.val_samples: list[bytes] = []

    @override
    def setup(self, stage: str) -> None:
        """Read the samples, once."""
        if self.train_samples:
            return
        samples = self._read()
        self.val_samples = samples[:: self.val_every]
        self.train_samples = [s for i, s in enumerate(samples) if i % self.val_every]

    def _read(self) -> list[bytes]:
        root = Path(self.path or sysconfig.get_paths()["stdlib"])
        if not root.exists():
            message = (
                f"no text to train on: {root} does not exist. Rule: path is a file or folder of "
                "text that is there. Remedy: correct it, or leave it out for Python's own"
            )
            raise TextError(message)
        max_bytes = self.max_len + 1  # tokens and targets are each one byte shorter
        found: Iterable[bytes] = (_any_text if self.path else _standard_library)(root, max_bytes)
        samples = list(islice((s for s in found if len(s) >= 2), self.max_samples))
        if len(samples) < 2:
            message = (
                f"{root} has {len(samples)} samples of text. Rule: 2 or more, one of them to "
                "validate with. Remedy: a longer text"
            )
            raise TextError(message)
        return samples

    @override
    def train_dataloader(self) -> DataLoader[bytes]:
        """Return shuffled batches of the training samples."""
        return self._loader(self.train_samples, shuffle=True)

    @override
    def val_dataloader(self) -> DataLoader[bytes]:
        """Return the validation samples, in order."""
        return self._loader(self.val_samples, shuffle=False)

    def _loader(self, samples: list[bytes], *, shuffle: bool) -> DataLoader[bytes]:
        return DataLoader(
            cast("Dataset[bytes]", samples),  # a list has all that a DataLoader asks for
            batch_size=self.batch_size,
            shuffle=shuffle,
            collate_fn=collate,
            num_workers=self.num_workers,
        )
