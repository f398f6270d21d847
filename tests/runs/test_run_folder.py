"""What is read back of a run's folder, whatever state it is in."""

from pathlib import Path

from pipeswift_lightning.runs.run_folder import RunFolder

HEAD = "epoch,train/loss,step\n"


def write(folder: Path, version: int, text: str) -> None:
    path = folder / "csv" / f"version_{version}" / "metrics.csv"
    path.parent.mkdir(parents=True)
    path.write_text(text)


def test_a_resumed_run_is_one_series_in_the_order_of_its_versions(tmp_path) -> None:
    """`version_9` once came after `version_10`, and only the last was shown."""
    write(tmp_path, 9, HEAD + "0,3.0,10\n0,2.0,20\n0,9.0,30\n")
    write(tmp_path, 10, HEAD + "0,1.5,30\n0,1.0,40\n")  # from a checkpoint at step 20
    write(tmp_path, 11, HEAD)  # stopped before it logged
    series = RunFolder.read(tmp_path).series
    assert series == {"train/loss": [(10, 3.0), (20, 2.0), (30, 1.5), (40, 1.0)]}


def test_a_run_from_the_start_replaces_the_one_before(tmp_path) -> None:
    write(tmp_path, 0, "val/loss,step\n3.0,10\n2.0,20\n")
    write(tmp_path, 1, HEAD + "0,1.5,10\n")
    assert RunFolder.read(tmp_path).series == {"train/loss": [(10, 1.5)]}


def test_what_is_torn_is_left_out(tmp_path) -> None:
    whole = "epoch,val/loss,train/loss,step\r\n0,,1.5,1\r\n"
    for number, torn in enumerate(["2,1e", "0,,1.25,1", "0,2.5\r\n", "0,2.5,1e,x\r\n", "\0\0", ""]):
        write(tmp_path / str(number), 0, whole + torn)
        assert RunFolder.read(tmp_path / str(number)).series == {"train/loss": [(1, 1.5)]}
    write(tmp_path / "value", 0, whole + "0,2.5,1e,3\r\n")
    series = RunFolder.read(tmp_path / "value").series
    assert series == {"train/loss": [(1, 1.5)], "val/loss": [(3, 2.5)]}


def test_the_last_timeline_is_the_last_step(tmp_path) -> None:
    (tmp_path / "timelines").mkdir()
    for name in ("step_1000000.html", "step_999999.html"):
        (tmp_path / "timelines" / name).touch()
    assert RunFolder.read(tmp_path).timelines(".html")[-1].name == "step_1000000.html"
