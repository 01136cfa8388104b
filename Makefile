# Every target sets up what it needs: the stamp file says that the environment is complete.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.ok
RUNS   ?= runs/quickstart
WORKERS ?= 2

.PHONY: help quickstart test test-gpu lint bench figures clean
.DEFAULT_GOAL := help

help:
	@echo "make quickstart   set up, then fine-tune SmolLM2-135M's first layers privately on the BBC articles"
	@echo "make test         set up, then run the tests"
	@echo "make test-gpu     set up, then run every engine over nccl on the GPUs that there are"
	@echo "make lint         set up, then ruff and mypy"
	@echo "make bench        set up, then print FLOPs and time of a private step as ratios to a non-private one"
	@echo "make figures      set up, then draw the figures of docs/accounting.md again"
	@echo "make clean        remove the environment and caches (runs/ stays: it holds ledgers)"

$(STAMP): pyproject.toml constraints.txt requirements-quickstart.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "Python 3.11 or newer is needed; '$(PYTHON)' is older. Run: make PYTHON=python3.11"; exit 1; }
	@echo "Setting up $(VENV): about 2 GB from the package index and an op to compile, several minutes, once"
	@$(PYTHON) -m venv $(VENV) || { echo "python -m venv failed; on Debian or Ubuntu: apt install python3-venv"; exit 1; }
	$(BIN)/pip install --quiet --upgrade "pip>=24"
	$(BIN)/pip install --quiet -c constraints.txt -e ".[dev,deepspeed]"
	$(BIN)/pip install --quiet --no-deps -r requirements-quickstart.txt
	@timeout 600 $(BIN)/python -m dprc_lightning.strategies.deepspeed_op || \
	  echo "DeepSpeed: its op could not be built in 10 minutes (see above): its tests will fail, all else works"
	@touch $@

# Each run gets a folder of its own: a ledger is never overwritten.
quickstart: $(STAMP)
	@set -e; run=$(RUNS)/$$(date +%Y%m%d-%H%M%S); \
	fit="$(BIN)/dprc fit --config configs/quickstart.yaml"; \
	here="--trainer.logger.init_args.save_dir $$run --trainer.logger.init_args.version="; \
	echo "== 1/3 private: two transformer blocks, norms sketched"; $$fit $$here; \
	echo "== 2/3 the same run without privacy"; $$fit --config configs/quickstart_baseline.yaml $$here; \
	echo "== 3/3 private, frozen decoder: the head alone"; $$fit --config configs/quickstart_head_only.yaml $$here; \
	echo; $(BIN)/dprc report $$run/private --compare $$run/not_private $$run/head_only

# One thread per worker: two workers with two threads each crawl on two cores.
test: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/pytest -n $(WORKERS) --dist worksteal

test-gpu: $(STAMP)
	@$(BIN)/python -c 'import sys, torch; sys.exit(None if torch.cuda.is_available() else \
	  "make test-gpu: torch " + torch.__version__ + " finds no GPU here; run make test")'
	DPRC_TEST_ACCELERATOR=gpu OMP_NUM_THREADS=1 timeout 480 $(BIN)/pytest tests/distributed/test_engines.py

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/dprc bench step

figures: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python docs/figures/accounting.py
	OMP_NUM_THREADS=1 $(BIN)/python docs/figures/longcontext.py

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
