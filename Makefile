# make demo | test | lint | bench | test-gpu: each does its own set-up.
# PYTHON=python3 uses that interpreter as it is and installs nothing; ARGS=... is passed on.

VENV := .venv
BASE_PYTHON := $(shell command -v python3.11 || command -v python3)
PYTHON := $(VENV)/bin/python
PIP_INSTALL = $(PYTHON) -m pip install -qq --progress-bar off --disable-pip-version-check

# nothing here may reach for a model hub, whatever a test or a config asks for
export HF_HUB_OFFLINE := 1

ifeq ($(PYTHON),$(VENV)/bin/python)
INSTALLED := $(VENV)/installed
INSTALLED_DEV := $(VENV)/installed-dev
endif

.DELETE_ON_ERROR:

.PHONY: demo test lint bench test-gpu clean

demo: $(INSTALLED)
	$(PYTHON) tools/run_demo.py $(ARGS)

# a file's tests share what they have trained, so a process takes whole files
test: export OMP_NUM_THREADS ?= 1
test: $(INSTALLED_DEV)
	$(PYTHON) -m pytest -q -n 2 --dist loadfile $(ARGS)

lint: $(INSTALLED_DEV)
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .

bench: $(INSTALLED_DEV)
	$(PYTHON) benchmarks/bench_cpu_scan.py
	$(PYTHON) benchmarks/bench_planning.py
	$(PYTHON) benchmarks/bench_lengths.py
	$(PYTHON) benchmarks/bench_attention.py
	if $(PYTHON) -c "import torch; raise SystemExit(not torch.cuda.is_available())"; \
	then $(PYTHON) benchmarks/bench_kernels.py; fi

test-gpu: $(INSTALLED_DEV)
	$(PYTHON) tools/record_gpu_tests.py $(ARGS)

clean:
	rm -rf $(VENV) demo work_dirs build dist

$(VENV)/bin/python:
	$(BASE_PYTHON) -m venv $(VENV)

# the stamps are younger than what decides the installation, so a second call installs nothing
$(VENV)/installed: pyproject.toml $(wildcard startup/*) | $(VENV)/bin/python
	@echo "installing xtuner-mamba and XTuner into $(VENV) (some minutes, once)"
	$(PIP_INSTALL) -e .
	touch $@

$(VENV)/installed-dev: pyproject.toml $(wildcard startup/*) | $(VENV)/bin/python
	@echo "installing xtuner-mamba, XTuner and the test tools into $(VENV) (some minutes, once)"
	$(PIP_INSTALL) -e ".[dev]"
	touch $@ $(VENV)/installed
