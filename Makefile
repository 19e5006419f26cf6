# The two commands of the README are `make demo` and `make test`; both make the environment first.

PYTHON ?= python3
VENV := .venv
STAMP := $(VENV)/.ready
# The demo needs less than the tests, which add theirs.
DEMO_STAMP := $(or $(wildcard $(STAMP)),$(VENV)/.demo)
BIN := $(VENV)/bin
# auto: vLLM for CUDA where an NVIDIA GPU answers, for CPU elsewhere.
FLAVOUR ?= auto
# Another version of vLLM than the tested one, e.g. 0.28.0.
VLLM ?=
MODEL ?=
# Test processes; each may hold an engine of its own.
WORKERS ?= 2
# Failed tests that are run a second time, alone; those that pass then are reported and do not fail the run.
AGAIN ?= 0
ARGS ?=
# A lesser processor to run the tests as: avx2, avx512 or avx512_bf16.
PROCESSOR ?=
ifneq ($(PROCESSOR),)
test test-all test-reached: export WEIR_TEST_PROCESSOR = $(PROCESSOR)
test test-all test-reached: export PYTHONPATH = $(CURDIR)/tests/support/processor
endif

.DEFAULT_GOAL := help
# What `make test-reached` has, in minutes.
MINUTES ?= 60
.PHONY: help venv demo bench test test-all test-reached mutants unit conformance unasync lint check docs docs-serve clean

help:
	@echo "make demo [MODEL=<directory or hub id>]   run the demo (under 5 minutes with the set-up)"
	@echo "make bench [ARGS=--smoke]                 stock vLLM, Weir and others, timed and checked (docs/bench.md)"
	@echo "make test [WORKERS=2]                     every capability on real engines, in so many processes (15 minutes)"
	@echo "make test-all                             every test that needs no GPU (an hour)"
	@echo "make test-reached [MINUTES=60]            what test-all has beyond test, of what your change reaches"
	@echo "make test-gpu [PART=1/4|two]              the tests that hold on NVIDIA GPUs, in parts of at most 9 minutes"
	@echo "make mutants [ARGS=ID]                    every seeded fault of tests/mutants, which some test has to notice"
	@echo "make conformance [ARGS=ARCH]              every architecture of vLLM's registry, and docs/models.md from it"
	@echo "make docs | docs-serve                    the documentation as a site in out/site | on http://localhost:8001"
	@echo "make check                                format, lint, types, the generated client, the forms of a request, and the import rules"
	@echo "make unasync                              client/client.py from client/async_client.py"
	@echo "make unit | lint | venv | clean           fast tests | ruff and mypy | the environment | remove what was built"

venv: $(STAMP)

$(STAMP) $(VENV)/.demo: pyproject.toml scripts/setup_env.py $(wildcard scripts/site/*.py scripts/constraints/*.txt)
	@$(PYTHON) scripts/setup_env.py --venv $(VENV) --for $(if $(@:%.demo=),all,demo) --flavour $(FLAVOUR) \
		$(if $(VLLM),--vllm $(VLLM)) --stamp $@

# Not everything is compiled to bytecode for the demo: it does that for what it imports.
demo: export PYTHONDONTWRITEBYTECODE =
demo: $(DEMO_STAMP)
	@$(BIN)/python -m examples.demo $(MODEL) $(ARGS)

bench: $(STAMP)
	@$(BIN)/weir bench $(ARGS)

# Every process of the tests would compile Weir again where this is set, as in many containers.
test test-all test-reached: export PYTHONDONTWRITEBYTECODE =
test: $(STAMP)
	@$(BIN)/python -m tests.tiers fast --workers $(WORKERS) --again $(AGAIN) -- $(ARGS)

test-all: $(STAMP)
	@$(BIN)/python -m tests.tiers all --workers $(WORKERS) $(if $(ARGS),,--store) -- $(ARGS)

test-reached: $(STAMP)
	@$(BIN)/python -m tests.tiers reached --workers $(WORKERS) --minutes $(MINUTES) --again $(AGAIN) -- $(ARGS)

# PART=k/n: a part of the tests of one card; PART=two: those of two cards.
.PHONY: test-gpu
test-gpu: $(STAMP)
	@$(BIN)/python -m tests.gpu $(if $(PART),--part $(PART)) $(ARGS)

unit: $(STAMP)
	@$(BIN)/python -m pytest tests/unit $(ARGS)

mutants: $(STAMP)
	@$(BIN)/python -m tests.mutants $(ARGS)

conformance: $(STAMP)
	@$(BIN)/python -m tests.conformance $(ARGS); status=$$?; \
		$(if $(ARGS),,$(BIN)/python -m tests.conformance.multimodal || status=1;) $(BIN)/python -m tests.conformance docs; exit $$status

unasync: $(STAMP)
	@$(BIN)/python scripts/unasync.py

lint: $(STAMP)
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@$(BIN)/mypy

check: lint
	@$(BIN)/python scripts/unasync.py --check
	@$(BIN)/python scripts/forms.py
	@test ! -f tests/unit/test_import_rules.py || $(BIN)/python -m pytest -q tests/unit/test_import_rules.py

docs: $(STAMP)
	@NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict
	@echo "out/site/index.html"

docs-serve: $(STAMP)
	@NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs serve --dev-addr localhost:8001

clean:
	rm -rf $(VENV) out build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis src/*.egg-info
	find src tests scripts examples -name __pycache__ -type d -prune -exec rm -rf {} +
