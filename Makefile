# Each target is one `rutter` call or one tool call in the environment .venv, which is made when it is needed.
#
#   make collect train export     the main job: run a workload, learn from it, write the artifact
#   make test                     the tests, with coverage
#   make test-vllm                gates and conformance suite against real vLLM engines, whose environment it builds
#   make check                    all that must pass before a change lands
#
# Variables: ARGS="..." goes to the command as it is; TRACE=... (collect, workload, fidelity), PREFILL="URL ...",
# DECODE="URL ...", POLICY=... and ARTIFACT=... (serve), CLUSTER=KIND (cluster-up), CLUSTER=NAME (gates, conformance,
# calibrate),
# RUN=NAME (a run of its own under build/runs), PYTHON=/path/to/python3.11.

VENV := .venv
BIN := $(VENV)/bin
PY := $(BIN)/python
RUTTER := $(BIN)/rutter
PIP := $(PY) -m pip install --disable-pip-version-check
PYTHONS := $(or $(PYTHON),python3 python3.14 python3.13 python3.12 python3.11 python)
COVERAGE := 90

RUN_ARGS := $(if $(RUN),--run $(RUN))
TRACE_ARGS := $(if $(TRACE),--trace $(TRACE))

# The stamp's name says what was installed and where: another pyproject.toml or a moved folder installs anew.
INSTALLED := $(VENV)/installed-$(shell { cat pyproject.toml; pwd; } | cksum | cut -d ' ' -f 1)

.NOTPARALLEL:
.PHONY: help venv collect calibrate train export serve workload fidelity bench bench-router dashboard cluster-up
.PHONY: cluster-down saturate compare frontier ablate gates conformance test test-vllm lint types check clean readme
.PHONY: dynamo-env vllm-router-env vllm-env

help:
	@sed -n '/^#/!q; s/^# \{0,1\}//p' Makefile

venv: $(INSTALLED)

collect: venv
	$(RUTTER) collect $(RUN_ARGS) $(TRACE_ARGS) $(ARGS)

calibrate: venv
	$(RUTTER) calibrate $(if $(CLUSTER),--cluster $(CLUSTER)) $(ARGS)

train: venv
	$(RUTTER) train $(RUN_ARGS) $(ARGS)

export: venv
	$(RUTTER) export $(RUN_ARGS) $(ARGS)

# On a live cluster; as ARGS="--cluster vllm-cpu --artifact FILE", and for compare --tuned RUN. Compare
# also simulates the whole grid of workloads and topologies: ARGS="--cluster simulated".
saturate: venv
	$(RUTTER) saturate $(RUN_ARGS) $(ARGS)

compare: venv
	$(RUTTER) compare $(RUN_ARGS) $(ARGS)

# Of the policies that a simulated comparison left in the run: the load they carry and the engines they need, and what
# the learned one is without its parts.
frontier: venv
	$(RUTTER) frontier $(RUN_ARGS) $(ARGS)

ablate: venv
	$(RUTTER) ablate $(RUN_ARGS) $(ARGS)

serve: venv
	$(RUTTER) serve $(if $(PREFILL),--prefill $(PREFILL)) $(if $(DECODE),--decode $(DECODE)) $(if $(POLICY),--policy $(POLICY)) $(if $(ARTIFACT),--artifact $(ARTIFACT)) $(ARGS)

workload: venv
	$(RUTTER) workload $(TRACE) $(ARGS)

fidelity: venv
	$(RUTTER) fidelity $(RUN_ARGS) $(TRACE_ARGS) $(ARGS)

bench: venv
	$(RUTTER) bench $(ARGS)

# Beside the Rust vllm-router, on engines without work: about three minutes.
bench-router: venv vllm-router-env
	$(RUTTER) bench-router $(ARGS)

dashboard: venv
	@$(PY) -c 'import optuna_dashboard' 2>/dev/null || $(PIP) --quiet --editable '.[dashboard]'
	$(RUTTER) dashboard $(RUN_ARGS) $(ARGS)

cluster-up: venv
	$(RUTTER) cluster up $(or $(CLUSTER),emulated) $(ARGS)

cluster-down: venv
	$(RUTTER) cluster down $(ARGS)

# The environment of vLLM on CPUs, in the user's cache for every clone: about 4 GB, once on a machine.
vllm-env: venv
	$(RUTTER) vllm-env $(ARGS)

# The correctness gates of a running cluster.
gates: venv
	$(RUTTER) check $(CLUSTER) $(ARGS)

# The engines of a running cluster against vLLM's protocol; without CLUSTER, emulated engines of its own.
conformance: venv
	$(PY) -m pytest tests/conformance $(if $(CLUSTER),--cluster $(CLUSTER)) $(ARGS)

# The threshold holds for all tests together, so a selection in ARGS is not held to it. Two processes, a file's tests in
# one: many tests wait for real time.
test: venv
	$(PY) -m pytest -n 2 --dist loadfile --cov --cov-report=term $(if $(ARGS),,--cov-fail-under=$(COVERAGE)) $(ARGS)

# On a 1P+2D cluster of its own, which ends with it.
test-vllm: vllm-env
	@set -e; name=test-vllm-$$$$; \
	trap "$(RUTTER) cluster down $$name" EXIT; \
	$(RUTTER) cluster up vllm-cpu --prefill 1 --decode 2 --dilation 1 --lease-s 6 --name $$name; \
	$(RUTTER) check $$name; \
	$(PY) -m pytest tests/conformance --cluster $$name $(ARGS)

lint: venv
	$(PY) -m ruff check
	$(PY) -m ruff format --check

types: venv
	$(PY) -m mypy

# In this order, the tests' closing line last.
check: lint types test

# Writes the README's file map anew from the modules' docstrings; a test holds it to them.
readme: venv
	$(PY) tests/source_tree.py

# NVIDIA Dynamo for `make bench` to compare with, in an environment of its own.
dynamo-env: build/dynamo-env/installed

build/dynamo-env/installed: venv
	$(PY) -m venv build/dynamo-env
	build/dynamo-env/bin/python -m pip install --disable-pip-version-check --quiet ai-dynamo==1.4.2
	touch $@

# The Rust vllm-router for `make bench-router` to compare with, in an environment of its own.
vllm-router-env: build/vllm-router-env/installed

build/vllm-router-env/installed: venv
	$(PY) -m venv build/vllm-router-env
	build/vllm-router-env/bin/python -m pip install --disable-pip-version-check --quiet vllm-router==0.1.17
	touch $@

# Runs, journals and artifacts stay.
clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis .coverage* *.egg-info

# An installation that was cut short can leave half a package that pip takes for whole, so it begins again from an
# empty environment; pip has kept what it downloaded.
$(INSTALLED):
	@set -eu; \
	if [ -e $(VENV)/installing ]; then echo "the last installation was cut short: beginning it again"; rm -rf $(VENV); fi; \
	if ! $(PY) -c 'import sys, pip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then \
	    python=; \
	    for candidate in $(PYTHONS); do \
	        if "$$candidate" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; \
	        then python="$$candidate"; break; fi; \
	    done; \
	    if [ -z "$$python" ]; then \
	        for candidate in $(PYTHONS); do \
	            if "$$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then \
	                echo "$$candidate lacks venv or ensurepip: install them (on Debian and Ubuntu: apt install python3-venv)" >&2; \
	                exit 1; \
	            fi; \
	        done; \
	        echo "no Python 3.11 or newer among: $(PYTHONS). Install one, or name it: make PYTHON=/path/to/python3.11" >&2; \
	        exit 1; \
	    fi; \
	    if [ -e $(VENV) ]; then echo "replacing $(VENV): it is incomplete, or its Python is gone or older than 3.11"; fi; \
	    rm -rf $(VENV); mkdir -p $(VENV); touch $(VENV)/installing; \
	    echo "making $(VENV) with $$("$$python" --version)"; \
	    "$$python" -m venv $(VENV); \
	fi; \
	touch $(VENV)/installing; \
	echo "installing Rutter and its tools into $(VENV): about a minute, once"; \
	if [ -t 1 ]; then quiet=; else quiet=--quiet; fi; \
	$(PIP) $$quiet --editable '.[dev]'; \
	rm -f $(VENV)/installed-*; touch $@; rm -f $(VENV)/installing
