# Every target sets up .venv by itself, from a bare checkout with Python 3.10+ and a C++17 compiler.
PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet
TORCH := torch>=2.13,<2.14
FOLDERS := proto kernels system model data exchange training method edge_client server export lab dashboard cli
KERNEL_SOURCES := kernels/CMakeLists.txt $(shell find kernels/include kernels/src -type f)

# What `make check` runs of the tests: the folders that run no command or simulation, no export runtime, no emulated
# board and no federation.
QUICK := $(addprefix tests/,system kernels model data exchange training method edge_client server proto) \
	tests/test_imports.py tests/test_sizes.py

.PHONY: help demo check test lint sanitize bench wheels clean
.DEFAULT_GOAL := help

help: ## this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "  make %-8s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: .venv/installed ## a server and four boards on this machine train digits over mutual TLS
	@$(BIN)/python -m tools.demo

check: lint ## for the edit loop, under two minutes: lint, then the quick tests
	@$(BIN)/pytest -n 2 -q -m "not slow" --hypothesis-profile=quick $(QUICK)

test: lint sanitize ## lint, sanitizers, then every test
	@$(BIN)/pytest -n 2 --dist worksteal -q

lint: .venv/installed build/typed ## ruff and mypy
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@MYPYPATH=build/typed $(BIN)/mypy -p fedmpq -p bench -p tests -p tools -m setup

# Python itself is not instrumented, so the sanitizer's runtime goes in first; Python frees little at its end, by design.
# Random graphs go through the engines for half a minute; `make sanitize FUZZ_SECONDS=3600` for an hour.
FUZZ_SECONDS ?= 30
sanitize: .venv/installed ## the kernels' tests and random graphs with the address and undefined-behaviour sanitizers
	@$(BIN)/cmake -G Ninja -DCMAKE_MAKE_PROGRAM=$(CURDIR)/$(BIN)/ninja -S kernels -B build/sanitized \
		-DFEDMPQ_SANITIZE=ON -DFEDMPQ_OUTPUT_DIRECTORY=$(CURDIR)/build/sanitized >/dev/null
	@$(BIN)/cmake --build build/sanitized >/dev/null
	@LD_PRELOAD="$$($(CXX) -print-file-name=libasan.so)" ASAN_OPTIONS=detect_leaks=0 \
		FEDMPQ_KERNELS=$(CURDIR)/build/sanitized/libfedmpq_kernels.so FEDMPQ_FUZZ_SECONDS=$(FUZZ_SECONDS) \
		$(BIN)/pytest -n 2 -q tests/kernels tests/training/test_random_graphs.py

bench: .venv/installed ## the engine against torch, rounds against Flower; writes docs/performance.md
	@$(BIN)/python -m bench.performance

wheels: .venv/installed ## a wheel for x86_64 and one for aarch64, into dist/
	@$(BIN)/python -m tools.wheels

clean: ## remove .venv, builds and caches
	rm -rf .venv build dist *.egg-info kernels/*.so .mypy_cache .pytest_cache .ruff_cache .hypothesis

# An editable install maps packages to folders through an import hook, which mypy does not run: give it real paths.
build/typed: Makefile
	@rm -rf $@ && mkdir -p $@/fedmpq
	@for file in __init__.py py.typed; do ln -s ../../../front_door/$$file $@/fedmpq/$$file; done
	@for folder in $(FOLDERS); do ln -s ../../../$$folder $@/fedmpq/$$folder; done

.venv/installed: pyproject.toml setup.py $(KERNEL_SOURCES) | .venv/bin/python
	@command -v c++ >/dev/null || command -v g++ >/dev/null || command -v clang++ >/dev/null || { \
		echo "no C++ compiler found: install one, e.g. g++" >&2; exit 1; }
	@echo "==> torch (once, the largest download)"
	@$(PIP) "$(TORCH)"
	@echo "==> build tools"
	@$(PIP) "setuptools>=77" "cmake>=3.22" ninja
	@echo "==> fedmpq with its kernels, lab, export and development tools"
	@# setuptools warns at every editable install, whatever the layout
	@PYTHONWARNINGS=ignore $(PIP) --no-build-isolation -e ".[edge,server,dashboard,postgres,export,lab,dev]"
	@touch $@

.venv/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { \
		echo "$(PYTHON) is older than 3.10: name another, e.g. make PYTHON=python3.11" >&2; exit 1; }
	@echo "==> .venv"
	@$(PYTHON) -m venv .venv
