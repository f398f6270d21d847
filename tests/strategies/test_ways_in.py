"""From a notebook, from LightningCLI, and under a cluster's scheduler."""

import os
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from torch.distributed import TCPStore

from tests.helpers.scripts import started

ROOT = Path(__file__).parents[2]
VARIABLES = {
    "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)]),
    "OMP_NUM_THREADS": "1",
}
LIMIT_S = 120.0

MODULE = """
import torch
import pipeswift_lightning
from lightning.pytorch import LightningModule, Trainer
from torch import nn
from torch.utils.data import DataLoader


class Plain(LightningModule):
    def __init__(self, width: int = 4):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(*(nn.Linear(width, width) for _ in range(4)))

    def training_step(self, batch, batch_idx):
        loss = (self.net(batch) - batch).pow(2).mean()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def train_dataloader(self):
        return DataLoader(torch.arange(64.0).reshape(16, 4) / 64, batch_size=8)

"""
QUIET = (
    "logger=False, enable_checkpointing=False, enable_progress_bar=False, "
    "enable_model_summary=False, accelerator='cpu', max_epochs=2"
)
FIT = f"""
trainer = Trainer(strategy=STRATEGY, devices=DEVICES, {QUIET})
module = Plain()
trainer.fit(module)
with torch.no_grad():
    found = sum(p.double().sum() for p in module.parameters())
print(f"RESULT rank {{trainer.global_rank}} of {{trainer.world_size}}: {{found.item():.6f}}")
"""


def fitting(strategy: str, devices: int) -> str:
    return FIT.replace("STRATEGY", repr(strategy)).replace("DEVICES", str(devices))


def results(said: str) -> list[str]:
    # Ranks share the pipe: one's line may begin behind another's, before its line end is written.
    return sorted(re.findall(r"RESULT (rank \d+ of \d+: -?\d+\.\d{6})", said))


def completed(command: list[str], **kwargs: object) -> str:
    done = subprocess.run(  # type: ignore[call-overload]
        command,
        env={**os.environ, **VARIABLES},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=LIMIT_S,
        check=False,
        **kwargs,
    )
    assert done.returncode == 0, done.stdout
    return str(done.stdout)


def run(
    scripts: list[Path],
    folder: Path,
    arguments: Sequence[str] = (),
    variables: Callable[[int], dict[str, str]] = lambda _: {},
) -> list[str]:
    """Run each script in a process of its own, at the same time; return what they say."""
    said = [folder / f"said{r}" for r in range(len(scripts))]
    processes = [
        started(
            script,
            *arguments,
            said=said[r],
            folder=folder,
            environment={**VARIABLES, **variables(r)},
        )
        for r, script in enumerate(scripts)
    ]
    try:
        for process in processes:
            process.join(LIMIT_S)
    finally:
        for process in processes:
            process.kill()
            process.join()
    texts = [file.read_text() for file in said]
    assert [process.exitcode for process in processes] == [0] * len(scripts), texts
    return texts


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> str:
    """What one device comes to, in plain Lightning."""
    folder = tmp_path_factory.mktemp("alone")
    script = folder / "train.py"
    script.write_text(MODULE + fitting("auto", 1))
    (found,) = results(*run([script], folder))
    return found.partition(": ")[2]


@pytest.mark.slow
def test_cells_of_a_notebook(alone: str) -> None:
    """In an interactive interpreter Lightning accepts no strategy that runs a script again."""
    said = completed([sys.executable, "-i", "-c", MODULE + fitting("pipeswift", 2)], input="")
    assert results(said) == [f"rank 0 of 2: {alone}"]


@pytest.mark.slow
def test_lightning_cli(alone: str, tmp_path: Path) -> None:
    script = tmp_path / "cli.py"
    script.write_text(
        MODULE
        + """
from lightning.pytorch.cli import LightningCLI

cli = LightningCLI(Plain, save_config_callback=None)
found = sum(p.double().sum() for p in cli.model.parameters())
print(f"RESULT rank {cli.trainer.global_rank} of {cli.trainer.world_size}: {found.item():.6f}")
"""
    )
    config = tmp_path / "config.yaml"
    config.write_text(
        """\
trainer:
  accelerator: cpu
  devices: 2
  max_epochs: 2
  logger: false
  enable_checkpointing: false
  enable_progress_bar: false
  enable_model_summary: false
  strategy:
    class_path: pipeswift_lightning.PipeSwiftStrategy
    init_args:
      micro_batches: [2, 2, 4]
      schedule: gpipe
      warm_up: null
"""
    )
    (said,) = run([script], tmp_path, ["fit", "--config", str(config)])
    assert results(said) == [f"rank 0 of 2: {alone}", f"rank 1 of 2: {alone}"]


SIGNALLED = """
import os, signal
from lightning.pytorch import Callback


class Preempted(Callback):
    '''The scheduler signals one rank, in the middle of a step.'''

    def on_before_zero_grad(self, trainer, module, optimizer):
        if trainer.global_rank == 1 and trainer.global_step == 2 and not os.path.exists("asked"):
            open("asked", "w").close()
            os.kill(os.getpid(), signal.SIGUSR1)

"""


def under_slurm(code: str, folder: Path) -> list[str]:
    """Start two ranks with the variables that srun sets; return what they say."""
    store = TCPStore("127.0.0.1", 0, is_master=True)
    port = store.port
    del store
    tasks = {
        "SLURM_JOB_ID": "17",
        "SLURM_JOB_NAME": "train",
        "SLURM_NTASKS": "2",
        "SLURM_NTASKS_PER_NODE": "2",
        "SLURM_NNODES": "1",
        "SLURM_NODELIST": "127.0.0.1",
        "SLURM_NODEID": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "PATH": f"{folder}{os.pathsep}{os.environ['PATH']}",
    }
    script = folder / "train.py"
    script.write_text(code)
    return run(
        [script] * 2,
        folder,
        variables=lambda r: {**tasks, "SLURM_PROCID": str(r), "SLURM_LOCALID": str(r)},
    )


@pytest.mark.slow
def test_ranks_that_slurm_has_started_and_signals(alone: str, tmp_path: Path) -> None:
    """One signalled rank is enough; all save after the step, and a requeued job goes on from it."""
    scontrol = tmp_path / "scontrol"
    scontrol.write_text("#!/bin/sh\necho $@ >> requeued\n")
    scontrol.chmod(0o755)
    code = (
        MODULE
        + SIGNALLED
        + fitting("pipeswift", 2).replace(
            "accelerator='cpu'", "accelerator='cpu', default_root_dir='.', callbacks=[Preempted()]"
        )
    )
    said = under_slurm(code, tmp_path)
    assert results("\n".join(said)) == [f"rank 0 of 2: {alone}", f"rank 1 of 2: {alone}"]
    assert (tmp_path / "requeued").read_text() == "requeue 17\n"
    (saved,) = tmp_path.glob("hpc_ckpt_*.ckpt")
    assert torch.load(saved, weights_only=True)["global_step"] == 3
    said = under_slurm(code, tmp_path)
    assert "Restored all states" in said[0]
    # Lightning begins the epoch's data anew, so the result is another; the ranks agree on it.
    first, second = (line.partition(": ")[2] for line in results("\n".join(said)))
    assert first == second
