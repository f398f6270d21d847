"""What the user has chosen for the layers of a stage: compiled, recomputed, or as they are."""

from collections.abc import Sequence

from pipeswift_lightning.runtime.compilation import Compilation
from pipeswift_lightning.runtime.recompute import Recomputation
from pipeswift_lightning.strategies.network import PipelinedNetwork
from pipeswift_lightning.strategies.options import PipelineOptions

__all__ = ["LayerWrappers"]


class LayerWrappers:
    """Wraps the layers of one network; installed before its cut, which calls what it finds there.

    Args:
        network: The network.
        options: What the user chose.
    """

    def __init__(self, network: PipelinedNetwork, options: PipelineOptions) -> None:
        self._options = options
        self._recomputation = Recomputation(network.layers)
        self._compilation = Compilation(network.layers, dict(options.compile or ()))

    def install(self) -> None:
        """Put those in place that the user wants: each is one more call of each layer."""
        if self._options.compile is not None:
            self._compilation.install()
        if self._options.recompute:
            self._recomputation.install()

    def choose(self, layers: Sequence[int], stage: int) -> None:
        """Compile the stage's layers, and recompute the first: they are held longest."""
        num = self._options.num_recomputed(stage, len(layers))
        self._recomputation.choose(layers[:num])
        self._compilation.choose(layers if self._options.compile is not None else ())

    def remove(self) -> None:
        """Take them away."""
        self._recomputation.remove()
        self._compilation.remove()
