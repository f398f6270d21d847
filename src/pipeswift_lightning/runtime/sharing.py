"""Give every rank of a pipeline what the last stage has computed."""

from collections.abc import Hashable

import torch
import torch.distributed as dist
from torch import Tensor

from pipeswift_lightning.runtime.communication import in_collective
from pipeswift_lightning.runtime.joining import JoinedOutputs
from pipeswift_lightning.runtime.mesh import MeshGroups
from pipeswift_lightning.runtime.messages import Layout, MessageError, TensorSpec
from pipeswift_lightning.runtime.progress import Progress

__all__ = ["OutputSharing"]

_MAX_LAYOUTS = 1 << 16


class OutputSharing:
    """Broadcasts the outputs of one network; how they look is told once for each kind of call.

    Args:
        network: How errors name the network.
        groups: The mesh's groups.
        device: This rank's device.
        progress: Read by the watchdog.
    """

    def __init__(
        self, network: str, groups: MeshGroups, device: torch.device, progress: Progress
    ) -> None:
        self._network = network
        self._pipeline = groups.pipeline
        self._num_stages = groups.mesh.num_stages
        self._source = groups.mesh.rank(
            stage=groups.mesh.num_stages - 1, replica=groups.coordinate.replica
        )
        self._device = device
        self._progress = progress
        self._layouts: dict[Hashable, Layout] = {}

    def share(self, joined: JoinedOutputs | None, kind: Hashable) -> tuple[Layout, list[Tensor]]:
        """Return the layout and the tensors of the output, without history; collective.

        Args:
            joined: The output, on the last stage.
            kind: What determines the layout.

        Raises:
            MessageError: An earlier call of the same kind gave another layout.
        """
        known = self._layouts.get(kind)
        layout = known
        tensors: list[Tensor] = []
        if joined is not None:
            tensors = [tensor.contiguous() for tensor in joined.tensors]
            layout = _layout(joined)
            if known is not None and known != layout:
                msg = (
                    f"{self._network} returned {layout.describe()}, but an earlier call with "
                    f"arguments of the same shapes {known.describe()}. Rule: equal shapes in give "
                    "equal shapes out. Remedy: PipeSwiftStrategy(dynamic_shapes=True)"
                )
                raise MessageError(msg)
        if self._num_stages > 1:
            with in_collective(f"sharing the output of {self._network}", self._progress):
                layout = self._told(layout) if known is None else known
                tensors = self._broadcast(tensors, layout)
        assert layout is not None
        self._layouts[kind] = layout
        return layout, tensors

    def begin(self, *, anew: bool) -> None:
        """Begin a step: forget the layouts if they are told ``anew``, or are too many."""
        if anew or len(self._layouts) > _MAX_LAYOUTS:
            self._layouts.clear()

    def _told(self, layout: Layout | None) -> Layout:
        box = [layout]
        device = self._device if self._device.type != "cpu" else None
        dist.broadcast_object_list(box, src=self._source, group=self._pipeline, device=device)
        assert box[0] is not None
        return box[0]

    def _broadcast(self, tensors: list[Tensor], layout: Layout) -> list[Tensor]:
        tensors = tensors or [spec.empty(self._device) for spec in layout.tensors]
        for tensor in tensors:
            if tensor.numel():  # as bytes, since no backend knows every dtype
                raw = tensor.reshape(-1).view(torch.uint8)
                dist.broadcast(raw, src=self._source, group=self._pipeline)
        return tensors


def _layout(joined: JoinedOutputs) -> Layout:
    leaves = list(joined.leaves)
    for place, tensor, want in zip(joined.places, joined.tensors, joined.wanted, strict=True):
        leaves[place] = TensorSpec(tuple(tensor.shape), tensor.dtype, want)
    return Layout(joined.spec, tuple(leaves))
