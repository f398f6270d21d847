"""Kill a training over and over, resume it each time, and compare it with one that nobody killed.

    python -m benchmarks.kills --kills 50 --script-every 4

Each life of the run begins with `TopologyCheckpoint.latest`, and saves after every step. A random
rank, or both, are killed by `kill -9` some steps later, or while the life still starts; other lives
die in one phase of a save. In every fourth life rank 0 is a script that starts the other rank, as
for a user, and so its parent; the others are forked, which takes a tenth of the time.

"wrong" are checkpoints whose tensors differ from the undisturbed run's of that step, and resumes
from another than the newest; "lost" are deaths that made the newest checkpoint older; "differ" are
steps whose batch, loss, parameters or optimizer's state differ in any bit, on any rank, and final
parameters. There must be none of them.
"""

import argparse
import random
import sys
import tempfile
from pathlib import Path

from tests.helpers.killed.deaths import ANY_RANK, PHASES
from tests.helpers.killed.life import Life
from tests.helpers.killed.witness import (
    Tally,
    Witness,
    die_at_random,
    die_in,
    live_on,
    undisturbed,
)

COLUMNS = ("lives", "deaths", "hangs", "checked", "wrong", "lost", "steps", "differ", "last s")


class Runs:
    """Runs one after the other, each of so many steps, as deaths need them."""

    def __init__(self, folder: Path, steps: int, script_every: int) -> None:
        self._folder, self._steps, self._script_every = folder, steps, script_every
        self.witness: Witness = undisturbed(folder / "straight", steps)
        self._num = 0
        self._begin()

    def _begin(self) -> None:
        self._num += 1
        self._run = self._folder / f"run{self._num}"
        self._run.mkdir()
        self._newest = 0

    @property
    def _script(self) -> bool:
        every = self._script_every
        return every > 0 and self.witness.tally.lives % every == every - 1

    def life(self, **kwargs: object) -> Life:
        """The next life of the run; one in two saves in a thread."""
        in_thread = self.witness.tally.lives % 2 == 1
        return Life(folder=str(self._run), steps=self._steps, asynchronous=in_thread, **kwargs)  # type: ignore[arg-type]

    def at_random(self, draw: random.Random) -> None:
        self._newest = die_at_random(
            self.witness, self.life(), self._newest, draw, script=self._script
        )
        self._end_if_near()

    def in_phase(self, phase: str, rank: int, at: int) -> None:
        life = self.life(phase=phase, rank=rank, at=at)
        self._newest = die_in(self.witness, life, self._newest, script=self._script)
        self._end_if_near()

    def _end_if_near(self) -> None:
        tally = self.witness.tally
        print(_row(tally), f"newest {self._newest}", file=sys.stderr, flush=True)
        if self._newest > self._steps - 12:
            self.end()
            self._begin()

    def end(self) -> None:
        """Live to the end of the run, and compare what came of it."""
        live_on(self.witness, self.life(), self._newest, script=self._script)

    def report(self, what: str) -> bool:
        """Print what was seen since the last report."""
        tally, self.witness.tally = self.witness.tally, Tally()
        print(f"{what:>30}{_row(tally)}", flush=True)
        for line in (*tally.hangs, *tally.wrong, *tally.lost, *tally.different):
            print(f"    {line}", file=sys.stderr)
        return tally.is_clean


def _row(tally: Tally) -> str:
    found = (len(tally.wrong), len(tally.lost), tally.steps, len(tally.different))
    counts = (tally.lives, tally.deaths, len(tally.hangs), tally.checked, *found)
    return "".join(f"{count:>9}" for count in counts) + f"{tally.slowest_s:>9.1f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--steps", type=int, default=100, help="of a run")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--script-every", type=int, default=4, help="0: no scripts")
    options = parser.parse_args()
    draw = random.Random(options.seed)
    with tempfile.TemporaryDirectory() as folder:
        runs = Runs(Path(folder), options.steps, options.script_every)
        print(f"{'':>30}" + "".join(f"{column:>9}" for column in COLUMNS), flush=True)
        while runs.witness.tally.deaths < options.kills:
            runs.at_random(draw)
        runs.end()
        clean = runs.report("kill -9 at random")
        for phase in PHASES:
            for rank in (0, 1) if phase == ANY_RANK else (0,):
                runs.in_phase(phase, rank, at=draw.randint(1, 4))
        runs.end()
        clean &= runs.report("in each phase of a save")
    sys.exit(0 if clean else 1)


if __name__ == "__main__":
    main()
