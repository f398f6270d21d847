"""A sweep's table as a picture, by matplotlib (extra ``plot``)."""

from io import BytesIO

from pipeswift_lightning.drawing.png import require_matplotlib
from pipeswift_lightning.runs.sweep import SweepTable

__all__ = ["sweep_png"]

_INCHES_A_ROW, _WIDTH_INCHES = 0.34, 12.0
_BAR, _BEST, _STEP = "#56b4e9", "#009e73", "#e69f00"


def sweep_png(table: SweepTable, *, dpi: int = 130) -> bytes:
    """Return a picture: step time and job completion time of each member, and the table below.

    Raises:
        DrawingError: matplotlib is not installed.
    """
    require_matplotlib()
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    head, *rows = table.rows()
    table_inches = _INCHES_A_ROW * (len(rows) + 2)
    figure = Figure(figsize=(_WIDTH_INCHES, 3.6 + table_inches), layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.add_gridspec(2, 2, height_ratios=(3.6, table_inches))
    names = [" ".join(m.choices) or m.run.name for m in table.members]
    best = table.best
    colors = [_BEST if member is best else _BAR for member in table.members]
    for column, (title, values, shades) in enumerate(
        (
            ("step, ms", [1e3 * m.step_s for m in table.members], [_STEP] * len(names)),
            (
                "job completion time, s (least: green)",
                [m.completion_s for m in table.members],
                colors,
            ),
        )
    ):
        ax = figure.add_subplot(grid[0, column])
        ax.bar(range(len(names)), values, color=shades)
        ax.set_xticks(range(len(names)), names, rotation=30, ha="right", fontsize=8)
        ax.set_title(title, loc="left", fontsize=10)
        ax.set_xlabel(", ".join(table.keys), fontsize=8)
        for side in ("top", "right"):
            ax.spines[side].set_visible(False)
    below = figure.add_subplot(grid[1, :])
    below.axis("off")
    if rows:
        cells = below.table(cellText=rows, colLabels=head, loc="upper center", cellLoc="center")
        cells.auto_set_font_size(value=False)
        cells.set_fontsize(8)
        cells.scale(1, 1.3)
        for row, member in enumerate(table.members, start=1):
            for column in range(len(head)) if member is best else ():
                cells[row, column].set_text_props(weight="bold", color=_BEST)
    failed = "\n".join(f"{run.name} has not finished: {run.status}" for run in table.failed)
    below.set_title(failed, loc="left", fontsize=8, color="#b00020")
    buffer = BytesIO()
    figure.savefig(buffer, format="png", dpi=dpi)
    return buffer.getvalue()
