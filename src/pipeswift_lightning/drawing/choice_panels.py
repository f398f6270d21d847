"""A chosen plan beside what runs without costs, ready to be drawn."""

from pipeswift_lightning.drawing.panel import Panel
from pipeswift_lightning.plan.report import choice_timelines
from pipeswift_lightning.plan.search import Choice
from pipeswift_lightning.plan.workload import Workload

__all__ = ["choice_panels"]


def choice_panels(choice: Choice, workload: Workload) -> list[Panel]:
    """Return the predicted timelines of ``choice_timelines``, with each micro-batch's contents."""
    drawn = zip(
        choice_timelines(choice, workload).items(), (choice.plain, choice.chosen), strict=True
    )
    return [
        Panel(
            name,
            timeline,
            candidate.formation.sizes,
            tuple(map(round, candidate.formation.loads(workload.lengths))),
        )
        for (name, timeline), candidate in drawn
    ]
