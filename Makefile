# `make serve` and `make test` are all a newcomer needs; `make help` lists the rest.
# Both need Python 3.11 to 3.13, make and a C compiler, and put everything else into .venv.

PYTHON ?= python3
TORCH_INDEX ?=
ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
# Those of the CUDA builds of torch, from the table in pyproject.toml: each once.
CUDA_TRITONS := $(sort $(shell sed -n 's/^cu[0-9]* = .*triton = "\([0-9.]*\)".*/\1/p' pyproject.toml))
# Seconds of two cores that compiling for every capability may take with nothing cached, where kernels/compiler/compile_speed.py
# takes its REFERENCE_S; elsewhere as much more as that takes more there. A fifth more than the most that they took at
# that pace: 421 s on an EPYC (326 s of its two cores), and some 20 s for what has been added since; 35 s of the
# newest. (Another machine took 308 s and 28 s.) Ten minutes are the goal, of both.
MATRIX_S := 530
NEWEST_S := 48
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check
# This distribution under its former name: removed before, as its removal takes the command along, whose ever it is by then.
FORMER = ! $(BIN)/python -m pip show --quiet motley 2>/dev/null \
  || $(BIN)/python -m pip uninstall --quiet --yes --disable-pip-version-check motley; rm -rf src/motley.egg-info
# One entry of pyproject.toml, so that a version range is written down once.
ENTRY = $(BIN)/python -c "import sys, tomllib; project = tomllib.load(open('pyproject.toml', 'rb'))['project']; $(1)"
TORCH = $(call ENTRY,print(*[d for d in project['dependencies'] if d.startswith('torch>')]))
PROTOS = $(call ENTRY,print(*project['optional-dependencies']['protos']))
DOCS = $(call ENTRY,print(*project['optional-dependencies']['docs']))

# Byte code is kept whatever the caller's shell says: tests start hundreds of processes, each of which would compile
# Motley's own files anew, for 0.2 s to 0.4 s.
export PYTHONDONTWRITEBYTECODE :=

.DEFAULT_GOAL := help
.PHONY: help serve loadtest install test thorough checks lint types imports unit durations unit-system unit-replicas unit-cluster unit-rest unit-kernels kernels matrix table gencode graph reference schema dashboards written docs protos clean
.DELETE_ON_ERROR:

help:  ## this list
	@awk -F ':.*## *' '/^[a-z]+:.*## /{printf "  make %-9s %s\n", $$1, $$2}' $(MAKEFILE_LIST)
	@echo 'Variables: PYTHON=python3.12, TORCH_INDEX=URL (another index for torch alone), ARGS="--http-port 8080"'

# Ctrl-C reaches the whole process group: `exec` leaves no shell between make and the service, make waits
# for it to drain, and since the service then exits with 0, make has nothing to complain of.
serve: $(VENV)/.run  ## install if needed, serve the demo model with a greeting, until Ctrl-C
	@exec $(BIN)/motley serve --greet $(ARGS)

install: $(VENV)/.dev  ## make .venv with everything for development

# What a compiler says of kernels is bounded in time, so they have the machine to themselves.
test: kernels checks  ## lint, types, import rules, generated code, kernels and the tests

# What is left out each time is seldom wrong where the rest is right: further combinations, doors that share their code.
thorough: export THOROUGH := --thorough
thorough: matrix checks  ## the same with all kernels and every test: before a release

lint: $(VENV)/.dev  ## ruff: errors and format
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.dev  ## mypy --strict
	$(BIN)/mypy --strict -p motley -p motley_bench -p api_reference -p demo_model -p grafana_dashboards

imports: $(VENV)/.dev  ## which package may import which
	$(BIN)/lint-imports

unit: $(VENV)/.dev  ## pytest; ARGS="-k text" runs a part
ifeq ($(ARGS),)
	@$(SIDE_BY_SIDE) $(PARTS:%=unit-%)
else
	$(BIN)/pytest $(THOROUGH) $(ARGS)
endif

# All that `test` and `thorough` share. What takes the longest begins first, beside what is short.
checks: $(VENV)/.dev
ifeq ($(ARGS),)
	@$(SIDE_BY_SIDE) unit-system lint types imports gencode $(patsubst %,unit-%,$(filter-out system,$(PARTS)))
else
	@$(MAKE) --no-print-directory lint types imports gencode unit
endif

loadtest: $(VENV)/.run  ## two minutes of load by Locust on a fleet of this machine: build/loadtest.html
	$(BIN)/python -m motley_bench.locust_load $(ARGS)

durations: COSTS := costs.json
durations: unit  ## the tests, and what each of them costs, into tests/durations.json
	$(BIN)/python tests/support/costs.py $(PARTS:%=$(UNIT)/%/costs.json)

# Two side by side, for the system tests wait for other processes most of their time, and come first when they do not;
# in parts, for the longest decides when all has ended; each to its end, whatever fails.
# Torch's threads of one would spin while the other computes.
PARTS := system replicas cluster kernels rest
SIDE_BY_SIDE = $(MAKE) --no-print-directory --jobs=2 --keep-going --output-sync=target
UNIT := .pytest_cache
unit-system: WHAT := tests/system
unit-replicas: WHAT := tests/replicas tests/bench tests/tools
unit-cluster: WHAT := tests/cluster
unit-kernels: WHAT := tests/kernels
unit-rest: WHAT := $(patsubst %,--ignore=tests/%,system replicas bench tools cluster kernels)
unit-replicas unit-cluster unit-kernels unit-rest: export OMP_NUM_THREADS := 1
unit-replicas unit-cluster unit-kernels unit-rest: NICE := nice -n 5

$(PARTS:%=unit-%): unit-%: $(VENV)/.dev
	@rm -rf $(UNIT)/$* && mkdir -p $(UNIT)/$*
	$(NICE) $(BIN)/pytest --tb=short $(THOROUGH) $(COSTS:%=--costs $(UNIT)/$*/%) -o cache_dir=$(UNIT)/$* $(WHAT)

kernels: $(VENV)/.dev $(CUDA_TRITONS:%=$(VENV)/.triton-%)  ## kernels compiled for every capability, with no GPU; all if any has changed
	@for version in $(CUDA_TRITONS); do \
	  PYTHONPATH=$(VENV)/triton-$$version $(BIN)/motley kernels compile --all --summary --budget $(MATRIX_S) \
	    --check kernels/README.md || exit 1; \
	done
	$(BIN)/motley kernels compile --all --quick --summary --budget $(NEWEST_S)

matrix: $(VENV)/.kernels.md  ## all of them compiled, whatever has changed
	@diff kernels/README.md $< || { echo "kernels/README.md: its table is not what was compiled: make table"; exit 1; }
	$(BIN)/motley kernels compile --all --quick --summary --budget $(NEWEST_S)

table: $(VENV)/.kernels.md  ## the same, and kernels/README.md written anew from it
	@cp $< kernels/README.md

.PHONY: $(VENV)/.kernels.md
$(VENV)/.kernels.md: $(VENV)/.dev $(CUDA_TRITONS:%=$(VENV)/.triton-%)
	@cp kernels/README.md $@
	@for version in $(CUDA_TRITONS); do \
	  PYTHONPATH=$(VENV)/triton-$$version $(BIN)/motley kernels compile --all --summary --budget $(MATRIX_S) \
	    --table $@ || exit 1; \
	done

gencode: $(VENV)/.protos  ## the gRPC code is what the protos make
	$(VENV)/protos/bin/python cluster/protos/generate.py --check

graph: $(VENV)/.dev  ## draw docs/modules.svg, the picture of all modules, anew
	$(BIN)/python tests/support/module_graph.py

reference: $(VENV)/.dev  ## write docs/api.md and the pages of docs/reference that follow from the code anew
	$(BIN)/python tools/reference_pages.py

dashboards: $(VENV)/.dev  ## write the dashboards of deploy/grafana anew
	PYTHONPATH=tools $(BIN)/python -m grafana_dashboards

schema: $(VENV)/.dev  ## write deploy/fleet.schema.json anew
	$(BIN)/python -m motley.cluster.fleet.spec.fleet_schema

written: graph reference schema dashboards  ## all that is written anew from the sources: before each commit

# The builder fails for dead links and pages that are not there; the last line for what would be loaded from elsewhere.
docs: $(VENV)/.docs  ## build the site of docs/ into build/site
	$(VENV)/docs/bin/python tools/site_pages.py
	$(VENV)/docs/bin/zensical build --clean --strict --config-file mkdocs.yml
	$(VENV)/docs/bin/python tools/site_pages.py --check

protos: $(VENV)/.protos  ## generate the gRPC code anew
	$(VENV)/protos/bin/python cluster/protos/generate.py

clean:  ## remove .venv and caches
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache .hypothesis .import_linter_cache build dist src/*.egg-info loadtests/build loadtests/*.egg-info

# A stamp is newer than pyproject.toml once what that asks for is installed.
$(VENV)/.run: pyproject.toml loadtests/pyproject.toml $(VENV)/.torch
	@echo 'installing Motley into $(VENV) (the first time this takes some minutes)'
	@$(FORMER)
	@$(PIP) --editable . --editable ./loadtests
	@touch $@

$(VENV)/.dev: pyproject.toml loadtests/pyproject.toml $(VENV)/.torch
	@echo 'installing Motley and its development tools into $(VENV) (the first time this takes some minutes)'
	@$(FORMER)
	@$(PIP) --editable '.[dev]' --editable ./loadtests
	@touch $(VENV)/.run $@

# From TORCH_INDEX comes torch alone, without its dependencies: those follow from the usual index.
$(VENV)/.torch: pyproject.toml $(VENV)/.python
	@$(if $(TORCH_INDEX),echo 'installing torch from $(TORCH_INDEX)' && \
	  $(PIP) --no-deps --index-url '$(TORCH_INDEX)' "$$($(TORCH))",:)
	@touch $@

# Beside the newest Triton, which builds of torch for CPUs leave to us.
$(VENV)/.triton-%: $(VENV)/.python
	@$(PIP) --no-deps --target $(VENV)/triton-$* triton==$*
	@touch $@

# A venv of its own: the generator wants an older protobuf than the one that runs.
$(VENV)/.protos: pyproject.toml $(VENV)/.python
	@$(BIN)/python -m venv $(VENV)/protos
	@$(VENV)/protos/bin/python -m pip install --quiet --disable-pip-version-check $$($(PROTOS))
	@touch $@

# A venv of its own: the site needs nothing of ours, and nothing of ours the builder.
$(VENV)/.docs: pyproject.toml $(VENV)/.python
	@$(BIN)/python -m venv $(VENV)/docs
	@$(VENV)/docs/bin/python -m pip install --quiet --disable-pip-version-check $$($(DOCS))
	@touch $@

$(VENV)/.python:
	@command -v $(PYTHON) >/dev/null || \
	  { echo 'make: no $(PYTHON) here; name one of 3.11 to 3.13: make serve PYTHON=/path/to/python3.12' >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' || \
	  { echo "make: $$($(PYTHON) --version 2>&1) is $(PYTHON); Motley needs 3.11, 3.12 or 3.13 (Ray has wheels for" \
	         'those): make serve PYTHON=python3.12' >&2; exit 1; }
	@$(PYTHON) -m venv $(VENV)
	@touch $@
