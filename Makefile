# make demo     install, then compare softmax attention, linear attention and HYLA on fuzzy logic (minutes)
# make test     install with the test extras, then run the tests
# make install  .venv with the command hyla in it
# make lint     ruff and pyright;   make test-slow  the tests that take longer;   make test-gpu  those that need CUDA
# make docs     the documentation as HTML, in docs/_build/html

PYTHON ?= python3
PIP_ARGS ?=
BIN := .venv/bin
# Without --no-compile, pip turns 900 MB of libraries into bytecode, most of which nothing here ever imports.
PIP_INSTALL = $(BIN)/python -m pip install --quiet --no-compile --disable-pip-version-check $(PIP_ARGS) -c constraints.txt

.PHONY: install demo test test-slow test-gpu lint docs clean

install: .venv/.installed

demo: .venv/.installed
	$(BIN)/hyla compare logic --mechanisms softmax,linear,hyla --seeds 0,1,2 --budget quick --out runs/demo

test: .venv/.installed-test
	$(BIN)/python -m pytest -n 2 --dist loadgroup --durations 20 -m "not slow and not gpu"

test-slow: .venv/.installed-test
	$(BIN)/python -m pytest -m "slow and not gpu" -v

# Without the checks of signatures, which would wrap the source of the Triton kernels too.
test-gpu: .venv/.installed-test
	HYLA_TYPECHECK=0 $(BIN)/python -m pytest -m gpu -v

lint: .venv/.installed-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

docs: .venv/.installed
	$(PIP_INSTALL) -e '.[docs]'
	$(BIN)/sphinx-build -W -b html docs docs/_build/html

.venv/bin/python:
	$(PYTHON) -c 'import sys; sys.exit("hyla needs Python 3.11 to 3.13, this is " + sys.version.split()[0] if not (3, 11) <= sys.version_info[:2] <= (3, 13) else 0)'
	$(PYTHON) -m venv .venv || { echo "python3 -m venv failed; on Debian: apt-get install python3-venv"; exit 1; }

.venv/.installed: .venv/bin/python pyproject.toml constraints.txt
	$(PIP_INSTALL) -e '.[report,parquet,latents]'
	touch $@

.venv/.installed-test: .venv/bin/python pyproject.toml constraints.txt
	$(PIP_INSTALL) -e '.[test,lint]'
	touch .venv/.installed $@

clean:
	rm -rf .venv docs/_build
