"""A training that is killed, over and over: its worker, and who watches what it leaves behind.

Every rank writes a journal: a line an optimizer step with digests of the batch that it saw, its
loss, its parameters and its optimizer's state. So each step that any life of the run has made, kept
or lost, is compared with the same step of a run that nobody killed, bit by bit.
"""

import faulthandler
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from hashlib import blake2b
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint.filesystem as dcp_files
from lightning.pytorch import Callback, Trainer
from torch import Tensor
from torch.utils._pytree import tree_leaves

from pipeswift_lightning import PipeSwiftStrategy
from pipeswift_lightning.callbacks import TopologyCheckpoint
from pipeswift_lightning.runtime import checkpoint_directory
from pipeswift_lightning.runtime.checkpoint_directory import CheckpointDirectory, Commit
from pipeswift_lightning.runtime.process import ProcessIdentity
from pipeswift_lightning.runtime.sharded_state import ShardWriter, read_table, read_tensors
from tests.helpers.casts import PYTHON_PATH, free_port
from tests.helpers.distributed import fork_server
from tests.helpers.modules import Base
from tests.helpers.parity import quiet
from tests.helpers.resuming import Everything, shuffled

GONE_S = 60.0  # a survivor that is still there after so long is a hang


@dataclass(frozen=True, kw_only=True)
class Life:
    """One process group's part of a run.

    Attributes:
        folder: Where ranks write; the checkpoints are in ``saves/`` in it.
        phase: In which phase of a save to die, a key of ``PHASES``; empty for none.
        rank: Who dies there.
        at: In which save of this life (from 0).
    """

    folder: str
    steps: int
    devices: int = 2
    keep: int | None = 3
    asynchronous: bool = True
    phase: str = ""
    rank: int = 0
    at: int = 1

    @property
    def saves(self) -> Path:
        return Path(self.folder) / "saves"


# -- one rank ---------------------------------------------------------------------------------


class Steady(Everything):
    """Keeps learning: a plateau would bring the rate to nought in a long run."""

    configure_optimizers = Base.configure_optimizers


class Journal(Callback):
    """Writes what each step saw and made; a line is written at once, or not at all."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._file = -1
        self._loss: Any = None

    def on_train_start(self, trainer, module) -> None:
        path = self._folder / f"journal{trainer.global_rank}"
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        self._write("resumed", trainer.global_step)

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx) -> None:
        state = [
            value
            for parameter in trainer.optimizers[0].state.values()
            for _, value in sorted(parameter.items())
        ]
        made = [digest(x) for x in (batch, outputs, _local(module), state)]
        self._write(str(trainer.global_step), trainer.current_epoch, *made)

    def on_train_end(self, trainer, module) -> None:
        os.close(self._file)

    def _write(self, *words: object) -> None:
        os.write(self._file, (" ".join(map(str, words)) + "\n").encode())


def _local(module: Any) -> list[Tensor]:
    return [p for p in (*module.parameters(), *module.buffers()) if not p.is_meta]


def digest(value: Any) -> str:
    """A digest of every bit of the tensors in ``value``."""
    total = blake2b(digest_size=8)
    for leaf in tree_leaves(value):
        if isinstance(leaf, Tensor):
            total.update(leaf.detach().contiguous().numpy().tobytes())
    return total.hexdigest()


def live(life: Life) -> None:
    """Train, from the newest whole checkpoint if there is one."""
    quiet()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    torch.set_num_threads(1)
    torch.manual_seed(7)
    rank = int(os.environ.get("LOCAL_RANK", "0"))
    (Path(life.folder) / f"pid{rank}").write_text(ProcessIdentity.current().to_json())
    if life.phase and rank == life.rank:
        PHASES[life.phase](life.at)
    saves = TopologyCheckpoint(
        life.saves, every_n_steps=1, keep=life.keep, asynchronous=life.asynchronous
    )
    trainer = Trainer(
        strategy=PipeSwiftStrategy(micro_batches=2, silence_s=60.0),
        accelerator="cpu",
        devices=life.devices,
        max_steps=life.steps,
        precision="64-true",
        callbacks=[saves, Journal(Path(life.folder))],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
    )
    module = Steady().double()
    trainer.fit(module, *shuffled(), ckpt_path=TopologyCheckpoint.latest(life.saves))
    final = Path(life.folder) / f"final{rank}.tmp"
    torch.save(module.state_dict(), final)
    final.rename(final.with_suffix(".pt"))


# -- where in a save to die -------------------------------------------------------------------


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _around(
    owner: Any,
    name: str,
    at: int,
    *,
    before: bool = False,
    when: Callable[..., bool] = lambda *_: True,
) -> None:
    """Die at the call number ``at`` of a function for which ``when`` holds, or once it returns."""
    original, calls = getattr(owner, name), [0]

    def deadly(*args: Any, **kwargs: Any) -> Any:
        counted = when(*args)
        due = counted and calls[0] == at
        calls[0] += counted
        if due and before:
            _die()
        result = original(*args, **kwargs)
        if due:
            _die()
        return result

    setattr(owner, name, deadly)


def _makes_whole(_source: Any, target: Any, **_: Any) -> bool:
    return not str(target).endswith(".tmp")


def _moves_latest(_source: Any, target: Any, **_: Any) -> bool:
    return str(target).endswith(checkpoint_directory.LATEST)


def _in_a_shard(at: int) -> None:
    """Half of a tensor is written, and some before it."""
    calls = [0]
    original = ShardWriter.write_data

    def write_data(self: ShardWriter, *args: Any) -> Any:
        calls[0] += 1
        if calls[0] > at:
            _tear_tensors()
        return original(self, *args)

    ShardWriter.write_data = write_data  # type: ignore[method-assign]


def _tear_tensors() -> None:
    original, written = dcp_files._write_item, [0]

    def torn(transforms: Any, stream: Any, *args: Any) -> Any:
        result = original(transforms, stream, *args)
        written[0] += 1
        if written[0] == 3:
            stream.flush()
            os.ftruncate(stream.fileno(), stream.tell() - 100)
            _die()
        return result

    dcp_files._write_item = torn


def _in_a_removal(at: int) -> None:
    def half_removed(path: Any, *_: Any, **__: Any) -> None:
        next(iter(Path(path).iterdir())).unlink()
        _die()

    original, calls = shutil.rmtree, [0]

    def rmtree(path: Any, *args: Any, **kwargs: Any) -> None:
        calls[0] += 1
        (half_removed if calls[0] > at else original)(path, *args, **kwargs)

    checkpoint_directory.shutil.rmtree = rmtree  # type: ignore[assignment]


PHASES: dict[str, Callable[[int], None]] = {
    "before anything is written": lambda at: _around(Commit, "prepare", at, before=True),
    "in an empty folder": lambda at: _around(Commit, "prepare", at),
    "in the middle of a shard": _in_a_shard,
    "before the description": lambda at: _around(Commit, "complete", at, before=True),
    "before the rename": lambda at: _around(os, "rename", at, before=True, when=_makes_whole),
    "before LATEST moves": lambda at: _around(os, "replace", at, before=True, when=_moves_latest),
    "after LATEST has moved": lambda at: _around(os, "replace", at, when=_moves_latest),
    "while an old one is removed": _in_a_removal,
    "after the save": lambda at: _around(Commit, "complete", at),
}
ANY_RANK = "in the middle of a shard"  # the only one of them that is not rank 0's alone


# -- who watches ------------------------------------------------------------------------------


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


class Ranks:
    """The processes of one life."""

    def __init__(self, life: Life, *, script: bool) -> None:
        """Start them.

        Args:
            life: What they do.
            script: Whether rank 0 is a script that starts the others, as for a user; else all are
                forked, which takes a second instead of ten.
        """
        self._life = life
        self._files = [Path(life.folder) / f"pid{r}" for r in range(life.devices)]
        for file in self._files:
            file.unlink(missing_ok=True)
        self._said = (Path(life.folder) / "said").open("ab", buffering=0)
        self._script: subprocess.Popen[bytes] | None = None
        self._forked: list[Any] = []
        if script:
            environment = {**os.environ, "PYTHONPATH": PYTHON_PATH, "OMP_NUM_THREADS": "1"}
            command = [sys.executable, __file__, json.dumps(asdict(life))]
            self._script = subprocess.Popen(
                command, env=environment, stdout=self._said, stderr=self._said
            )
        else:
            port = free_port()
            for rank in range(life.devices):
                args = (rank, port, life, self._said.name)
                self._forked.append(fork_server().Process(target=_become, args=args))
                self._forked[-1].start()

    def identity(self, rank: int) -> ProcessIdentity | None:
        """The process of a rank, once it has said who it is."""
        file = self._files[rank]
        text = file.read_text() if file.exists() else ""
        return ProcessIdentity.from_json(text) if text.endswith("}") else None

    def kill(self, ranks: Sequence[int]) -> None:
        for rank in ranks:
            identity = self.identity(rank)
            if identity is not None:
                identity.kill()
        if self._script is not None and 0 in ranks:
            self._script.kill()

    def are_there(self) -> bool:
        if self._script is not None and self._script.poll() is None:
            return True
        if any(process.is_alive() for process in self._forked):
            return True
        known = [self.identity(rank) for rank in range(self._life.devices)]
        return any(identity is not None and identity.is_alive() for identity in known)

    def _show_stacks(self) -> None:
        for rank in range(self._life.devices):
            identity = self.identity(rank)
            if identity is not None and identity.is_alive():
                os.kill(identity.pid, signal.SIGUSR1)
        time.sleep(1.0)

    def leave(self, limit_s: float) -> bool:
        """Wait until none is there; whoever stays is killed. Return whether all went."""
        end = time.monotonic() + limit_s
        while self.are_there() and time.monotonic() < end:
            time.sleep(0.01)
        went = not self.are_there()
        if not went:
            self._show_stacks()
        self.kill(range(self._life.devices))
        for process in self._forked:
            process.kill()
            process.join()
        if self._script is not None:
            self._script.kill()
            self._script.wait()
        self._said.close()
        return went


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


def _become(rank: int, port: int, life: Life, said: str) -> None:
    """Be one rank: the variables are those that Lightning's launcher sets."""
    _leave_with_the_witness()
    os.environ.update(
        LOCAL_RANK=str(rank),
        NODE_RANK="0",
        WORLD_SIZE=str(life.devices),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )
    with Path(said).open("ab", buffering=0) as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    try:
        live(life)
    except BaseException:  # noqa: BLE001 -- shown as the interpreter would
        sys.excepthook(*sys.exc_info())
        os._exit(1)


def _leave_with_the_witness() -> None:
    """End this process when the one that watches is gone, whatever ended that."""
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


if __name__ == "__main__":
    if "LOCAL_RANK" not in os.environ:  # the others are rank 0's, and how they end is under test
        _leave_with_the_witness()
    live(Life(**json.loads(sys.argv[1])))
