from omegaconf import OmegaConf

from pipeswift_lightning.jobs.config_tree import show_config

CONFIG = {
    "seed": 3,
    "trainer": {"devices": 2, "max_steps": "${seed}"},
    "model": {"dim": 8},
    "paths": {"output_dir": None},
}


def test_the_tree_is_kept_and_printed_only_if_asked(tmp_path, capsys) -> None:
    cfg = OmegaConf.create(CONFIG | {"paths": {"output_dir": str(tmp_path / "run")}})
    show_config(cfg, printed=False)
    assert capsys.readouterr().out == ""
    text = (tmp_path / "run" / "config_tree.log").read_text()
    assert text.index("model") < text.index("trainer") < text.index("seed")
    assert "max_steps: 3" in text  # what the job gets, not where it comes from
    show_config(cfg, printed=True)
    assert "max_steps: 3" in capsys.readouterr().out
