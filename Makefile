# Needs only make and Python 3.11 or newer; everything else goes into $(VENV).
#   make demo PYTHON=python3.12                                             another interpreter
#   make demo PIP_FLAGS="--extra-index-url https://download.pytorch.org/whl/cpu"   a small torch on Linux without a GPU
# The first interpreter that is new enough.
PYTHON ?= $(shell for p in python3 python3.11 python3.12 python3.13 python3.14; do \
    $$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
VENV ?= .venv
PIP_FLAGS ?=
PYTEST_FLAGS ?= --numprocesses=auto --maxprocesses=8 --dist=worksteal
DEMO_FLAGS ?=

PY := $(VENV)/bin/python
SPEC := pyproject.toml constraints.txt

.DEFAULT_GOAL := help
.PHONY: help demo test stress fuzz coverage lint ruff layers mypy pyright format bench examples docs dist ci dev clean

help:  ## this list
	@awk -F':.*## ' '/^[a-z]+:.*## / { printf "make %-8s %s\n", $$1, $$2 }' Makefile

demo: $(VENV)/.installed-demo  ## set up and run the embedding service on real text
	$(PY) -m layerzero.native
	$(PY) benchmarks/embedding_demo.py $(DEMO_FLAGS)

# Clusters and gangs come last and one by one: each of their tests is several processes already.
test: $(VENV)/.installed-test  ## set up and run the test suite
	@failed=0; export OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1}; set -x; \
	$(PY) -m pytest $(PYTEST_FLAGS) --ignore=tests/distributed || failed=1; \
	$(PY) -m pytest --numprocesses=2 --dist=loadfile tests/distributed || failed=1; \
	exit $$failed

stress: $(VENV)/.installed-stress  ## every stage of the release gate's stress suite: soak, a million fuzz runs a parser, coverage
	LZ_STRESS=1 $(PY) -m layerzero gate RELEASE.yaml --suite stress --artifacts build/stress

# Two at a time: about half an hour where two cores are free.
FUZZ_FLAGS ?= --jobs 2
fuzz: $(VENV)/.installed-test  ## a million changed inputs for each parser of what comes from outside
	$(PY) -m tests.fuzz --all --plain --runs 1000000 $(FUZZ_FLAGS)

# A quarter of an hour at a time, and again until it says that no piece is left; COVERAGE_FLAGS="--minutes 230" does all.
coverage: $(VENV)/.installed-stress  ## lines that the tests run, at least 90 % of what needs no card
	@$(PY) -m scripts.coverage_pieces $(COVERAGE_FLAGS)

lint: ruff layers mypy pyright  ## ruff, mypy --strict, pyright, import order

ruff: $(VENV)/.installed-dev
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .

layers: $(VENV)/.installed-dev
	$(VENV)/bin/lint-imports

mypy: $(VENV)/.installed-dev
	$(VENV)/bin/mypy

pyright: $(VENV)/.installed-dev
	$(VENV)/bin/pyright --pythonpath $(PY)

format: $(VENV)/.installed-dev  ## let ruff fix what it can
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

bench: $(VENV)/.installed-bench  ## the hot path, ours beside every peer that installs here
	$(PY) benchmarks/hot_path.py

examples: $(VENV)/.installed-test  ## run the examples of the README and of docs/
	$(PY) -m scripts.run_readme

docs: $(VENV)/.installed-docs  ## check the documents, build the site into build/site (warnings are errors)
	$(PY) -m scripts.check_docs
	$(PY) -m sphinx --builder html --fail-on-warning --keep-going --quiet docs build/site

dist: $(VENV)/.installed-dev  ## wheel and sdist into dist/, each tried in an empty environment
	$(PY) -m scripts.check_packaging --out dist

ci:  ## everything that a change must pass
	.ci/run

dev: $(VENV)/.installed-dev  ## the environment that editors and hooks use

clean:  ## remove the environment and every cache
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .hypothesis .mypy_cache .ruff_cache .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(PY):
	@test -n "$(PYTHON)" && $(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	    || { echo "LayerZero needs Python 3.11 or newer; name one with make PYTHON=/path/to/python"; exit 1; }
	$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); exit 1; }

# One stamp an extra, and one for each that it holds: the second run installs nothing until the two files that decide
# the versions change.  pip takes torch, because its flags and its settings say which build; uv then takes the rest,
# with far less work than pip, and keeps the torch that is there.  uv reads none of pip's settings: pip takes all where
# they name another index, or where uv cannot be had.  pip would compile on one core, and all of it.  Compiling skips
# the bulk that nothing here imports, and may fail: some packages hold templates and other versions' Python; what is
# missing is compiled when it is imported.
HELD_BY_test := demo
HELD_BY_stress := demo test
HELD_BY_dev := demo docs test
BULK := site-packages/(.*/tests/|accelerate/(commands|test_utils)/|diffusers/(modular_)?pipelines/|mypy|nodejs|pip/|pygments/lexers/|ray/(data|llm|rllib|serve|train|tune)/$\
    |sympy/physics/|transformers/models/(?!auto|bert|llama))
PIP := $(PY) -m pip --disable-pip-version-check
$(VENV)/.installed-%: $(SPEC) | $(PY)
	@echo "$(VENV): installing .[$*] and what it needs"
	@{ ! { echo $(PIP_FLAGS); $(PIP) config list; } | grep -E '(\.|--)(index-url|no-index)' >/dev/null \
	    && $(PIP) install --quiet --no-compile $(PIP_FLAGS) -c constraints.txt torch uv \
	    && $(VENV)/bin/uv pip install --quiet --python $(PY) -c constraints.txt -e ".[$*]"; } \
	    || $(PIP) install --quiet --no-compile $(PIP_FLAGS) -c constraints.txt -e ".[$*]"
	@$(PY) -m compileall -qq -j 0 -x '$(BULK)' $(VENV)/lib >/dev/null 2>&1 || :
	@touch $@ $(HELD_BY_$*:%=$(VENV)/.installed-%)
