"""Every error that a user may see names the rule and the remedy beside the value."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "src" / "pipeswift_lightning"
MODULES = sorted(
    path for folder in ("strategies", "callbacks") for path in (PACKAGE / folder).rglob("*.py")
)


def texts(node: ast.AST, scopes: list[ast.AST], line: int) -> str:
    """Return every text that a message at ``line`` is made of, by names and functions too."""
    found = []
    for inner in ast.walk(node):
        match inner:
            case ast.Constant(value=str(value)):
                found.append(value)
            case ast.Name(id=name) | ast.Attribute(attr=name):
                found.append(_named(name, scopes, line))
    return " ".join(found)


def _named(name: str, scopes: list[ast.AST], line: int) -> str:
    """What a name was last given before ``line``, or what is said in a function of that name."""
    for scope in scopes:
        last = ""
        for inner in ast.walk(scope):
            match inner:
                case ast.Assign(targets=[ast.Name(id=target)]):
                    if target == name and inner.lineno < line:
                        last = texts(inner.value, scopes, inner.lineno)
                case ast.FunctionDef(name=target) if target == name and inner is not scope:
                    last = texts(ast.Module(inner.body, []), [], 0)
                case ast.ImportFrom(module=str(module), names=names):
                    if name in {alias.name for alias in names}:
                        last = _constant(PACKAGE.parent / f"{module.replace('.', '/')}.py", name)
        if last:
            return last
    return ""


def _constant(path: Path, name: str) -> str:
    for node in ast.parse(path.read_text()).body if path.exists() else ():
        match node:
            case ast.Assign(targets=[ast.Name(id=target)]) if target == name:
                return texts(node.value, [], 0)
    return ""


def raised(text: str) -> Iterator[tuple[int, str]]:
    """Return the line and the texts of each error that is made where it is raised."""
    tree = ast.parse(text)
    functions = [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef)]
    for node in ast.walk(tree):
        match node:
            case ast.Raise(exc=ast.Call(func=ast.Name(id=name), args=[first, *_])):
                if name.endswith("Error"):
                    around = [f for f in functions if f.lineno <= node.lineno <= f.end_lineno]
                    inner = max(around, key=lambda f: f.lineno) if around else tree
                    yield node.lineno, texts(first, [inner, tree], node.lineno)


def lacking(text: str) -> list[int]:
    return [n for n, said in raised(text) if "Rule: " not in said or "Remedy: " not in said]


@pytest.mark.parametrize("path", MODULES, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_errors_have_a_rule_and_a_remedy(path: Path) -> None:
    assert lacking(path.read_text()) == []


def test_the_test_above_can_fail() -> None:
    text = """
SAID = "x=1. Rule: x is 2. Remedy: x=2"

def f(x):
    msg = f"{x} is no"
    if x:
        raise ValueError(msg)
    msg = "Rule: x is 2. Remedy: x=2"
    if x > 3:
        raise ValueError(msg)
    raise ValueError(SAID)

def g():
    msg = "y"
    raise ValueError(h())

def h():
    return "Rule: y is 2. Remedy: y=2"
"""
    assert lacking(text) == [7]
    assert sum(len(list(raised(path.read_text()))) for path in MODULES) > 30
