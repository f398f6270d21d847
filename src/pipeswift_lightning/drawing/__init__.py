"""Pictures of timelines: PNG, a page for the browser, a trace for Perfetto. Knows `plan` only."""

from pipeswift_lightning.drawing.chrome_trace import chrome_trace, write_chrome_trace
from pipeswift_lightning.drawing.page import page
from pipeswift_lightning.drawing.panel import Panel
from pipeswift_lightning.drawing.png import DrawingError, png, require_matplotlib

__all__ = [
    "DrawingError",
    "Panel",
    "chrome_trace",
    "page",
    "png",
    "require_matplotlib",
    "write_chrome_trace",
]
