# Every target makes the environment that it needs; PYTHON and VENV can be set on the command line.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin

# Containers often set it. Without bytecode each process compiles torch and transformers again: 15 s.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: demo test check format docs docs-site install trackers release help

demo: $(VENV)/.installed-run  ## Train the tiny recipe on this machine, in a few minutes
	$(BIN)/trainctl launch recipe=tiny

test: $(VENV)/.installed-test  ## Run the quick tests
	$(BIN)/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder --durations=20 \
	  -m "not slow and not cluster and not slurm and not gpu"

check: $(VENV)/.installed-dev  ## Lint, check the format and the types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/.installed-dev  ## Rewrite the sources in the project's format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(VENV)/.installed-run  ## Write docs/reference.md and docs/rules.md anew
	$(BIN)/python scripts/generate_reference.py
	$(BIN)/python scripts/generate_rules.py --all
	$(BIN)/python scripts/generate_optimizers.py
	$(BIN)/python scripts/generate_coming_from.py

docs-site: $(VENV)/.installed-docs  ## Build the site of docs/ into build/site; a warning is an error
	$(BIN)/python -m sphinx -W --keep-going -q -b html docs build/site

install: $(VENV)/.installed-all  ## Install all that running, tests and checks need, in one step

trackers: $(VENV)-trackers/.installed  ## Install W&B, MLflow and Trackio, apart: their pins clash

release: $(VENV)/.installed-all  ## Build and check a release; VERSION=X.Y.Z
	$(BIN)/python scripts/release.py '$(VERSION)'

help:  ## Show this list
	@awk -F ':.*##' '/^[a-z-]+:.*##/ { printf "  make %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

# A stamp for each set of extras: installing again only when the requirements changed. Python compiles
# what it imports; compiling all of torch and transformers beforehand takes longer than that.
EXTRAS_run :=
EXTRAS_test := [test]
EXTRAS_docs := [docs]
EXTRAS_dev := [dev]
EXTRAS_all := [test,dev]
STAMPS_all := $(addprefix $(VENV)/.installed-,run test dev)
$(VENV)/.installed-%: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --no-compile --constraint constraints.txt --editable '.$(EXTRAS_$*)'
	@touch $@ $(STAMPS_$*)

# Environments of their own, each for its list.
$(VENV)-%/.installed: scripts/%.txt
	test -x $(@D)/bin/python || $(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install --quiet --no-compile --requirement $<
	@touch $@
