"""Measure a network's layers and links: real costs to plan with.

`profile_network` measures on one rank, `profile_stages` each layer on one of many; `obtain_profile`
measures only if no file has it, and gives all ranks the same numbers. `flops_model` counts instead.
"""

from pipeswift_lightning.runtime.profiler.examples import example_micro_batches, length_of, shape_of
from pipeswift_lightning.runtime.profiler.flops import flops_model
from pipeswift_lightning.runtime.profiler.link import measure_link
from pipeswift_lightning.runtime.profiler.measure import ProfileOptions, Subject
from pipeswift_lightning.runtime.profiler.network import called, profile_network
from pipeswift_lightning.runtime.profiler.optimizer import optimizer_factor
from pipeswift_lightning.runtime.profiler.origin import origin_of
from pipeswift_lightning.runtime.profiler.overhead import measure_overhead
from pipeswift_lightning.runtime.profiler.probe import ProfileError
from pipeswift_lightning.runtime.profiler.sharing import (
    obtain_profile,
    profile_stages,
    read_profile,
    shared_link,
    write_profile,
)

__all__ = [
    "ProfileError",
    "ProfileOptions",
    "Subject",
    "called",
    "example_micro_batches",
    "flops_model",
    "length_of",
    "measure_link",
    "measure_overhead",
    "obtain_profile",
    "optimizer_factor",
    "origin_of",
    "profile_network",
    "profile_stages",
    "read_profile",
    "shape_of",
    "shared_link",
    "write_profile",
]
