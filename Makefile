# Everything a newcomer needs; each target creates the environment if there is none.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# Processes that share the tests. One takes up to 5 GB, with the emulators that it starts.
WORKERS ?= $(shell awk '/^MemTotal/ { print ($$2 > 12e6 ? 2 : 1) }' /proc/meminfo 2> /dev/null || echo 1)
export PYTHONPATH := $(CURDIR)

.PHONY: demo test lint clean

# The main job: train a recommendation model in BF16 and in MXFP8 on MovieLens-100K, and compare.
demo: $(VENV)/.ready
	$(BIN)/python -m benchmarks train --config configs/train_ml100k.yaml

test: $(VENV)/.ready lint
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile

lint: $(VENV)/.ready
	$(BIN)/ruff check .
	$(BIN)/mypy

# Two packages come without their dependencies. torchrec names fbgemm-gpu, which would overwrite the CPU build. recbole is installed
# for one data file it ships; none of its code is imported.
$(VENV)/.ready: pyproject.toml Makefile
	$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "Python 3.11 or newer is needed; set PYTHON=")'
	$(PYTHON) -m venv --clear $(VENV)
	$(BIN)/python -m pip install --quiet --editable '.[kernels,torchrec-cpu,test]'
	$(BIN)/python -m pip install --quiet --no-deps torchrec==1.8.0 recbole==1.2.1
	touch $@

clean:
	rm -rf $(VENV)
