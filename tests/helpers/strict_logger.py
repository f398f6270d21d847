"""A logger that refuses what MLflow's refuses."""

import posixpath
import re
from pathlib import PurePosixPath
from types import SimpleNamespace

from lightning.fabric.utilities.logger import _flatten_dict

from tests.helpers.parity import RecordingLogger


class StrictLogger(RecordingLogger):
    """As strict as Lightning's MLFlowLogger on MLflow 3.17, which need not be installed."""

    def __init__(self) -> None:
        super().__init__()
        self.parameters: dict[str, str] = {}

    @property
    def experiment(self) -> SimpleNamespace:
        return SimpleNamespace(log_image=self._log_image)  # MlflowClient's asks for a run, too

    def _log_image(self, run_id: str, image: object, artifact_file: str) -> None:
        raise AssertionError("nothing knows the run")

    def names(self) -> set[str]:
        """The metrics' names; none is the folder of another."""
        names = {name for _, row in self.history for name in row}
        assert not names & {str(parent) for name in names for parent in PurePosixPath(name).parents}
        return names

    def log_metrics(self, metrics, step=None) -> None:
        for name in metrics:
            check_name(name)
        super().log_metrics(metrics, step)

    def log_hyperparams(self, params) -> None:
        for name, value in _flatten_dict(params).items():
            check_name(name)
            if self.parameters.setdefault(name, str(value)[:250]) != str(value)[:250]:
                raise RuntimeError(f"Changing param values is not allowed. Param with key={name!r}")


def check_name(name: str) -> None:
    assert re.fullmatch(r"[a-zA-Z0-9_/. -]+", name), name
    assert posixpath.normpath(name) == name  # as MLflow keeps it: a file in folders
