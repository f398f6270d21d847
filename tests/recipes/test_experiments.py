"""Every experiment trains, in small: its model and its data on two stages."""

import os
import sys
from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_dir
from hydra.utils import instantiate

from pipeswift_lightning.examples.hugging_face import HuggingFaceModule
from pipeswift_lightning.examples.hugging_face_data import DigitsDataModule
from pipeswift_lightning.strategies.weights import WeightFiles
from tests.helpers.parity import Outcome, make_trainer

CONF = Path(__file__).parents[2] / "conf"
EXPERIMENTS = sorted(path.stem for path in (CONF / "experiment").glob("*.yaml"))
SMALLER = ["strategy.micro_batches=2", "strategy.partition=null", "data.batch_size=8"]


def _fit(experiment: str, folder: Path) -> tuple[Any, Outcome]:
    named = (CONF / f"experiment/{experiment}.yaml").read_text()
    is_text = "hf_text" in named or "stdlib" in named
    text = ["data.max_samples=50", "data.max_len=32"] if is_text else []
    with initialize_config_dir(str(CONF), version_base="1.3"):
        cfg = compose(
            "train", [f"experiment={experiment}", f"paths.output_dir={folder}", *SMALLER, *text]
        )
    outcome = Outcome()
    trainer = make_trainer(
        instantiate(cfg.strategy),
        outcome,
        precision="32-true",
        max_steps=3,
        val_check_interval=3,
        limit_val_batches=1,
    )
    module = instantiate(cfg.model)
    trainer.fit(module, datamodule=instantiate(cfg.data))
    return module, outcome


@pytest.mark.slow
@pytest.mark.world_size(2, deadline_s=180)
def test_every_experiment_trains_on_two_stages(tmp_path: Path) -> None:
    os.environ["HF_HUB_OFFLINE"] = "1"
    for experiment in EXPERIMENTS:
        module, outcome = _fit(experiment, tmp_path)
        assert outcome.steps == 3, experiment
        assert outcome.metrics["val/loss"] < 7, experiment
        frozen = [n for n, p in module.named_parameters() if not p.requires_grad]
        assert bool(frozen) == (experiment == "hf_lora")


@pytest.mark.parametrize("package", ["transformers", "safetensors", "sklearn.datasets"])
def test_a_missing_package_is_named_with_its_remedy(package, monkeypatch, tmp_path) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    uses = {
        "transformers": lambda: HuggingFaceModule(config={"model_type": "llama"}).configure_model(),
        "safetensors": lambda: WeightFiles(tmp_path, []),
        "sklearn.datasets": lambda: DigitsDataModule().setup("fit"),
    }
    with pytest.raises((ModuleNotFoundError, ValueError), match=r"pip install '.*\[hf\]'"):
        uses[package]()
