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
TINY = (
    "experiment=gpt_tiny",
    "extras=quiet",
    "trainer.max_steps=2",
    "trainer.val_check_interval=2",
    "+trainer.num_sanity_val_steps=0",
    "trainer.limit_val_batches=1",
    "data.max_samples=40",
    "model.dim=8",
)
MARK = "PIPESWIFT_TEST_SWEEP"
WRONG = "strategy.partition=[1,99],null"  # 4 layers; in one stage it is of no account
CRASH = "+callbacks.last={_target_: os.abort},{_target_: lightning.pytorch.callbacks.Timer}"
SWEEPS = {
    "basic": (
        "hydra/launcher=basic",
        "trainer.devices=2,1",
        WRONG,
        "optimized_metric=val/loss",
        "logger=wandb",
    ),
    "isolated": (
        "hydra/launcher=isolated",
        "trainer.devices=1",
        CRASH,
        "optimized_metric=val/loss",
    ),
    "optuna": (
        "hydra/sweeper=pipeswift_optuna",
        "hydra.sweeper.sampler={_target_: optuna.samplers.RandomSampler}",
        "hydra.sweeper.num_members=2",
        "hydra.sweeper.predict={_target_: pipeswift_lightning.jobs.prediction.StepPredictor}",
        "hydra/launcher=basic",
        "callbacks=step_record",
        "optimized_metric=step_s.median",
        "trainer.devices=2",
        "model.lr=interval(0.001,0.1)",
    ),
    **{
        launcher: (
            f"hydra/launcher={launcher}",
            "trainer.devices=2",
            "callbacks=none",
            "optimized_metric=val/loss",
        )
        for launcher in ("joblib", "submitit_local")
    },
}
# One process runs all sweeps: importing torch and Lightning takes most of each one's time.
PROGRAM = """
import json, os, runpy, sys, traceback
script, sweeps = json.loads(sys.argv[1])
for folder, arguments in sweeps:
    os.chdir(folder)
    sys.argv = [script, "-m", *arguments]
    code = 0
    with open("said.txt", "w") as said:
        kept = os.dup(1), os.dup(2)
        os.dup2(said.fileno(), 1), os.dup2(said.fileno(), 2)
        try:
            runpy.run_path(script, run_name="__main__")
        except SystemExit as stop:
            code = stop.code
        except Exception:
            traceback.print_exc()
            code = 1
        sys.stdout.flush(), sys.stderr.flush()
        os.dup2(kept[0], 1), os.dup2(kept[1], 2)
    open("code.txt", "w").write(str(code))
"""


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    """Run the recipe's sweeps, each in a folder of its own; no process of them may be left."""
    found = {name: tmp_path_factory.mktemp(name) for name in SWEEPS}
    sweeps = [(str(found[name]), [*TINY, *more]) for name, more in SWEEPS.items()]
    mark = uuid.uuid4().hex
    subprocess.run(
        [
            sys.executable,
            "-c",
            PROGRAM,
            json.dumps([str(ROOT / "recipes" / "train.py"), sweeps]),
        ],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "src"), MARK: mark},
        timeout=580,
        check=True,
    )
    assert left_of(mark) == []
    return found


def ended(folder: Path) -> tuple[int, str]:
    """A sweep's exit code, and what it said."""
    return int((folder / "code.txt").read_text()), (folder / "said.txt").read_text()


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
    return {n for n in every if not n.startswith(("wandb/", "csv/")) and n not in REPORTS}


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
DONE = ALWAYS | {"checkpoints/last.ckpt", "checkpoints/step-2.ckpt"}
REPORTS = {"job.json", "progress.json"}


@pytest.mark.parametrize(
    ("launcher", "world_sizes", "error", "ranks"),
    [
        ("basic", (2, 2, 1, 1), "PartitionError: partition=[1, 99]", {"train_rank1.log"}),
        ("isolated", (1, 1), "its process was killed by signal 6", set()),
    ],
)
def test_each_job_has_its_own_ranks_and_a_failed_one_does_not_end_the_sweep(
    launcher, world_sizes, error, ranks, folders
) -> None:
    """The second job once took itself for a rank of the first, and waited for ever.

    And what watched over the ranks of a failed job once ended the process in the middle of the
    next one.
    """
    code, said = ended(folders[launcher])
    assert code == 1, said
    tree = only_tree(folders[launcher])
    jobs = [tree / str(number) for number in range(len(world_sizes))]
    assert {path.name for path in tree.iterdir()} == {*(j.name for j in jobs), "multirun.yaml"}
    results = [result(job) for job in jobs]
    assert [r["state"] for r in results] == ["failed", *["completed"] * (len(jobs) - 1)], said
    assert results[0]["error"].startswith(error)
    assert files(jobs[0]) == ALWAYS | ranks
    losses = [r["value"] for r in results[1:]]
    assert losses == pytest.approx([losses[0]] * len(losses), rel=1e-3)
    for job, world_size in zip(jobs[1:], world_sizes[1:], strict=True):
        assert files(job) == DONE | {f"train_rank{rank}.log" for rank in range(1, world_size)}
        report = json.loads((job / "job.json").read_text())
        assert (report["world_size"], report["steps"]) == (world_size, 2)
        configurations = digests(job)
        assert sorted(configurations) == [str(rank) for rank in range(world_size)]
        assert len(set(configurations.values())) == 1
        if launcher == "basic":
            (run,) = job.glob("wandb/offline-run-*")
            (written,) = run.glob("*.wandb")
            assert tree.name.encode() in written.read_bytes()  # the group


def test_an_unseeded_sampler_gives_all_ranks_of_a_job_one_configuration(folders) -> None:
    """Each rank once ran the sweep again, with a sampler of its own."""
    code, said = ended(folders["optuna"])
    assert code == 0, said
    tree = only_tree(folders["optuna"])
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
def test_ranks_start_from_processes_that_do_not_know_the_script(launcher, folders) -> None:
    """Lightning would run joblib's worker again, which ends in an error about `--pipe`."""
    code, said = ended(folders[launcher])
    assert code == 0, said
    job = only_tree(folders[launcher]) / "0"
    assert result(job)["state"] == "completed"
    configurations = digests(job)
    assert sorted(configurations) == ["0", "1"]
    assert configurations["0"] == configurations["1"]
