"""Planning runs on every rank before torch is up, and in tools that have no torch at all."""

import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "src" / "pipeswift_lightning"
MODULES = sorted(
    ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts)
    for path in (PACKAGE / "plan").rglob("*.py")
    if path.name != "__init__.py"
)
HEAVY = ("torch", "lightning", "hydra", "omegaconf", "wandb")

# The package itself may import Lightning to register its strategy; an empty one stands in for it.
CODE = """
import importlib, sys, types
parent = types.ModuleType("pipeswift_lightning")
parent.__path__ = [{package!r}]
sys.modules["pipeswift_lightning"] = parent
for module in {modules!r}:
    importlib.import_module(module)
print(*[name for name in {heavy!r} if name in sys.modules])
"""


def loaded_by(modules: list[str]) -> list[str]:
    code = CODE.format(package=str(PACKAGE), modules=modules, heavy=HEAVY)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return done.stdout.split()


def test_planning_loads_no_framework() -> None:
    assert "pipeswift_lightning.plan.planner" in MODULES
    assert loaded_by(MODULES) == []


@pytest.mark.parametrize("module", ["torch"])
def test_the_test_above_can_fail(module: str) -> None:
    assert loaded_by([module]) == [module]
