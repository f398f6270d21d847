"""Single tensors are found in safetensors files, under the names that people's files have."""

import json
from pathlib import Path

import pytest
import torch
from lightning.pytorch import LightningModule
from safetensors.torch import save_file
from torch import nn

from pipeswift_lightning.runtime.materialise import MaterialiseError
from pipeswift_lightning.strategies.division import Division
from pipeswift_lightning.strategies.weights import WeightError, WeightFiles

ONE, TWO = torch.ones(2), torch.full((3,), 2.0)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_file({"layers.0.weight": ONE}, tmp_path / "a.safetensors")
    save_file({"layers.1.weight": TWO}, tmp_path / "b.safetensors")
    return tmp_path


def test_a_folder_with_an_index_and_a_single_file(folder: Path) -> None:
    single = WeightFiles(folder / "a.safetensors", ["layers.0.weight", "layers.1.weight"])
    assert single.find(["layers.1.weight"]) is None
    names = {"layers.0.weight": "a.safetensors", "layers.1.weight": "b.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    for prefix in ("", "model.", "model.base_model."):
        mine = [f"{prefix}layers.{i}.base_layer.weight" for i in range(2)]
        files = WeightFiles(folder, [*mine, f"{prefix}head.weight"])
        for name in (mine[1], f"{prefix}layers.1.weight"):
            found = files.find([name])
            assert found is not None
            assert torch.equal(found, TWO)
        assert files.missing({n: (n,) for n in (mine[0], "head.weight")}) == ["head.weight"]


def test_all_names_lack_the_same_prefix(folder: Path) -> None:
    names = ["net.layers.0.weight", "net.layers.1.weight", "net.other.layers.0.weight"]
    save_file({"layers.0.weight": ONE, "layers.1.weight": TWO}, folder / "c.safetensors")
    files = WeightFiles(folder / "c.safetensors", names)
    assert files.find([names[0]]) is not None
    assert files.find([names[2]]) is None


def test_files_without_an_index_or_of_another_model_are_refused(folder: Path) -> None:
    with pytest.raises(
        WeightError, match=r"holds 2 safetensors files and no index. Rule: .*Remedy:"
    ):
        WeightFiles(folder, [])
    files = WeightFiles(folder / "a.safetensors", ["other.weight"])
    with pytest.raises(
        WeightError, match=r"holds none of the module's parameters.*Rule: .*Remedy:"
    ):
        files.missing({"other.weight": ("other.weight",)})


def test_weights_for_a_module_that_has_data_are_refused(folder: Path) -> None:
    module = LightningModule()
    module.model = nn.Linear(1, 1)
    with pytest.raises(WeightError, match=r"have data already. Rule: .* Remedy: "):
        Division.of(module, folder / "a.safetensors", whole=False)


class _OnMeta(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        with torch.device("meta"):
            self.layers = nn.ModuleList(nn.BatchNorm1d(n) for n in (2, 3))


def _state() -> dict[str, torch.Tensor]:
    return nn.ModuleDict({"layers": nn.ModuleList(nn.BatchNorm1d(n) for n in (2, 3))}).state_dict()


@pytest.mark.parametrize("fault", ["unexpected", "missing buffer", "missing", "shape"])
def test_another_modules_checkpoint_is_refused(fault: str) -> None:
    state = _state()
    match fault:
        case "unexpected":
            state["layers.2.weight"] = ONE
        case "missing buffer":
            del state["layers.1.running_mean"]
        case "missing":
            del state["layers.1.weight"]
        case "shape":
            state["layers.1.weight"] = ONE
    division = Division.of(_OnMeta(), None, whole=False)
    assert division is not None
    with pytest.raises(MaterialiseError, match=r"layers\.[12]\.(?s:.*)Rule: .* Remedy: "):
        division.load(state, strict=True)


def test_what_a_partial_checkpoint_lacks_comes_from_the_files(folder: Path) -> None:
    files = {name: value + 3 for name, value in _state().items() if "num_" not in name}
    save_file(files, folder / "all.safetensors")
    module = _OnMeta()
    division = Division.of(module, folder / "all.safetensors", whole=False)
    assert division is not None
    division.load({"layers.0.weight": ONE * 9, "other": ONE}, strict=False)
    division.parameters(division.names)
    assert module.layers[0].weight.tolist() == [9, 9]
    assert module.layers[1].weight.tolist() == [4, 4, 4]
