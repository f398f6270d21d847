"""Lightning callbacks: where a job's time goes, balanced stages, and checkpoints in shards."""

from pipeswift_lightning.callbacks.bubble_monitor import BubbleMonitor
from pipeswift_lightning.callbacks.job_report import JobReport
from pipeswift_lightning.callbacks.measured_step import StepRecord
from pipeswift_lightning.callbacks.rebalance import Rebalance
from pipeswift_lightning.callbacks.timeline_trace import TimelineTrace
from pipeswift_lightning.callbacks.topology_checkpoint import TopologyCheckpoint
from pipeswift_lightning.callbacks.variance_monitor import VarianceMonitor

__all__ = [
    "BubbleMonitor",
    "JobReport",
    "Rebalance",
    "StepRecord",
    "TimelineTrace",
    "TopologyCheckpoint",
    "VarianceMonitor",
]
