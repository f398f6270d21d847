"""Offline runs of W&B, read back by W&B's own reader."""

import json
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class WandbRun:
    """What one run's file holds.

    Args:
        folder: The run's.
        records: In the file's order.
    """

    folder: Path
    records: list[dict[str, Any]]

    @classmethod
    def read(cls, folder: Path) -> "WandbRun":
        """Read a run once its end is on disk: W&B's own process may write it after ``finish()``."""
        command = [sys.executable, "-m", "wandb", "leet", "inspect", "--json", str(folder)]
        for _ in range(20):
            answer = subprocess.run(
                command, capture_output=True, text=True, check=True, timeout=120
            )
            lines = [line for line in answer.stdout.splitlines() if line.startswith("{")]
            run = cls(folder, [json.loads(line) for line in lines])
            if run.of_kind("exit"):
                return run
            time.sleep(1)
        raise TimeoutError(f"{folder} has no end: {run.records[-3:]}")

    def of_kind(self, kind: str) -> list[dict[str, Any]]:
        return [record[kind] for record in self.records if record["type"] == kind]

    @property
    def told(self) -> dict[str, Any]:
        """Its name, project, group and first configuration."""
        return self.of_kind("run")[0]

    @property
    def exit_codes(self) -> list[int | None]:
        return [told.get("exit_code") for told in self.of_kind("exit")]

    @property
    def history(self) -> list[dict[str, Any]]:
        return [record["item"] for record in self.of_kind("history")]

    @property
    def plan(self) -> dict[str, Any]:
        """The one plan that it was told."""
        updates = [told.get("update", {}) for told in self.of_kind("config")]
        (plan,) = [update["job"]["plan"] for update in updates if "job" in update]
        return plan

    def picture(self) -> bytes:
        """Its one picture, a wide one."""
        (row,) = [row for row in self.history if row.get("timeline._type") == "images/separated"]
        assert row["timeline.width"] > 1000
        (name,) = row["timeline.filenames"]
        return (self.folder / "files" / name).read_bytes()
