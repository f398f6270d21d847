"""Measure a network's layers and links: real costs to plan with.

`profile_network` measures on one rank; `profile_stages` each rank's own layers, and gathers.
"""

from pipeswift_lightning.runtime.profiler.examples import example_micro_batches, shape_of
from pipeswift_lightning.runtime.profiler.measure import ProfileOptions, Subject
from pipeswift_lightning.runtime.profiler.network import profile_network
from pipeswift_lightning.runtime.profiler.probe import ProfileError

__all__ = [
    "ProfileError",
    "ProfileOptions",
    "Subject",
    "example_micro_batches",
    "profile_network",
    "shape_of",
]
