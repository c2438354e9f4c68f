# Targets make their own environment in .venv; nothing outside the tree is touched.
PYTHON ?= python3
VENV := .venv
PEERS := .venv-peers
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: demo test lint bench docs soak clean

demo: $(STAMP)  ## the daemon, four ranks and a small GPT on this machine's own text; ARGS=--multimodal: on pictures too
	$(BIN)/msdctl demo $(DEMO_ARGUMENTS) $(ARGS)

test: $(STAMP) $(PEERS)/.installed  ## everything but soak; PYTEST_ARGUMENTS narrows it
	$(BIN)/python -m pytest -m "not soak" -n 2 $(PYTEST_ARGUMENTS)

lint: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/lint-imports
	$(BIN)/mypy

bench: $(VENV)/.bench  ## BENCH_ARGUMENTS=--quick ends within 50 s each, images within 2 min
	$(BIN)/python -m bench node --json $(BENCH_ARGUMENTS)
	$(BIN)/python -m bench ring --json $(BENCH_ARGUMENTS)
	$(BIN)/python -m bench images --json $(BENCH_ARGUMENTS)
	$(BIN)/python -m bench text --json $(BENCH_ARGUMENTS)
	$(BIN)/python -m bench planner --json $(BENCH_ARGUMENTS)
	$(BIN)/python -m bench balance --json $(BENCH_ARGUMENTS)
	$(BIN)/python -m bench recover --json $(BENCH_ARGUMENTS)
	$(BIN)/python -m bench resume --json $(BENCH_ARGUMENTS)
	$(BIN)/python -m bench federation --json $(BENCH_ARGUMENTS)

docs: $(STAMP)  ## the documentation as a site in build/site
	PIP_CONSTRAINT=$(CURDIR)/constraints.txt $(BIN)/python -m pip install --quiet \
		--disable-pip-version-check --editable '.[docs]'
	$(BIN)/mkdocs build --quiet -f docs/mkdocs.yml

soak: $(STAMP)  ## long runs
	$(BIN)/python -m pytest -m soak --timeout 3600 $(PYTEST_ARGUMENTS)

clean:
	rm -rf $(VENV) $(PEERS) build dist msd.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find msd_client msd_daemon federation tests bench -name __pycache__ -prune -exec rm -rf {} +
	rm -f federation/planning/*.so msd_daemon/gather/*.so msd_daemon/transforms/*.so

$(VENV)/.bench: $(STAMP)
	PIP_CONSTRAINT=$(CURDIR)/constraints.txt $(BIN)/python -m pip install --quiet \
		--disable-pip-version-check --editable '.[bench]'
	touch $@

# The constraints hold for the build's own environment too (PIP_CONSTRAINT), so a build today and
# one next year use the same setuptools and numpy.
KERNELS := federation/kernel_stamp.py $(wildcard */*/native/*.[ch])
$(STAMP): Makefile pyproject.toml setup.py constraints.txt $(KERNELS)
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "msd needs Python 3.11 or later")'
	$(PYTHON) -m venv --clear $(VENV)
	PIP_CONSTRAINT=$(CURDIR)/constraints.txt $(BIN)/python -m pip install --quiet \
		--disable-pip-version-check --editable '.[daemon,dev]' torch==2.13.0
	touch $@

# Writers of the peers' formats, for round trips in an environment of their own; the tests say that
# they are skipped where it cannot be made.
$(PEERS)/.installed: $(STAMP) tests/support/peers.py
	-$(BIN)/python tests/support/peers.py $(PEERS) && touch $@
