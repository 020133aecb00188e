# make run   set up and run the embedded job     make run ARGS="run.steps=40 staleness.max_staleness=1"
# make test  set up, check and test              make proof   the long proofs, ends in a table
PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.installed
TORCH := torch==2.13.0+cpu
# Where the CPU build of torch comes from when the configured package index has none.
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu

.DEFAULT_GOAL := help
.PHONY: help setup run test check format proof lock clean

help:
	@sed -n '1,2p' Makefile

setup: $(STAMP)

$(STAMP): requirements/cpu.lock pyproject.toml scripts/setup.sh
	@PYTHON="$(PYTHON)" TORCH="$(TORCH)" TORCH_INDEX="$(TORCH_INDEX)" bash scripts/setup.sh
	@touch $(STAMP)

run: $(STAMP)
	@$(BIN)/python -m echo_planes.run $(ARGS)

check: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	@echo "mypy, and beside it:"; $(BIN)/mypy & types=$$!; \
	$(BIN)/python -m pytest tests/unit/test_architecture.py; tests=$$?; \
	wait $$types && exit $$tests

test: check
	@bash scripts/test_tools.sh
	$(BIN)/python -m pytest tests/unit tests/sim -n 2 --ignore tests/unit/test_architecture.py --durations=40 $(ARGS)
	$(BIN)/python -m pytest tests/integration -n 2 --dist loadfile --no-loadscope-reorder --durations=20 $(ARGS)

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# A claim that fails ends none of the three: the exit status tells it at the end.
proof: $(STAMP)
	@failed=0; \
	$(BIN)/python -m bench.proof $(ARGS) || failed=1; \
	$(BIN)/python -m bench.size --json runs/size.json || failed=1; \
	$(BIN)/python -m bench.chaos all --folder runs/chaos --json runs/chaos.json || failed=1; \
	exit $$failed

# Resolve pyproject.toml again, for all Linux x86-64 machines (needs uv).
lock:
	uv pip compile pyproject.toml --extra cpu --extra test --override requirements/overrides.txt \
	  --generate-hashes --no-emit-package torch --python-version 3.11 \
	  --python-platform x86_64-manylinux_2_28 --no-header -o requirements/cpu.lock

clean:
	rm -rf .venv build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache
