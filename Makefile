# make setup | real | sample | test | test-fast | test-processors | test-device | test-oldest | lint | docs | help | wheel: each does all of its own set-up and can be repeated.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# One thread: the tests' models are tiny, and two threads on a busy machine are far slower than one.
export OMP_NUM_THREADS ?= 1

.PHONY: setup real sample test test-fast test-processors test-device test-oldest lint docs help wheel

# Bytecode is made of what is imported, when it is: that is under a third of what is installed. The warning that is left out
# says what an editable install is.
PIP_INSTALL := PYTHONWARNINGS='ignore:Editable installation' $(BIN)/python -m pip install --quiet --no-compile

REAL := $(VENV)/real/rxnmapper-0.4.3-py3-none-any.whl

setup: $(VENV)/.installed-dev real

# The package alone, and on top of it what tests, documentation and checks need.
$(VENV)/.installed: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP_INSTALL) --upgrade pip
	$(PIP_INSTALL) --constraint constraints.txt --editable .
	touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	$(PIP_INSTALL) --constraint constraints.txt --editable '.[dev]'
	touch $@

# A trained model of chemical reactions, for tests, benchmarks and an example. Its package wants an older Transformers than
# ours, so it is read from the wheel, not installed.
real: $(REAL)

$(REAL): $(VENV)/.installed
	$(BIN)/python -m pip download --quiet --no-deps --dest $(@D) rxnmapper==0.4.3
	touch $@

sample: $(VENV)/.installed
	rm -rf $(VENV)/samples.jsonl*
	$(BIN)/hf-ebm sample --text "and [MASK] the king said unto [MASK], [MASK] shall [MASK] thee." --num_chains 8 --num_epochs 50 \
	  --burn_in 25 --block_size 2 --block_fill sequential --block_layout contiguous --target_rhat 1.05 --max_rows 60000 \
	  --output $(VENV)/samples.jsonl

test: setup
	$(BIN)/python -m pytest --numprocesses auto --dist loadgroup

# An answer in under two minutes: everything but what takes long, a browser, the documentation's pages and notebooks.
test-fast: setup
	$(BIN)/python -m pytest --numprocesses auto --dist loadgroup -m "not slow and not browser and not docs and not notebooks"

# Half precision as on processors without kernels for it; oneDNN reads the variable once, so these are other processes.
test-processors: setup
	for isa in AVX2 SSE41; do ONEDNN_MAX_CPU_ISA=$$isa $(BIN)/python -m pytest --numprocesses auto --dist loadgroup \
	  -m half_precision $$(grep --recursive --files-with-matches --include='test_*.py' --exclude-dir=device half_precision tests) || exit; done

# On a second device, made for the tests, that keeps CUDA's rules: it is built by a C++ compiler, where there is one.
test-device: setup
	$(BIN)/python -m pytest -rs tests/device

# With the lowest versions that pyproject.toml allows, Transformers' own lowest among them: 5 GB, so by hand.
test-oldest:
	test -x $(VENV)/oldest/bin/python || $(PYTHON) -m venv $(VENV)/oldest
	$(VENV)/oldest/bin/python -m pip install --quiet --upgrade uv setuptools
	$(VENV)/oldest/bin/uv pip install --quiet --python $(VENV)/oldest --resolution lowest-direct '.[dev]'
	$(VENV)/oldest/bin/python -m pytest --numprocesses auto --dist loadgroup -m "not slow and not browser and not docs and not notebooks"

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --no-cache --no-logo
	$(BIN)/mypy

docs: setup
	$(BIN)/sphinx-build --fail-on-warning --keep-going --quiet docs docs/_build/html

# What `hf-ebm COMMAND --help` shows, from the options as they are declared.
help: setup
	$(BIN)/python -m hf_ebm.cli.help

wheel:
	.ci/check_wheel $(PYTHON)
