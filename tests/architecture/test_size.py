"""Ratchets: files and functions stay small enough to read in one sitting."""

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "src" / "pipeswift_lightning"
MODULES = sorted(PACKAGE.rglob("*.py"))
MAX_LINES, MAX_FUNCTION_LINES = 400, 60


def names(path: Path) -> str:
    return str(path.relative_to(PACKAGE))


def test_modules_are_found() -> None:
    assert "plan/instructions.py" in map(names, MODULES)


@pytest.mark.parametrize("path", MODULES, ids=names)
def test_module_is_small_and_declares_its_exports(path: Path) -> None:
    text = path.read_text()
    functions = [
        node
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    lengths = {node.name: (node.end_lineno or 0) - node.lineno + 1 for node in functions}
    assert {name: n for name, n in lengths.items() if n > MAX_FUNCTION_LINES} == {}
    assert len(text.splitlines()) <= MAX_LINES
    assert path.name == "__init__.py" or "__all__" in text
