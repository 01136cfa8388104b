# Every target sets up what it needs: the stamp file says that the environment is complete.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.ok
RUNS   ?= runs/quickstart

.PHONY: help quickstart test lint bench clean
.DEFAULT_GOAL := help

help:
	@echo "make quickstart   set up, then fine-tune SmolLM2-135M's first layers privately on the BBC articles"
	@echo "make test         set up, then run the tests"
	@echo "make lint         set up, then ruff and mypy"
	@echo "make bench        set up, then print FLOPs and time of a private step as ratios to a non-private one"
	@echo "make clean        remove the environment and caches (runs/ stays: it holds ledgers)"

$(STAMP): pyproject.toml constraints.txt requirements-quickstart.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "Python 3.11 or newer is needed; '$(PYTHON)' is older. Run: make PYTHON=python3.11"; exit 1; }
	@$(PYTHON) -m venv $(VENV) || { echo "python -m venv failed; on Debian or Ubuntu: apt install python3-venv"; exit 1; }
	$(BIN)/pip install --quiet --upgrade "pip>=24"
	$(BIN)/pip install --quiet -c constraints.txt -e ".[dev]"
	$(BIN)/pip install --quiet --no-deps -r requirements-quickstart.txt
	@touch $@
