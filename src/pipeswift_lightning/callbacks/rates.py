"""Tokens and samples a second, and the share of the devices' peak that the model uses."""

from collections.abc import Mapping
from typing import Any

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.fabric.utilities.throughput import Throughput, get_available_flops
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks.throughput_monitor import _plugin_to_compute_dtype
from lightning.pytorch.utilities.data import extract_batch_size
from torch import Tensor

__all__ = ["Rates", "count_batch", "flops_of_batch"]

MASK_NAMES = ("mask", "attention_mask")


def count_batch(module: LightningModule, batch: Any) -> tuple[str, Tensor | int]:
    """Return the unit a batch is counted in and its count, without waiting for a device.

    In this order: ``tokens`` by the module's own ``tokens_per_batch(batch)``; ``tokens`` by the sum
    of a ``mask`` or ``attention_mask`` in the batch; ``samples`` by the size of its first tensor.
    """
    hook = getattr(module, "tokens_per_batch", None)
    if callable(hook):
        return "tokens", hook(batch)
    if isinstance(batch, Mapping):
        for name in MASK_NAMES:
            mask = batch.get(name)
            if isinstance(mask, Tensor) and not mask.is_floating_point():
                return "tokens", mask.sum()
    return "samples", _num_samples(batch)


def flops_of_batch(module: LightningModule, batch: Any) -> int | None:
    """Return the FLOPs of a training step, forward and backward; None where they are not known.

    They are the module's ``flops_per_batch``, a number as Lightning's own ``ThroughputMonitor``
    wants it, or a method that is given the batch.
    """
    flops = getattr(module, "flops_per_batch", None)
    if callable(flops):
        flops = flops(batch)
    return None if flops is None else int(flops)


class Rates:
    """Counts what is trained on; Lightning's `Throughput` makes rates of it.

    Args:
        trainer: Says how many stages and replicas there are, and on which devices.
        peak_flops: Of one device, a second. None asks Lightning, which knows many GPUs.
    """

    def __init__(self, trainer: Trainer, peak_flops: float | None) -> None:
        mesh = getattr(trainer.strategy, "mesh", None)
        self.num_stages: int = mesh.num_stages if mesh is not None else 1
        self.num_replicas: int = mesh.num_replicas if mesh is not None else trainer.world_size
        device = trainer.strategy.root_device
        if peak_flops is None and device.type == "cuda":
            dtype = _plugin_to_compute_dtype(trainer.precision_plugin)
            peak_flops = get_available_flops(device, dtype)
        self.peak_flops = peak_flops
        self.unit = "samples"
        self.count: Tensor | int = 0
        self.flops: int | None = None
        self._samples = self._batches = self._flops_before = 0
        # Two entries: each rate is that between two reports.
        self._throughput = Throughput(available_flops=peak_flops, window_size=2)
        self._throughput.update(time=0.0, batches=0, samples=0, lengths=0, flops=0)

    def add(self, module: LightningModule, batch: Any) -> None:
        """Count a batch."""
        self.unit, count = count_batch(module, batch)
        self.count = self.count + count
        self._samples += max(1, _num_samples(batch))
        self._batches += 1
        flops = flops_of_batch(module, batch)
        if flops is not None:
            self.flops = (self.flops or 0) + flops

    def since_last(self, training_s: float) -> dict[str, float]:
        """Return the rates since the last call, over all replicas; waits for the device.

        Args:
            training_s: Seconds of training so far.
        """
        flops = self.flops or 0
        self._throughput.update(
            time=training_s,
            batches=self._batches,
            samples=self._samples,
            lengths=max(self._samples, int(self.count)) if self.unit == "tokens" else self._samples,
            flops=(flops - self._flops_before) // self.num_stages,  # of one device
        )
        self._flops_before = flops
        found = self._throughput.compute()
        rates = {
            "batches_per_s": found["device/batches_per_sec"],
            "samples_per_s": self.num_replicas * found["device/samples_per_sec"],
        }
        if self.unit == "tokens":
            rates["tokens_per_s"] = self.num_replicas * found["device/items_per_sec"]
        if self.flops is not None:
            devices = self.num_replicas * self.num_stages
            rates["flops_per_s"] = devices * found["device/flops_per_sec"]
            if self.peak_flops:
                rates["mfu"] = found["device/mfu"]
        return rates

    def overall(self, count: int, training_s: float) -> dict[str, float]:
        """Return the rates of the whole training.

        Args:
            count: Of all replicas.
            training_s: Its seconds.
        """
        rates = {f"{self.unit}_per_s": count / training_s} if count else {}
        if self.flops is not None:
            rates["flops_per_s"] = self.num_replicas * self.flops / training_s
            if self.peak_flops:
                devices = self.num_replicas * self.num_stages
                rates["mfu"] = rates["flops_per_s"] / (devices * self.peak_flops)
        return rates

    def reduced_count(self, trainer: Trainer) -> int:
        """Return the count of all replicas; collective."""
        count = torch.as_tensor(self.count, device=trainer.strategy.root_device)
        return int(trainer.strategy.reduce(count, reduce_op="sum"))


def _num_samples(batch: Any) -> int:
    try:
        return extract_batch_size(batch)
    except MisconfigurationException:
        return 0
