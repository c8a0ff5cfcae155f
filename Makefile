# `make` says what there is. Everything runs in the locked environment that envs/bootstrap.py builds in .venv.
PYTHON ?= python3
EXPERIMENT ?= params.yaml
PROFILE ?= profiles/slurm
FLAGS ?=
GPU_PYTHON ?= 3.12
# nproc would obey OMP_NUM_THREADS, which says how many threads a process has
CORES ?= $(shell n=$$(env -u OMP_NUM_THREADS nproc 2>/dev/null || getconf _NPROCESSORS_ONLN); [ "$$n" -gt 1 ] && echo "$$n" || echo 2)
TESTS ?= tests library/tests
CLUSTER_TESTS ?= tests/cluster
# a process without tests left takes some of another's
PYTEST = $(BIN)/python -m pytest -n $(CORES) --dist worksteal

UV_PROJECT_ENVIRONMENT ?= .venv
BIN := $(abspath $(UV_PROJECT_ENVIRONMENT))/bin

export PATH := $(BIN):$(PATH)
# Jobs run side by side, each with as many threads as the experiment says; libraries must not add their own.
export OMP_NUM_THREADS := 1
export MLFLOW_DISABLE_TELEMETRY := true
export DVC_NO_ANALYTICS := 1
export HF_HUB_DISABLE_TELEMETRY := 1
# some container images set it; every process would then compile all modules of kairos again
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help setup demo run cluster test test-library test-trainers test-long test-all test-nightly test-cluster systems recipes gpu gpu-wheels ui pull reproduce docs lint format clean

help:  ## what there is
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-12s %s\n", $$1, $$2}'
	@echo '  EXPERIMENT=experiments/x.yaml names another experiment, CORES=N the processors to use.'

setup:  ## the locked environment, in .venv (all others bring it themselves)
	@command -v $(PYTHON) >/dev/null || { echo "set-up: no $(PYTHON) here; 3.11 or newer is needed" >&2; exit 1; }
	@$(PYTHON) envs/bootstrap.py

demo: setup  ## compare five timestep strategies on handwritten digits (params.yaml)
	@$(BIN)/kairos check --folder params.yaml >/dev/null && exec $(BIN)/snakemake --cores $(CORES) --configfile params.yaml

run: setup  ## another experiment: make run EXPERIMENT=experiments/fashion_mnist.yaml
	@$(BIN)/kairos check --folder $(EXPERIMENT) >/dev/null && exec $(BIN)/snakemake --cores $(CORES) --configfile $(EXPERIMENT)

cluster: setup  ## on a SLURM cluster, from its login node; PROFILE=profiles/slurm says what the cluster is like
	@$(BIN)/kairos check --folder $(EXPERIMENT) >/dev/null && $(BIN)/kairos fetch --config $(EXPERIMENT) \
	  && exec $(BIN)/snakemake --workflow-profile $(PROFILE) --configfile $(EXPERIMENT) $(FLAGS)

test: setup  ## the quick tests
	@$(PYTEST) -m "not long and not cluster and not nightly" $(TESTS)

test-library: setup  ## the quick tests of the library alone
	@$(PYTEST) -m "not long and not nightly" library/tests

test-trainers: setup  ## the tests of the library in other projects' trainers, whose releases it downloads
	@.ci/trainers

test-long: setup  ## the tests that take longer
	@$(PYTEST) -m "long and not cluster and not nightly" $(TESTS)

test-all: setup  ## the quick tests and those that take longer, in one run
	@$(PYTEST) -m "not cluster and not nightly" $(TESTS)

test-nightly: setup  ## the tests with more inputs, and with services and pages of other projects
	@$(PYTEST) -m nightly $(TESTS)

test-cluster: setup  ## the tests on a SLURM that they start on this machine: Debian's packages, as root
	@$(BIN)/python -m pytest -p no:xdist -v -rs --durations 0 --durations-min 5 -m cluster $(CLUSTER_TESTS)

systems: setup  ## every system of the papers in a small form: 200 steps on real images, some minutes (SYSTEMS=names)
	@$(BIN)/python benchmarks/systems.py $(SYSTEMS)

recipes: setup  ## the small form of every recipe of the papers, from images to its table (RECIPES=files)
	@$(BIN)/python benchmarks/recipes.py $(RECIPES) $(FLAGS)

gpu:  ## what only a GPU shows, without set-up: PART=correct, step, strategies, sample or systems; all in turn without it
	@packages=$$($(PYTHON) benchmarks/gpu/packages.py) || exit 1; \
	status=0; for part in $(or $(PART),correct step strategies sample systems); do \
	  PYTHONPATH=src:library/src:$$packages $(PYTHON) benchmarks/gpu/$$part.py $(FLAGS) || status=1; \
	done; exit $$status

gpu-wheels:  ## download pydantic, jaxtyping and diffusers for a GPU machine without a network, whose Python is GPU_PYTHON
	@$(PYTHON) -m pip download --quiet --dest wheels --only-binary=:all: --python-version $(GPU_PYTHON) \
	  --platform manylinux2014_x86_64 pydantic jaxtyping \
	  && $(PYTHON) -m pip download --quiet --dest wheels --no-deps "diffusers>=0.42" importlib_metadata zipp && ls wheels

ui: setup  ## look at the imported runs in MLflow (FLAGS="--port 5001 --no-open")
	@exec $(BIN)/kairos ui $(FLAGS)

pull: setup  ## after a clone: pull the results that DVC stores, and list what is not valid for params.yaml and the code
	@$(BIN)/dvc pull && exec $(BIN)/kairos status params.yaml

reproduce: setup  ## compute what is not valid, and record it in dvc.lock and dvc.results.json (dvc repro)
	@$(BIN)/dvc repro

docs: setup  ## the documentation as a site, site/index.html, which needs no network
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict && echo site/index.html

lint: setup  ## formatting, style, types, layers, workflow
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@$(BIN)/python .ci/words.py
	@$(BIN)/mypy
	@$(BIN)/lint-imports --no-cache
	@$(BIN)/snakefmt --check Snakefile workflow
	@$(BIN)/snakemake --lint

format: setup  ## format the code
	@$(BIN)/ruff format .
	@$(BIN)/ruff check --fix .
	@$(BIN)/snakefmt Snakefile workflow

clean: setup  ## delete the results of EXPERIMENT, the states of its trainings too
	@folder=$$($(BIN)/kairos check --folder $(EXPERIMENT)) && rm -rf -- "$$folder" && echo "$$folder deleted"
