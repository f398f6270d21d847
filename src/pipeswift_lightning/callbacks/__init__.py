"""Lightning callbacks: where a job's time goes, and checkpoints with their topology."""

from pipeswift_lightning.callbacks.job_report import JobReport
from pipeswift_lightning.callbacks.topology_checkpoint import TopologyCheckpoint

__all__ = ["JobReport", "TopologyCheckpoint"]
