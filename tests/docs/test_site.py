"""The documentation is built strictly, loads nothing from anywhere, and its commands are real."""

import ast
import re
import shlex
import subprocess
import sys
import tomllib
from importlib import import_module
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser

from tests.drawing.browser import CHROMIUM, Browser

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)
REMOTE = re.compile(
    r'<(?:script|img|iframe|link rel="(?:stylesheet|preload)")[^>]*(?:src|href)="http'
)


def blocks(language: str) -> list[tuple[str, str]]:
    return [
        (path.name, body)
        for path in PAGES
        for found, body in BLOCK.findall(path.read_text())
        if found == language
    ]


def commands() -> list[str]:
    lines = [
        line.removeprefix("$ ").strip()
        for _, body in blocks("console")
        for line in body.splitlines()
        if line.startswith("$ ")
    ]
    # In running text and tables, too.
    lines += [
        match
        for path in PAGES
        for match in re.findall(r"`((?:make|python) [^`]+)`", path.read_text())
    ]
    # And what recipes and benchmarks say of themselves.
    lines += [
        match
        for path in [*ROOT.glob("recipes/*.py"), *ROOT.glob("benchmarks/*.py")]
        for match in re.findall(r"^    (python .+)", path.read_text(), re.MULTILINE)
    ]
    return sorted({shlex.join(shlex.split(line, comments=True)) for line in lines})


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def test_every_link_leads_somewhere_and_nothing_is_loaded_from_the_network(site) -> None:
    pages = list(site.glob("*.html"))
    assert len(pages) > 12
    for page in pages:
        assert not REMOTE.search(page.read_text()), page.name
    assert "PipeSwiftStrategy" in (site / "api.html").read_text()
    assert "BatchNorm inside the network" in (site / "limits.html").read_text()


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here")
def test_a_browser_shows_and_searches_it_without_a_network(site, tmp_path) -> None:
    browser = Browser(tmp_path)
    try:
        browser.open((site / "sweeps.html").as_uri())
        assert browser.value("document.querySelector('h1').textContent").startswith("Sweeps")
        assert browser.value("!!document.querySelector('.md-search__input')")
        events = browser.events
        urls = [
            e["params"]["request"]["url"]
            for e in events
            if e["method"] == "Network.requestWillBeSent"
        ]
        assert [url for url in urls if url.startswith("http")] == []
        kinds = {e["method"] for e in events}
        assert not kinds & {"Runtime.exceptionThrown", "Log.entryAdded"}
    finally:
        browser.close()


def composes(recipe: str, arguments: list[str]) -> None:
    """Compose what a recipe is told, each member of a sweep; ``...`` stands for anything."""
    overrides = [
        a for a in arguments if "=" in a and not a.startswith("-") and not re.search(r"\.\.\.|<", a)
    ]
    given = OverridesParser.create().parse_overrides(overrides)
    sweeping = any(a in ("-m", "--multirun") for a in arguments)
    members: list[list[str]] = [[]]
    for override in given:
        values = [override.input_line]
        if override.is_sweep_override():
            assert sweeping or "hydra.sweeper" in override.input_line, override.input_line
            key = override.get_key_element()
            values = [f"{key}=1"]
            if override.is_discrete_sweep():
                values = [f"{key}={value}" for value in override.sweep_string_iterator()]
        members = [[*member, value] for member in members for value in values]
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        for member in members:
            compose(recipe, member, return_hydra_config=True)


def check(command: str) -> None:
    words = shlex.split(command)
    targets = re.findall(r"^([a-z-]+):.*##", (ROOT / "Makefile").read_text(), re.MULTILINE)
    match words:
        case ["make", target, *rest]:
            assert target in targets, command
            arguments = [w.removeprefix("ARGS=") for w in rest if w.startswith("ARGS=")]
            if target == "train" and arguments:
                composes("train", shlex.split(arguments[0]))
        case ["python", "-m", module, *rest]:
            file = Path(f"{module.replace('.', '/')}.py")
            found = [root / file for root in (ROOT, ROOT / "src") if (root / file).is_file()]
            assert found, command
            source = found[0].read_text()
            unknown = [word for word in rest if word.startswith("--") and f'"{word}"' not in source]
            assert not unknown, command
        case ["python", script, *rest]:
            assert (ROOT / script).is_file(), command
            if script.startswith("recipes/"):
                composes(Path(script).stem, rest)
        case ["pip", "install", *what]:
            project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
            extras = re.findall(r"[\w-]+", "".join(re.findall(r"\[(.*?)\]", "".join(what))))
            assert set(extras) <= set(project["optional-dependencies"]), command


@pytest.mark.parametrize("command", commands())
def test_commands_are_what_this_project_has(command) -> None:
    check(command)


@pytest.mark.parametrize(
    "command",
    [
        "make trian",
        "python recipes/train.py trainer.max_step=1",
        "python recipes/train.py -m experiment=gpt_tiny,gpt_huge",
        "python -m benchmarks.nothing",
        "python -m benchmarks.cut --nothing",
        "python recipes/compare.py folder=FOLDER nothing=1",
        "pip install '.[nothing]'",
    ],
)
def test_the_check_finds_mistakes(command) -> None:
    with pytest.raises(Exception, match=r"nothing|make trian|max_step|gpt_huge|folder"):
        check(command)


@pytest.mark.parametrize(("page", "code"), blocks("python"))
def test_code_is_code_and_imports_what_there_is(page, code) -> None:
    try:
        tree = ast.parse(code)
    except IndentationError:  # a method by itself
        tree = ast.parse(f"class Any:\n{code}")
    compile(tree, page, "exec")
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            module = import_module(node.module or "")
            for name in node.names:
                assert hasattr(module, name.name), f"{page}: {name.name}"
        elif isinstance(node, ast.Import):
            for name in node.names:
                import_module(name.name)
