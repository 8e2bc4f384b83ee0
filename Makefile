# `make demo` and `make test` do everything on a machine that has Python 3.11+ and make.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
DEMO := build/demo
# TorchRec, for its engine, and to read what we write. Without its dependencies: they would bring
# CUDA builds and another torch. Where this fails, its tests are skipped, unless it is required.
TORCHREC := torchrec fbgemm-gpu-cpu iopath lightning-utilities portalocker pyre-extensions \
            pyvers tensordict torchmetrics tqdm typing-inspect

# What the tests may not be skipped for want of: names of tests/skips.py. CI requires more.
REQUIRE := extras

.PHONY: demo test lint wheel-test test-python test-slow test-gpu test-gpu-quick clean

# --- environments: a stamp per set of extras, so that a second call installs nothing

PINS := pyproject.toml constraints.txt trainmark/__init__.py

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/core.stamp: $(PINS) | $(BIN)/python
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable .
	touch $@

$(VENV)/dev.stamp: $(PINS) | $(BIN)/python
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	$(if $(findstring torchrec,$(REQUIRE)),,-)$(BIN)/python -m pip install --quiet \
	    --constraint constraints.txt --no-deps $(TORCHREC)
	touch $@ $(VENV)/core.stamp

# --- the two commands

demo: $(VENV)/core.stamp  ## raw click logs -> prepared data -> trained model -> evaluation -> report
	$(BIN)/trainmark prepare synthetic --format raw --output $(DEMO)/raw
	$(BIN)/trainmark prepare criteo --input '$(DEMO)/raw/day_*' --output $(DEMO)/data
	$(BIN)/trainmark train dlrm-demo --data $(DEMO)/data --output $(DEMO)/run
	$(BIN)/trainmark evaluate $(DEMO)/run
	$(BIN)/trainmark report $(DEMO)/run

test: lint  ## lint, types and the default tests
	$(BIN)/python -m pytest -n 3 --require $(REQUIRE)

lint: $(VENV)/dev.stamp
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# A folder of its own, so that nothing is found in the checkout that the wheel lacks.
wheel-test:  ## the wheel, in an empty environment, runs the demo
	set -e; unset PYTHONPATH; folder=$$(mktemp -d); trap 'rm -rf '"$$folder" EXIT; rm -rf build/lib; \
	$(PYTHON) -m venv $$folder/venv; \
	$$folder/venv/bin/python -m pip wheel --quiet --no-deps --wheel-dir $$folder .; \
	$$folder/venv/bin/python -m pip install --quiet --constraint constraints.txt $$folder/*.whl; \
	cd $$folder; ls venv/lib/python3*/site-packages/trainmark/py.typed; venv/bin/trainmark list; \
	$(MAKE) --file $(CURDIR)/Makefile --old-file venv/core.stamp VENV=venv demo; \
	ls -l build/demo/run/report.html

# Under another interpreter: tests of every part that need few of the extras, with the oldest Arrow
# that pyproject.toml allows, beside pandas, which Arrow loads wherever it is installed.
QUICK := $(addprefix tests/unit/test_,attempt.py batches.py bounds.py checkpoint.py \
         checkpoint_damage.py checksums.py cli_errors.py click_data.py config_values.py \
         cpu_kernels.py distilbert_train.py dropout.py evaluation.py files.py fuzz.py \
         kill_and_resume.py metrics.py placement.py prepare_engine.py prepare_tabular.py \
         report_page.py run_folder.py run_outputs.py suite.py train.py) \
         tests/distributed/test_distilbert_ranks.py tests/distributed/test_launch_dry_run.py
OTHER := build/$(notdir $(PYTHON))

# The environment is removed at the end: with torch's CUDA build it takes more than 5 GB.
test-python:  ## make test-python PYTHON=python3.13
	set -e; trap 'rm -rf $(OTHER)' EXIT; $(PYTHON) -m venv $(OTHER); \
	$(OTHER)/bin/python -m pip install --quiet --constraint constraints.txt \
	    --editable '.[fast,plots,serve]' httpx2 hypothesis pytest pytest-xdist scikit-learn; \
	$(OTHER)/bin/python -m pip install --quiet 'pyarrow==20.*' pandas; \
	$(OTHER)/bin/python -m pytest -n 2 $(QUICK)

test-slow: $(VENV)/dev.stamp
	$(BIN)/python -m pytest -m slow --require $(REQUIRE)

test-gpu:  ## on a CUDA machine, with the interpreter that has torch
	$(PYTHON) -m tests.gpu

test-gpu-quick:  ## of these, what two minutes are enough for
	$(PYTHON) -m tests.gpu --quick

clean:
	rm -rf build .pytest_cache .mypy_cache .ruff_cache
