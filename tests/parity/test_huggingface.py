"""Hugging Face models within ordinary LightningModules: parity, LoRA, and loading by stage."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import ModelCheckpoint

from pipeswift_lightning import PipeSwiftStrategy
from pipeswift_lightning.callbacks import TopologyCheckpoint
from tests.helpers import huggingface as hf
from tests.helpers.parity import Failures, Outcome, compare, differences, fit, on_rank_zero, plain

EPOCHS = 2  # of 4 batches
LENGTH: dict[str, Any] = {"max_epochs": EPOCHS, "max_steps": 5}


def _module(name: str) -> Callable[[], LightningModule]:
    kind = hf.HuggingFace
    if name in hf.MULTIMODAL:
        kind = hf.VisionLanguage
    elif name in hf.ADAPTED:
        kind = hf.Adapted
    return lambda: kind(hf.ALL[name][0]())


def _check(cases: Mapping[str, Mapping[str, Any]]) -> None:
    failures = Failures()
    for name, options in cases.items():
        module, loaders = _module(name), hf.ALL[name][1]
        want = plain(module, loaders, **LENGTH)
        strategy = {"micro_batches": 3, **options}
        compare(failures, name, module, loaders, strategy, want, **LENGTH)
    module = lambda: hf.LossOutside(hf.causal("Llama", attn_implementation="eager"))  # noqa: E731
    want = plain(module, hf.text_loaders, **LENGTH)
    compare(failures, "outside", module, hf.text_loaders, {}, want, **LENGTH)
    failures.check()


@pytest.mark.slow
@pytest.mark.world_size(2, deadline_s=180)
def test_models_on_two_stages() -> None:
    _check(
        {
            "Llama, tied": {},
            "Gemma3": {"loss_weight": "tokens", "loss": "per_sample"},
            "GPT-2": {},
            "Llama, checkpointed": {},
            "BERT, masked": {},
            "ViT": {"loss": "per_sample"},
            "LoRA, last layer": {},
            "LoRA, first layer": {},
        }
    )


FAMILIES = ("Qwen2", "Qwen3", "Mistral", "Gemma", "Gemma2", "Llama, eager", "Qwen2VL", "Qwen2_5_VL")


@pytest.mark.slow
@pytest.mark.world_size(2, deadline_s=180)
def test_every_family_on_two_stages() -> None:
    failures = Failures()
    strategy = {"micro_batches": 3, "loss": "per_sample", "loss_weight": "tokens"}
    options: dict[str, Any] = {"max_epochs": 1, "limit_train_batches": 2, "limit_val_batches": 1}
    for name in FAMILIES:
        module, loaders = _module(name), hf.ALL[name][1]
        want = plain(module, loaders, **options)
        compare(failures, name, module, loaders, strategy, want, **options)
    failures.check()


@pytest.mark.slow
@pytest.mark.world_size(2, deadline_s=120)
def test_whole_steps_run_any_model_on_two_stages() -> None:
    failures = Failures()
    options: dict[str, Any] = {"max_epochs": 1, "limit_train_batches": 2, "limit_val_batches": 1}
    for name in ("Llama, tied", "BERT, masked", "ViT"):
        module, loaders = _module(name), hf.ALL[name][1]
        want = plain(module, loaders, **options)
        strategy = {"micro_batches": 3, "loss": "transparent"}
        compare(failures, name, module, loaders, strategy, want, **options)
    failures.check()


@pytest.mark.world_size(1, deadline_s=120)
def test_models_on_one_stage() -> None:
    failures = Failures()
    for name, loss in (("GPT-2", "auto"), ("ViT", "auto"), ("Gemma3", "transparent")):
        module, loaders = _module(name), hf.ALL[name][1]
        want = plain(module, loaders, **LENGTH)
        strategy = {"micro_batches": 3, "loss": loss}
        compare(failures, name, module, loaders, strategy, want, **LENGTH)
    failures.check()


@pytest.mark.slow
@pytest.mark.world_size(4, deadline_s=180)
def test_vision_and_language_in_one_pipeline_of_four_stages() -> None:
    failures = Failures()
    module, loaders = _module("Qwen3VL"), hf.ALL["Qwen3VL"][1]
    want = plain(module, loaders, **LENGTH)
    compare(failures, "Qwen3VL", module, loaders, {"micro_batches": 4}, want, **LENGTH)
    failures.check()


# -- built on the meta device -----------------------------------------------------------------


class FromFolder(hf.HuggingFace):
    """Plain Lightning's way to load."""

    def __init__(self, folder: Path) -> None:
        super().__init__(torch.nn.Identity())
        self.folder = folder

    def configure_model(self) -> None:
        if isinstance(self.model, torch.nn.Identity):
            self.model = self.build()
            self.model.loss_function = hf.causal_loss
            hf.made_double(self.model)

    def build(self) -> torch.nn.Module:
        return transformers.AutoModelForCausalLM.from_pretrained(self.folder)


class Meta(FromFolder):
    """The pipeline's way: nothing has data until a stage needs it."""

    def build(self) -> torch.nn.Module:
        config = transformers.AutoConfig.from_pretrained(self.folder)
        with torch.device("meta"):
            return transformers.AutoModelForCausalLM.from_config(config)


def _joined(outcome: Outcome) -> Outcome:
    """Join the stages' shares, which stay apart at the end."""
    mine = {name: value for name, value in outcome.parameters.items() if not value.is_meta}
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, mine)
    assert all(len(share) < len(outcome.parameters) for share in every)
    outcome.parameters = {name: value for share in every for name, value in share.items()}
    return outcome


@pytest.mark.slow
@pytest.mark.world_size(2, deadline_s=180)
def test_a_module_on_the_meta_device_is_loaded_by_stage_and_resumed(tmp_path: Path) -> None:
    failures = Failures()
    folder = tmp_path / "model"
    on_rank_zero(lambda: hf.causal("Llama", tie_word_embeddings=True).save_pretrained(
        folder, max_shard_size="10KB"
    ))  # fmt: skip
    assert len(list(folder.glob("*.safetensors"))) > 2
    strategy = {"micro_batches": 3, "weights": folder}
    want = plain(lambda: FromFolder(folder), hf.text_loaders, max_epochs=EPOCHS)
    got = fit(lambda: Meta(folder), hf.text_loaders, PipeSwiftStrategy(**strategy),
              max_epochs=EPOCHS)  # fmt: skip
    failures.add("loaded", differences(_joined(got), want))
    saved = on_rank_zero(lambda: tmp_path / "saved")
    keep = lambda: [  # noqa: E731
        ModelCheckpoint(saved, save_last=True),
        TopologyCheckpoint(saved / "shards", every_n_steps=4 * (EPOCHS - 1)),
    ]
    fit(lambda: Meta(folder), hf.text_loaders, PipeSwiftStrategy(**strategy),
        max_epochs=EPOCHS - 1, callbacks=keep, enable_checkpointing=True)  # fmt: skip
    for source in (saved / "last.ckpt", TopologyCheckpoint.latest(saved / "shards")):
        again = fit(lambda: Meta(folder), hf.text_loaders, PipeSwiftStrategy(**strategy),
                    max_epochs=EPOCHS, ckpt_path=source)  # fmt: skip
        assert again.losses == pytest.approx(got.losses[-4:], abs=1e-10)
        for key, value in _joined(again).parameters.items():
            error = (value - got.parameters[key]).abs().max().item()
            failures.add(f"from {source}", [f"{key}: {error}"] if error > 1e-10 else [])
    failures.check()


# -- memory -----------------------------------------------------------------------------------

WIDE = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 16, "head_dim": 64,
        "num_attention_heads": 8, "num_key_value_heads": 8}  # fmt: skip


class Looked(Meta):
    """Runs one batch, in float32, so that a rank holds its parameters and little else."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val/loss", self.model(**batch).logits.mean())


def _bytes(name: str) -> int:
    line = next(x for x in Path("/proc/self/status").read_text().splitlines() if name in x)
    return int(line.split()[1]) << 10


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux")
@pytest.mark.world_size(2, deadline_s=180)
def test_no_rank_ever_holds_the_whole_model(tmp_path: Path) -> None:
    transformers.LlamaConfig(**{**hf.SMALL, **WIDE}).save_pretrained(tmp_path)
    module = Looked(tmp_path)
    module.configure_model()  # imports the model's code, and takes no memory itself
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew, at what is held now
    before = _bytes("VmRSS")
    trainer = hf.validating_trainer()
    trainer.validate(module, hf.text_loaders()[1], verbose=False)
    grown = _bytes("VmHWM") - before
    whole = sum(p.numel() * p.element_size() for p in module.parameters())
    assert whole > 200e6
    assert grown < 0.75 * whole, f"{grown / 1e6:.0f} of {whole / 1e6:.0f} MB"
