"""Lightning callbacks that show where a job's time goes."""

from pipeswift_lightning.callbacks.bubble_monitor import BubbleMonitor
from pipeswift_lightning.callbacks.job_report import JobReport
from pipeswift_lightning.callbacks.timeline_trace import TimelineTrace
from pipeswift_lightning.callbacks.variance_monitor import VarianceMonitor

__all__ = ["BubbleMonitor", "JobReport", "TimelineTrace", "VarianceMonitor"]
