"""An installed user composes the same groups from an application of their own."""

import subprocess
import sys
from textwrap import dedent

from hydra.core.plugins import Plugins
from hydra.plugins.search_path_plugin import SearchPathPlugin

from hydra_plugins import pipeswift_lightning_searchpath
from hydra_plugins.pipeswift_lightning_searchpath import PipeSwiftSearchPathPlugin, conf_folder


def test_hydra_finds_the_plugin() -> None:
    names = [plugin.__name__ for plugin in Plugins.instance().discover(SearchPathPlugin)]
    assert PipeSwiftSearchPathPlugin.__name__ in names


def test_an_application_elsewhere_composes_our_groups(tmp_path) -> None:
    (tmp_path / "app.yaml").write_text(
        "defaults: [{model: gpt}, {data: stdlib}, {model@mine: own}]\n"
    )
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "own.yaml").write_text("dim: 7\n")
    code = f"""
        from hydra import compose, initialize_config_dir
        with initialize_config_dir({str(tmp_path)!r}, version_base="1.3"):
            cfg = compose("app")
        print(cfg.model._target_, cfg.mine.dim)
    """
    answer = subprocess.run(
        [sys.executable, "-c", dedent(code)], capture_output=True, text=True, check=True
    )
    assert answer.stdout.split() == ["pipeswift_lightning.examples.GPTModule", "7"]


def test_the_plugin_does_not_import_the_package() -> None:
    code = (
        "import sys, hydra_plugins.pipeswift_lightning_searchpath as plugin;"
        "print(plugin.conf_folder() is not None, 'torch' in sys.modules)"
    )
    answer = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert answer.stdout.split() == ["True", "False"]


def test_a_wheels_copy_is_preferred(tmp_path, monkeypatch) -> None:
    package = tmp_path / "site-packages" / "pipeswift_lightning"
    inside, outside = package / "conf", tmp_path / "conf"
    for folder in (inside, outside):
        (folder / "strategy").mkdir(parents=True)
        (folder / "strategy" / "pipeswift.yaml").touch()
    spec = type("Spec", (), {"origin": str(package / "__init__.py")})()
    monkeypatch.setattr(pipeswift_lightning_searchpath, "find_spec", lambda name: spec)
    assert conf_folder() == inside
    (inside / "strategy" / "pipeswift.yaml").unlink()
    assert conf_folder() == outside
    (outside / "strategy" / "pipeswift.yaml").unlink()
    assert conf_folder() is None


def test_no_package_no_folder(monkeypatch) -> None:
    monkeypatch.setattr(pipeswift_lightning_searchpath, "find_spec", lambda name: None)
    assert conf_folder() is None
