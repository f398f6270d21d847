"""Sweeps whose jobs have several processes, as a user starts them."""

import json
import os
import re
import subprocess
import sys
import uuid
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
ROOT = Path(__file__).parents[2]
TINY = ("experiment=gpt_tiny", "extras=quiet", "trainer.max_steps=5", "logger=wandb")
MARK = "PIPESWIFT_TEST_SWEEP"


def sweep(folder: Path, *arguments: str) -> tuple[int, str]:
    """Run the recipe in ``folder`` to its end; no process of it may be left."""
    mark = uuid.uuid4().hex
    done = subprocess.run(
        [sys.executable, str(ROOT / "recipes" / "train.py"), "-m", *TINY, *arguments],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "src"), MARK: mark},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=580,
        check=False,
    )
    assert left_of(mark) == []
    return done.returncode, done.stdout


def left_of(mark: str) -> list[str]:
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if f"{MARK}={mark}".encode() in (process / "environ").read_bytes():
                found.append((process / "cmdline").read_text())
        except OSError:
            continue
    return [command for command in found if "wandb" not in command]  # its service ends by itself


def only_tree(folder: Path) -> Path:
    """The one folder of the one sweep."""
    (tree,) = (folder / "logs" / "gpt_tiny" / "multiruns").iterdir()
    assert [path.name for path in (folder / "logs" / "gpt_tiny").iterdir()] == ["multiruns"]
    return tree


def files(job: Path) -> set[str]:
    every = {str(path.relative_to(job)) for path in job.rglob("*") if path.is_file()}
    return {name for name in every if not name.startswith("wandb/") and name not in REPORTS}


def result(job: Path) -> dict:
    return json.loads((job / "job_result.json").read_text())


def digests(job: Path) -> dict[str, str]:
    """What each rank's log says of its configuration, by rank."""
    text = "\n".join(path.read_text() for path in job.glob("*.log"))
    return dict(re.findall(r"rank (\d+): configuration (\w+)", text))


ALWAYS = {
    ".hydra/config.yaml",
    ".hydra/hydra.yaml",
    ".hydra/overrides.yaml",
    "config_tree.log",
    "job_result.json",
    "train.log",
}
DONE = ALWAYS | {"checkpoints/last.ckpt", "checkpoints/step-5.ckpt"}
REPORTS = {"job.json"}


WRONG = "strategy.partition=[1,99],null"  # 4 layers; in one stage it is of no account
CRASH = "+callbacks.last={_target_: os.abort},{_target_: lightning.pytorch.callbacks.Timer}"


@pytest.mark.parametrize(
    ("launcher", "devices", "fault", "error", "ranks"),
    [
        ("basic", "2,1", WRONG, "PartitionError: partition=[1, 99]", {"train_rank1.log"}),
        ("isolated", "2", CRASH, "its process was killed by signal 6", set()),
    ],
)
def test_each_job_has_its_own_ranks_and_a_failed_one_does_not_end_the_sweep(
    launcher: str, devices: str, fault: str, error: str, ranks: set[str], tmp_path: Path
) -> None:
    """The second job once took itself for a rank of the first, and waited for ever.

    And what watched over the ranks of a failed job once ended the process in the middle of the
    next one.
    """
    code, said = sweep(
        tmp_path,
        f"hydra/launcher={launcher}",
        f"trainer.devices={devices}",
        fault,
        "optimized_metric=val/loss",
    )
    assert code == 1, said
    tree = only_tree(tmp_path)
    num_jobs = 2 * len(devices.split(","))
    jobs = [tree / str(number) for number in range(num_jobs)]
    assert {path.name for path in tree.iterdir()} == {*(j.name for j in jobs), "multirun.yaml"}
    results = [result(job) for job in jobs]
    assert [r["state"] for r in results] == ["failed", *["completed"] * (num_jobs - 1)], said
    assert results[0]["error"].startswith(error)
    assert files(jobs[0]) == ALWAYS | ranks
    losses = [r["value"] for r in results[1:]]
    assert losses == pytest.approx([losses[0]] * len(losses), rel=1e-3)
    for job in jobs[1:]:
        world_size = 2 if job is jobs[1] else 1
        assert files(job) == DONE | {f"train_rank{rank}.log" for rank in range(1, world_size)}
        (report_file,) = (job / name for name in REPORTS if (job / name).is_file())
        report = json.loads(report_file.read_text())
        assert (report["world_size"], report["steps"]) == (world_size, 5)
        configurations = digests(job)
        assert sorted(configurations) == [str(rank) for rank in range(world_size)]
        assert len(set(configurations.values())) == 1
        (run,) = job.glob("wandb/offline-run-*")
        (written,) = run.glob("*.wandb")
        assert tree.name.encode() in written.read_bytes()  # the group


def test_an_unseeded_sampler_gives_all_ranks_of_a_job_one_configuration(tmp_path: Path) -> None:
    """Each rank once ran the sweep again, with a sampler of its own."""
    code, said = sweep(
        tmp_path,
        "hydra/sweeper=pipeswift_optuna",
        "hydra.sweeper.sampler={_target_: optuna.samplers.RandomSampler}",
        "hydra.sweeper.num_members=2",
        "hydra.sweeper.predict={_target_: pipeswift_lightning.jobs.prediction.StepPredictor}",
        "hydra/launcher=basic",
        "callbacks=step_record",
        "optimized_metric=step_s.median",
        "trainer.devices=2",
        "model.lr=interval(0.001,0.1)",
    )
    assert code == 0, said
    tree = only_tree(tmp_path)
    names = {"0", "1", "best.json", "multirun.yaml", "sweep.json"}
    assert {path.name for path in tree.iterdir()} == names
    seen = set()
    for number in range(2):
        ranks = digests(tree / str(number))
        assert sorted(ranks) == ["0", "1"]
        assert ranks["0"] == ranks["1"]
        seen.add(ranks["0"])
        assert files(tree / str(number)) == DONE | {
            "train_rank1.log",
            "measured_step.json",
            "step_costs.json",
        }
    assert len(seen) == 2
    members = json.loads((tree / "sweep.json").read_text())
    assert [m["state"] for m in members] == ["completed", "completed"]


@pytest.mark.parametrize("launcher", ["joblib", "submitit_local"])
def test_ranks_start_from_processes_that_do_not_know_the_script(
    launcher: str, tmp_path: Path
) -> None:
    """Lightning would run joblib's worker again, which ends in an error about `--pipe`."""
    code, said = sweep(
        tmp_path,
        f"hydra/launcher={launcher}",
        "trainer.devices=2",
        "callbacks=none",
        "optimized_metric=val/loss",
    )
    assert code == 0, said
    job = only_tree(tmp_path) / "0"
    assert result(job)["state"] == "completed"
    configurations = digests(job)
    assert sorted(configurations) == ["0", "1"]
    assert configurations["0"] == configurations["1"]
