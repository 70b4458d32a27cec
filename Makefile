# The commands of this project. Each sets up `.venv` first, which takes minutes once.
#   make demo    run examples/quickstart.py on a real small model
#   make test    run the CPU test suite
#   make docs    build the documentation into site/
#   make lint    ruff and mypy
#   make coverage-page    write docs/coverage.md: statements of behaviour and their tests

PYTHON ?= python3
# relative, so that a checkout in a folder with a space in its name works
VENV_PYTHON := .venv/bin/python
SETUP := $(PYTHON) tools/setup_env.py

.DEFAULT_GOAL := help
.PHONY: help setup demo test docs lint coverage-page clean

help:
	@sed -n 's/^#   //p' Makefile

setup:
	@$(SETUP) demo

demo: setup
	@$(VENV_PYTHON) -m midstream.cli demo-model
	$(VENV_PYTHON) examples/quickstart.py

test:
	@$(SETUP) demo test
	$(VENV_PYTHON) -m pytest

docs:
	@$(SETUP) docs
	NO_MKDOCS_2_WARNING=1 $(VENV_PYTHON) -m mkdocs build --strict

lint:
	@$(SETUP) lint
	$(VENV_PYTHON) -m ruff check .
	$(VENV_PYTHON) -m ruff format --check .
	$(VENV_PYTHON) -m mypy

coverage-page:
	@$(SETUP) lint
	$(VENV_PYTHON) tools/coverage_page.py

clean:
	rm -rf .venv site
