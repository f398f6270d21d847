# Two commands: `make train` and `make test`. Both set up .venv first, if need be.
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
ARGS :=

.DEFAULT_GOAL := help
.PHONY: help train docs test coverage check test-fast test-dist test-gpu format clean

help: ## Show this help
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

train: $(STAMP) ## Train the example; more arguments: make train ARGS="trainer.max_steps=20 data.path=notes"
	$(BIN)/python recipes/train.py $(ARGS)

docs: $(STAMP) ## Build the documentation's site into site/; a broken link is an error
	$(BIN)/mkdocs build --strict

test: check ## Format, lint, layers, types, then every test
	$(BIN)/pytest -m "not gpu" $(ARGS)

coverage: $(STAMP) ## Every test, with what it covers (takes a fifth longer)
	$(BIN)/pytest -m "not gpu" --cov --cov-report=term:skip-covered $(ARGS)

check: $(STAMP) ## Format, lint, layers and types only
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/lint-imports
	$(BIN)/mypy

test-fast: $(STAMP) ## Tests of one process, each under five seconds
	$(BIN)/pytest -m "not slow and not gpu and not world_size" $(ARGS)

test-dist: $(STAMP) ## Tests of several processes, gloo on the CPU
	$(BIN)/pytest -m "world_size and not gpu" $(ARGS)

test-gpu: $(STAMP) ## Tests that need a GPU
	$(BIN)/pytest -m gpu $(ARGS)

format: $(STAMP) ## Format, and mend what ruff can
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean: ## Remove .venv and the caches
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis .coverage*

$(STAMP): pyproject.toml constraints.txt
	.ci/set-up $(VENV)
	@touch $(STAMP)
