"""Every file of ``conf/`` composes, builds what it names, and says when to choose it."""

from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf

CONF = Path(__file__).parents[2] / "conf"
FILES = sorted([*CONF.glob("*/*.yaml"), *CONF.glob("*/*/*.yaml")])
NESTED = [path for path in FILES if path.parent.parent != CONF]
WHOLE = ("experiment", "debug", "hparams_search")  # these set up several groups at once
PARTS = [
    f"{path.parent.name}={path.stem}"
    for path in FILES
    if path.parent.name not in WHOLE and path not in NESTED
]
SET_UPS = [f"{path.parent.name}={path.stem}" for path in FILES if path.parent.name in WHOLE]
PLAIN = {"hydra", "paths", "extras"}  # plain values: nothing to build
RECIPES = sorted(CONF.glob("*.yaml"))


def composed(folder: Path, *overrides: str) -> DictConfig:
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return compose(
            "train",
            overrides=[
                *overrides,
                f"paths.output_dir={folder}",
                f"paths.log_dir={folder}",
            ],
        )


@pytest.mark.parametrize("path", FILES, ids=lambda path: f"{path.parent.name}={path.stem}")
def test_every_file_says_when_to_choose_it(path) -> None:
    comment = [line for line in path.read_text().split("\n") if line.startswith("# ")]
    assert "Choose " in " ".join(comment)


@pytest.mark.parametrize("option", PARTS)
def test_every_option_builds(option, tmp_path) -> None:
    group, name = option.split("=")
    needs = {"text": [f"data.path={tmp_path}"], "gpu": ["trainer.accelerator=cpu"]}.get(name, [])
    cfg = composed(tmp_path, option, *needs)
    if group in PLAIN:
        return
    if group == "trainer":
        instantiate(cfg.trainer, logger=False)
    elif name == "none":
        assert dict(instantiate(cfg[group])) == {}
    else:
        assert instantiate(cfg[group]) is not None


@pytest.mark.parametrize("option", SET_UPS)
def test_every_experiment_and_debug_option_composes(option, tmp_path) -> None:
    cfg = composed(tmp_path, option)
    OmegaConf.to_container(cfg, resolve=True, throw_on_missing=True)
    for group in ("model", "data", "strategy", "callbacks", "logger"):
        instantiate(cfg[group])
    instantiate(cfg.trainer, logger=False)


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_every_recipe_has_a_configuration_that_composes(path) -> None:
    with initialize_config_dir(str(CONF), version_base="1.3"):
        cfg = compose(path.stem)
    assert cfg
    assert (CONF.parent / "recipes" / f"{path.stem}.py").is_file()


def test_no_file_is_left_out() -> None:
    """What the tests of this file do not reach has never been composed."""
    reached = {*RECIPES, *NESTED}
    reached |= {CONF / f"{option.replace('=', '/')}.yaml" for option in (*PARTS, *SET_UPS)}
    assert reached == set(CONF.rglob("*.yaml"))


@pytest.mark.parametrize("path", NESTED, ids=lambda path: f"{path.parent.name}={path.stem}")
def test_every_launcher_and_sweeper_builds(path, tmp_path) -> None:
    choice = f"{path.parent.relative_to(CONF)}={path.stem}"
    with initialize_config_dir(str(CONF), version_base="1.3"):
        cfg = compose("train", [choice], return_hydra_config=True)
    assert instantiate(cfg.hydra[path.parent.name]) is not None


def test_every_hyper_parameter_search_names_keys_that_exist(tmp_path) -> None:
    for path in CONF.glob("hparams_search/*.yaml"):
        with initialize_config_dir(str(CONF), version_base="1.3"):
            cfg = compose("train", [f"hparams_search={path.stem}"], return_hydra_config=True)
        assert cfg.hydra.sweeper.params
        params = [f"{key}={sweep}" for key, sweep in cfg.hydra.sweeper.params.items()]
        for override in OverridesParser.create().parse_overrides(params):
            assert override.is_sweep_override()
        for key in [*cfg.hydra.sweeper.params, *cfg.hydra.sweeper.only_if]:
            assert OmegaConf.select(cfg, key, default="absent") != "absent", key
        assert cfg.optimized_metric


def test_the_group_of_wandb_is_the_sweep(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("PIPESWIFT_SWEEP", "2026-01-01_00-00-00")
    cfg = composed(tmp_path, "logger=wandb", "tags=[a,b]")
    assert (cfg.logger.wandb.group, list(cfg.logger.wandb.tags)) == (
        "2026-01-01_00-00-00",
        ["a", "b"],
    )
    monkeypatch.delenv("PIPESWIFT_SWEEP")
    assert composed(tmp_path, "logger=wandb").logger.wandb.group is None


def test_a_whole_set_up_has_the_last_word(tmp_path) -> None:
    cfg = composed(tmp_path, "experiment=gpt_tiny", "debug=default")
    assert (cfg.trainer.devices, cfg.model.dim) == (1, 32)
    assert instantiate(cfg.strategy) == "auto"


def test_path_of_a_text_can_be_given_with_any_data_group(tmp_path) -> None:
    for overrides in ([], ["data=text"]):
        cfg = composed(tmp_path, *overrides, "data.path=some/folder")
        assert instantiate(cfg.data).path == "some/folder"


def test_model_and_data_agree_on_the_longest_sample(tmp_path) -> None:
    cfg = composed(tmp_path, "data.max_len=17")
    assert instantiate(cfg.model).hparams.max_len == 17
