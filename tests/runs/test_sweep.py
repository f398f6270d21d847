import json

import pytest
from rich.console import Console

from pipeswift_lightning.runs.run_folder import RunFolder, RunFolderError, find_runs
from pipeswift_lightning.runs.sweep import SweepTable
from pipeswift_lightning.runs.sweep_picture import sweep_png
from tests.runs.folders import STEPS, report, write_run, write_sweep


def printed(table: SweepTable) -> str:
    console = Console(width=100, record=True, quiet=False, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(table.render())
    console.file.close()
    return console.export_text()


def test_members_are_compared_and_the_least_is_marked(tmp_path) -> None:
    write_sweep(tmp_path)
    table = SweepTable.of(find_runs([tmp_path]))
    assert table.keys == ("strategy.micro_batches",)
    assert table.best.run.name == "2"
    assert [m.choices for m in table.members] == [("4",), ("8",), ("16",)]
    assert table.rows() == [
        [
            *("run", "micro_batches", "stages", "micro-batches", "schedule", "step, ms"),
            *("bubble", "completion, s"),
        ],
        ["0", "4", "2", "4", "1f1b", "160.0", "25.0%", "16.0"],
        ["1", "8", "2", "8", "1f1b", "120.0", "25.0%", "12.0"],
        ["2", "16", "2", "16", "1f1b", "110.0", "25.0%", "11.0"],
    ]
    text = printed(table)
    assert text.count("least") == 1
    assert "least 11.0" in text
    assert "3 of 4 runs have finished" in text
    assert "3 (strategy.micro_batches=64): failed. OptionError: 64 > <8>" in text


def test_a_pruned_member_is_told_with_its_choices_and_why(tmp_path) -> None:
    write_sweep(tmp_path)
    note = "a step of 0.5 s is predicted, 0.1 s was measured"
    write_run(tmp_path / "4", ["strategy.micro_batches=2"], None, pruned=note)
    text = " ".join(printed(SweepTable.of(find_runs([tmp_path]))).split())
    assert "3 of 5 runs have finished" in text
    assert f"4 (strategy.micro_batches=2): pruned. {note}" in text


def test_it_is_drawn_also_when_all_have_failed(tmp_path) -> None:
    pytest.importorskip("matplotlib")
    write_sweep(tmp_path / "a")
    assert sweep_png(SweepTable.of(find_runs([tmp_path / "a"])), dpi=40).startswith(b"\x89PNG")
    write_run(tmp_path / "b" / "0", ["seed=1"], None)
    table = SweepTable.of(find_runs([tmp_path / "b"]))
    assert (table.best, table.members) == (None, ())
    assert sweep_png(table, dpi=40).startswith(b"\x89PNG")
    assert "0 of 1 runs" in printed(table)


def test_keys_with_the_same_end_keep_their_names(tmp_path) -> None:
    for i in range(2):
        write_run(tmp_path / str(i), [f"a.n={i}", f"b.n={i}", f"+c={i}"], report(9.0, 4))
    assert SweepTable.of(find_runs([tmp_path])).rows()[0][:4] == ["run", "a.n", "b.n", "+c"]


def test_members_come_in_the_order_of_their_numbers(tmp_path) -> None:
    for number in (10, 9, 0):
        write_run(tmp_path / str(number), [], report(9.0, 4))
    assert [run.name for run in find_runs([tmp_path])] == ["0", "9", "10"]


def test_a_folder_without_runs_is_refused(tmp_path) -> None:
    with pytest.raises(RunFolderError, match=r"holds no run. Rule: .*Remedy: "):
        find_runs([tmp_path])


def test_a_run_is_read_as_far_as_it_goes(tmp_path) -> None:
    write_run(tmp_path / "run", ["seed=1", "x='a=b'"], report(12.0, 8))
    (run,) = find_runs([tmp_path / "run"])
    assert (run.name, run.status, run.choices) == ("run", "finished", {"seed": "1", "x": "'a=b'"})
    assert run.series["train/loss"] == [(step, 1 / (step + 1)) for step in STEPS if step]
    assert [step for step, _ in run.series["bubble/stage_1"]] == list(STEPS)
    assert [path.name for path in run.timelines(".html")] == ["step_000090.html"]
    (tmp_path / "run" / "job.json").write_text("{torn")
    torn = RunFolder.read(tmp_path / "run")
    assert (torn.status, torn.is_finished) == ("no report", False)
    (tmp_path / "run" / "job.json").write_text(json.dumps({"status": "failed", "error": "E: no"}))
    assert RunFolder.read(tmp_path / "run").error == "E: no"
