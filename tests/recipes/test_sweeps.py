"""Sweeps whose jobs have several processes, as a user starts them."""

import json
import os
import re
import subprocess
import sys
import time
import uuid
from pathlib import Path

import pytest

from tests.helpers.wandb_runs import WandbRun

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
MEMBERS = 6
SWEEPS = {
    "basic": (
        "hydra/launcher=basic",
        "trainer.devices=2,1",
        WRONG,
        "optimized_metric=val/loss",
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
        f"hydra.sweeper.num_members={MEMBERS}",
        "hydra.sweeper.predict={_target_: pipeswift_lightning.jobs.prediction.StepPredictor}",
        "hydra/launcher=basic",
        "callbacks=monitors",
        "+callbacks.step_record._target_=pipeswift_lightning.callbacks.StepRecord",
        "+callbacks.step_record.dirpath=${paths.output_dir}",
        "callbacks.job_report.every_n_steps=2",
        "callbacks.timeline_trace.every_n_steps=2",
        "callbacks.variance_monitor.window=2",
        "logger=wandb",
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
    until_s = time.monotonic() + 10  # what tracks the sweep's own memory ends after it
    while (left := left_of(mark)) and time.monotonic() < until_s:
        time.sleep(0.1)
    assert left == []
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
LOGGED = {
    "bubble/predicted",
    "job/share_training",
    "memory/stage_0_bytes",
    "throughput/samples_per_s",
    "val/loss",
    "variance/step_mean_s",
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


def test_an_unseeded_sampler_gives_all_ranks_of_a_job_one_configuration(folders) -> None:
    """Each rank once ran the sweep again, with a sampler of its own."""
    code, said = ended(folders["optuna"])
    assert code == 0, said
    tree = only_tree(folders["optuna"])
    numbers = [str(number) for number in range(MEMBERS)]
    names = {*numbers, "best.json", "multirun.yaml", "sweep.json"}
    assert {path.name for path in tree.iterdir()} == names
    seen = set()
    for number in numbers:
        ranks = digests(tree / number)
        assert sorted(ranks) == ["0", "1"]
        assert ranks["0"] == ranks["1"]
        seen.add(ranks["0"])
        pictures = {f"timelines/step_000002{end}" for end in (".html", ".png", ".trace.json.gz")}
        assert files(tree / number) == DONE | pictures | {
            "train_rank1.log",
            "measured_step.json",
            "step_costs.json",
        }
    assert len(seen) == MEMBERS
    members = json.loads((tree / "sweep.json").read_text())
    assert [m["state"] for m in members] == ["completed"] * MEMBERS


def test_each_member_of_a_sweep_is_one_run_of_wandb(folders) -> None:
    """None is lost, none doubled by its second process, and each holds its own member's numbers."""
    pytest.importorskip("wandb")
    tree = only_tree(folders["optuna"])
    every = list(tree.rglob("offline-run-*"))
    runs = [WandbRun.read(run) for run in sorted(every, key=lambda run: int(run.parts[-3]))]
    assert [int(run.folder.parts[-3]) for run in runs] == list(range(MEMBERS))
    assert len({run.told["run_id"] for run in runs}) == MEMBERS
    members = json.loads((tree / "sweep.json").read_text())
    for run, member in zip(runs, members, strict=True):
        assert (run.told["run_group"], run.exit_codes) == (tree.name, [0])
        rate = run.told["config"]["update"]["model"]["lr"]
        assert rate == pytest.approx(float(member["chosen"]["model.lr"]))
        steps = [row["trainer/global_step"] for row in run.history if "bubble/stage_1" in row]
        assert steps == [2]  # at the end
        assert {name for row in run.history for name in row} >= LOGGED
        assert (run.plan["stages"], run.plan["micro_batches"]) == (2, 8)
        assert run.picture().startswith(b"\x89PNG")


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
