"""Pipeline parallelism for PyTorch Lightning: ``Trainer(strategy="pipeswift")``.

Importing this package registers the strategy: Lightning checks the name of a strategy before it
looks anywhere else for it.
"""

from lightning.pytorch.strategies import StrategyRegistry

from pipeswift_lightning.runtime.packed import pack_samples
from pipeswift_lightning.strategies.pipeswift import PipeSwiftStrategy

__all__ = ["PipeSwiftStrategy", "pack_samples"]

PipeSwiftStrategy.register_strategies(StrategyRegistry)
