"""Who watches a training that is killed, and compares what it leaves behind."""

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from pipeswift_lightning.runtime.checkpoint_directory import CheckpointDirectory
from pipeswift_lightning.runtime.sharded_state import read_table, read_tensors
from tests.helpers.killed.life import Life, digest
from tests.helpers.killed.ranks import Ranks

GONE_S = 60.0  # a survivor that is still there after so long is a hang


@dataclass
class Tally:
    """What was seen.

    Attributes:
        lives: Starts of the training.
        deaths: Of them, those that a death ended.
        hangs: Lives of which a rank was still there when time was up.
        slowest_s: From a death to the last survivor's exit.
        checked: Checkpoints that were compared with the undisturbed run's.
        wrong: Those that differed, and resumes from something else than the newest.
        lost: Deaths after which the newest checkpoint was older than before.
        steps: Lines of journals that were compared.
        different: Those that differed.
    """

    lives: int = 0
    deaths: int = 0
    hangs: list[str] = field(default_factory=list)
    slowest_s: float = 0.0
    checked: int = 0
    wrong: list[str] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    steps: int = 0
    different: list[str] = field(default_factory=list)

    @property
    def is_clean(self) -> bool:
        return not (self.hangs or self.wrong or self.lost or self.different)


class Witness:
    """Compares what a killed run leaves behind with what an undisturbed one made.

    Args:
        straight: Folder of the undisturbed run, which kept all of its checkpoints.
    """

    def __init__(self, straight: Path, devices: int = 2) -> None:
        self.straight = straight
        self.devices = devices
        self.tally = Tally()
        self._want = [dict(_lines(straight / f"journal{r}")) for r in range(devices)]

    def note_hang(self, what: str, life: Life, *, went: bool) -> None:
        """Count a hang, and keep its stacks."""
        if not went:
            said = (Path(life.folder) / "said").read_text()[-8000:]
            self.tally.hangs.append(f"life {self.tally.lives + 1}: {what}\n{said}")

    def look(self, life: Life, before: int, *, died: bool) -> int:
        """Look at a run after the end of a life; return the step of its newest checkpoint."""
        self.tally.lives += 1
        self.tally.deaths += died
        label = f"life {self.tally.lives} ({life.phase or 'killed'})"
        newest = CheckpointDirectory(life.saves).newest()
        step = 0 if newest is None else int(newest.name.removeprefix("step").partition("-")[0])
        if step < before:
            self.tally.lost.append(f"{label}: {step} after {before}")
        if newest is not None:
            self.tally.checked += 1
            if _tensors(newest) != _tensors(self.straight / "saves" / f"step{step}"):
                self.tally.wrong.append(f"{label}: {newest}")
        for rank, want in enumerate(self._want):
            file = Path(life.folder) / f"journal{rank}"
            for key, line in _lines(file):
                if key == "resumed":
                    if int(line) != before:
                        self.tally.wrong.append(f"{label}: resumed at {line}, not at {before}")
                    continue
                self.tally.steps += 1
                if want.get(key) != line:
                    self.tally.different.append(f"{label}: rank {rank}, step {key}")
            file.unlink(missing_ok=True)
        return step

    def look_at_the_end(self, life: Life) -> None:
        """Compare the final parameters and the state of the last checkpoint."""
        if not (Path(life.folder) / "final0.pt").exists():
            said = (Path(life.folder) / "said").read_text()[-2000:]
            self.tally.different.append(f"the last life did not come to its end: {said}")
            return
        for rank in range(self.devices):
            got, want = (
                torch.load(Path(folder) / f"final{rank}.pt", weights_only=True)
                for folder in (life.folder, self.straight)
            )
            if got.keys() != want.keys() or any(not got[n].equal(want[n]) for n in want):
                self.tally.different.append(f"the final parameters on rank {rank}")


def _lines(file: Path) -> Iterator[tuple[str, str]]:
    if file.exists():
        for line in file.read_text().splitlines(keepends=True):
            key, _, rest = line.partition(" ")
            if line.endswith("\n"):
                yield key, rest.strip()


def _tensors(path: Path) -> str:
    """A digest of all tensors in a checkpoint, by name."""
    table: Mapping[str, Any] = read_table(path)
    tensors = {name: torch.empty(shape, dtype=dtype) for name, (dtype, shape) in table.items()}
    read_tensors(path, tensors)
    return digest([tensors[name] for name in sorted(tensors)])


def undisturbed(folder: Path, steps: int, devices: int = 2) -> Witness:
    """Train once without any death, and keep every checkpoint."""
    folder.mkdir()
    life = Life(folder=str(folder), steps=steps, devices=devices, keep=None)
    went = Ranks(life, script=False).leave(120.0 + 5 * steps)
    if not went or not (folder / "final0.pt").exists():
        raise RuntimeError((folder / "said").read_text()[-4000:])
    return Witness(folder, devices)


def die_in(witness: Witness, life: Life, before: int, *, script: bool) -> int:
    """Live a life that ends by a death in a phase of a save; return the newest step then."""
    ranks = Ranks(life, script=script)
    witness.note_hang(life.phase, life, went=ranks.leave(120.0 + GONE_S))
    return witness.look(life, before, died=True)


def die_at_random(
    witness: Witness, life: Life, before: int, draw: Any, *, script: bool, progress: int = 8
) -> int:
    """Kill one rank or all, some steps later or right away; return the newest step then.

    Only a script is killed while it starts: before ranks have met, none but their launcher knows.
    """
    ranks = Ranks(life, script=script)
    victims = draw.choice([[0], [life.devices - 1], list(range(life.devices))])
    goal = before + draw.randint(0, progress)
    if script and draw.random() < 0.5:
        time.sleep(draw.random() * 20.0)
    else:
        _await_step(life, goal, ranks)
        time.sleep(draw.random() * 0.1)
    died = ranks.are_there()
    began = time.monotonic()
    ranks.kill(victims)
    went = ranks.leave(GONE_S)
    witness.note_hang(f"ranks {victims} killed, script={script}", life, went=went)
    witness.tally.slowest_s = max(witness.tally.slowest_s, time.monotonic() - began)
    return witness.look(life, before, died=died)


def _await_step(life: Life, goal: int, ranks: Ranks) -> None:
    file, end = Path(life.folder) / "journal0", time.monotonic() + 90.0
    while time.monotonic() < end and ranks.are_there():
        last = file.read_text().rpartition("\n")[0].rpartition("\n")[2] if file.exists() else ""
        key, _, rest = last.partition(" ")
        if last and int(rest if key == "resumed" else key) >= goal:
            return
        time.sleep(0.005)


def live_on(witness: Witness, life: Life, before: int, *, script: bool) -> None:
    """Live to the end."""
    went = Ranks(life, script=script).leave(120.0 + 5 * life.steps)
    witness.note_hang("the last life", life, went=went)
    witness.look(replace(life, phase="the last"), before, died=False)
    witness.look_at_the_end(life)
