# Everything runs in .venv, which `make install` builds, brings up to date and repairs. Further arguments go in ARGS:
#   make train-deit ARGS="seed=2"      make test ARGS=tests/test_plan.py

# The first name that runs and is new enough: a name on the PATH may be a version manager's stub that does not run.
PYTHON ?= $(shell for python in python3 python3.13 python3.12 python3.11; do \
	$$python -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$python && break; done)
no_python = no Python 3.11 or newer found: install one, or name it with make install PYTHON=/path/to/python
no_venv = $(PYTHON) cannot make virtual environments: on Debian, apt install $(notdir $(PYTHON))-venv

ifneq ($(shell command -v uv 2>/dev/null),)
new_venv = uv venv --quiet --seed --allow-existing $(PYTHON:%=--python %) .venv
pip_install = uv pip install --quiet --python .venv
else
can_venv = $(shell $(or $(PYTHON),$(error $(no_python))) -c 'import ensurepip, venv' 2>/dev/null && echo yes)
new_venv = $(if $(can_venv),$(PYTHON) -m venv .venv,$(error $(no_venv)))
pip_install = .venv/bin/python -m pip install --quiet --disable-pip-version-check
endif

.NOTPARALLEL: # so that `make -j clean install` is clean, then install
.PHONY: help install train-deit train-bert train-gpt test versions lint format types bench notebooks clean

help:  ## list these targets (the default)
	@awk -F ':.*  ## ' '/^[a-z-]+:.*  ## / {printf "%-12s %s\n", $$1, $$2}' Makefile

install: .venv/.installed  ## build .venv, or bring it up to date

# Where .unfinished is found, an install was cut short: that .venv may lack files which pip believes are there.
.venv/.installed: pyproject.toml
	@if [ -e .venv/.unfinished ] || ! .venv/bin/python -m pip --version >/dev/null 2>&1; then \
		rm -rf .venv && mkdir .venv && touch .venv/.unfinished && $(new_venv); fi
	@touch .venv/.unfinished
	@echo "Installing mlframe and what it needs into .venv (torch is large: this can take minutes)"
	@$(pip_install) -e ".[dev]"
	@mv .venv/.unfinished $@

train-deit: .venv/.installed  ## train a small DeiT on Fashion-MNIST in a V-cycle
	.venv/bin/mlframe-train experiment=deit_fashion $(ARGS)

train-bert: .venv/.installed  ## train a small BERT on API documentation in a V-cycle, then its control
	.venv/bin/mlframe-train experiment=bert_docs $(ARGS)
	.venv/bin/mlframe-train experiment=bert_docs control=1 $(ARGS)

train-gpt: .venv/.installed  ## train a small GPT-2 on API documentation in a V-cycle, then its control
	.venv/bin/mlframe-train experiment=gpt_docs $(ARGS)
	.venv/bin/mlframe-train experiment=gpt_docs control=1 $(ARGS)

test: .venv/.installed  ## run the tests
	OMP_NUM_THREADS=1 .venv/bin/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder $(ARGS)

# Beside the Lightning of .venv, in folders of their own: the oldest that mlframe takes and the newest there is today.
versions: .venv/.installed .venv/lightning-2.6.4  ## run the loop's tests on Lightning 2.6.4 and on the newest 2.x
	@rm -rf .venv/lightning-newest
	@$(pip_install) --no-deps --target .venv/lightning-newest "lightning>=2.6.4,<3"
	@set -e; for folder in .venv/lightning-2.6.4 .venv/lightning-newest; do \
		version=$$(basename $$folder/lightning-*.dist-info .dist-info); \
		if [ -e .venv/lib/python*/site-packages/$$version.dist-info ]; then \
			echo "== $$version is what make test runs on"; continue; fi; \
		echo "== the loop's tests on $$version"; \
		PYTHONPATH=$(CURDIR)/$$folder LIGHTNING=$${version#lightning-} .venv/bin/python -m pytest \
			tests/test_lightning_private.py tests/test_loop.py tests/test_resume.py; done

.venv/lightning-2.6.4: | .venv/.installed
	@rm -rf $@.part && $(pip_install) --no-deps --target $@.part lightning==2.6.4 && mv $@.part $@

lint: .venv/.installed  ## check style and formatting
	.venv/bin/ruff check
	.venv/bin/ruff format --check

format: .venv/.installed  ## format the code and fix what ruff can fix
	.venv/bin/ruff check --fix-only
	.venv/bin/ruff format

types: .venv/.installed  ## check the types
	.venv/bin/mypy mlframe

bench: .venv/.installed  ## run every script in benchmarks/
	@set -e; for script in $(sort $(wildcard benchmarks/*.py)); do echo "== $$script"; .venv/bin/python $$script; done

notebooks: .venv/.installed  ## run every notebook in notebooks/ and keep the outputs in it
	$(if $(wildcard notebooks/*.ipynb),.venv/bin/jupyter-nbconvert --to notebook --execute --inplace \
		$(wildcard notebooks/*.ipynb),@echo "notebooks/ holds no notebooks")

clean:  ## remove .venv, builds and caches; runs/ and data/ stay
	rm -rf .venv build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find $(wildcard mlframe tests benchmarks) -name __pycache__ -prune -exec rm -rf {} +
