"""Recipes are scripts to run and to copy, not a library."""

raise ModuleNotFoundError(
    "recipes cannot be imported: run one (`python recipes/train.py`), or copy it and make it yours"
)
