# `make demo` and `make test` set up $(VENV) by themselves; they need Python >= 3.11 and a package registry.
# Override PYTHON to choose the interpreter and VENV to choose the folder.

SUPPORTED = -c 'import sys; sys.exit(sys.version_info < (3, 11))'
PYTHON ?= $(shell for p in python3.11 python3 python; do $$p $(SUPPORTED) 2>/dev/null && echo $$p && break; done)
has_python = test -n "$(PYTHON)" || { echo "jgr needs Python 3.11 or newer: make PYTHON=/path/to/python3.11"; exit 1; }
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# The file in requirements/ with the versions to install: by default the shell asks the Python of $(VENV).
LOCK ?= $$($(BIN)/python -c 'import sys; print("py311" if sys.version_info < (3, 12) else "py312")')
UV := build/uv/bin/uv
UV_VERSION := 0.13.8
# uv takes a tenth of pip's time. Where it finds no registry, since pip alone was told of one, pip installs the same.
# Where Python is told to write no compiled modules, they are compiled here, and not by each of the hundreds of commands
# that tests run; elsewhere whoever imports one first does it, and for one module in ten.
install = if $(UV) pip install --quiet $(if $(PYTHONDONTWRITEBYTECODE),--compile-bytecode) --python $(BIN)/python $(1); then :; else \
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $(1); fi
# Compiling for a GPU takes a plugin, in a folder of its own, so that tests run without it.
GPU := build/gpu-compile-$(notdir $(VENV))

DEBIAN := build/debian
NATIVE := build/native-$(notdir $(VENV))

.PHONY: demo docs installed native test claims test-quick test-jax installed-lowest test-lowest installed-fleet test-fleet fleet-wheel compile-gpu lint types lock clean

demo: $(STAMP)
	$(BIN)/jgr demo

# A page, a link or an anchor that is missing ends it.
docs: $(STAMP)
	$(BIN)/python -m sphinx --fail-on-warning --keep-going --quiet docs build/docs
	@echo build/docs/index.html

installed: $(STAMP) $(NATIVE)/.built $(GPU)/.installed $(DEBIAN)/.unpacked $(DEBIAN)/.chromium

# Kernels for CPUs, which jgr does without too: into $(VENV). It takes a C++ compiler.
native: $(STAMP)
	$(BIN)/python -m pip install --disable-pip-version-check --no-deps --no-build-isolation ./native

# The same beside $(VENV), for tests: most of them run as after a plain install.
$(NATIVE)/.built: $(STAMP) $(wildcard native/*.py native/*.toml native/src/* native/jgr_native/*.py)
	rm -rf $(NATIVE)
	mkdir -p $(NATIVE)
	@if command -v $${CXX:-g++} >/dev/null; then $(BIN)/python -m pip install --quiet --disable-pip-version-check \
	  --no-deps --no-build-isolation --target $(NATIVE) ./native; \
	else echo "There is no C++ compiler: the tests of the kernels for CPUs are left out."; fi
	@touch $@

# Programs of Debian's that tests run: unpacked, not installed. Without apt, or the network, these tests are left out.
$(DEBIAN)/.unpacked:
	mkdir -p $(DEBIAN)
	-command -v prometheus >/dev/null || \
	  (cd $(DEBIAN) && apt-get download prometheus && dpkg-deb -x prometheus_*.deb . && rm prometheus_*.deb)
	touch $@

# Chromium needs libraries of its own, so it is installed, which only root can.
CHROMIUM := apt-get install -y --no-install-recommends chromium
$(DEBIAN)/.chromium: $(DEBIAN)/.unpacked
	mkdir -p $(DEBIAN)
	@if command -v chromium; then :; \
	elif [ "$$(id -u)" = 0 ] && ($(CHROMIUM) || (apt-get update && $(CHROMIUM))) >$(DEBIAN)/chromium.log 2>&1; then :; \
	else echo "There is no chromium, and it could not be installed: the tests of the pages are left out."; fi
	@touch $@

# Whole files to each process: what a file's fixtures start is started once. In the order of tests/conftest.py. One
# process more than two cores: a quarter of the time a test waits for servers and commands that it has started.
WORKERS := -n 3 --dist loadfile --no-loadscope-reorder

test: lint types
	$(BIN)/python -m pytest $(WORKERS)

# What was measured on other code than this, and what it takes to measure it again.
claims: $(STAMP)
	$(BIN)/python -m tools.claims

test-quick: $(STAMP)
	$(BIN)/python -m pytest $(WORKERS) -m "not slow"

# What a newer jax could break: every kernel, in each dialect, each family of models against its goldens or formulas, each
# compiled program of the engine, training and its checkpoints, the compilation cache.
ON_JAX := tests/ops \
	tests/models/test_golden_hf.py::test_every_array[qwen3] \
	tests/models/test_hstu.py tests/models/test_stu.py tests/models/test_climber.py \
	tests/models/test_lazy_decoder.py::test_training_and_generation_compute_the_formulas \
	tests/models/test_lru_rec.py::test_the_losses_are_the_full_and_the_sampled_softmax \
	tests/models/test_checkpoint.py \
	tests/serving/decoders/test_paged_executor.py::test_cold_warm_and_partly_cached_score_the_same \
	tests/serving/decoders/test_pool_and_programs.py::test_no_program_copies_the_pool \
	tests/serving/scorers/test_executors.py \
	tests/serving/decoders/test_model_server.py::test_a_second_start_reads_its_programs_from_disk \
	tests/training/test_trainer.py::test_a_trained_folder_is_served_and_has_learnt_the_rule \
	tests/training/test_ranker.py::test_the_loss_is_that_of_the_target_among_the_candidates_and_of_every_next_item \
	tests/training/test_going_on.py::test_a_disk_that_fills_up_ends_a_run_that_goes_on_later \
	tests/training/test_rq_vae.py \
	tests/tools/test_shared_stage.py

# Of these, by programs as XLA makes them in service (tests/conftest.py says what others leave), which take twice as long
# to compile: goldens of decoders, a search under filters against one by hand, scores of each scorer.
AS_SERVED := tests/models/test_golden_hf.py::test_every_array[qwen2] \
	tests/models/test_golden_hf.py::test_every_array[llama3] \
	tests/models/test_beam.py::test_a_filter_is_a_search_of_the_tree_that_it_leaves \
	tests/models/test_scorers.py

test-jax: $(STAMP)
	$(BIN)/python -m pytest $(WORKERS) -m "not slow" $(ON_JAX)
	JGR_AS_SERVED=1 $(BIN)/python -m pytest $(WORKERS) -m "not slow" $(AS_SERVED)

# Where an older version of a dependency would break: configurations, catalogs over msgspec, the server over uvicorn,
# starlette and httptools, checkpoints, a run of training with its picture.
ON_LOWEST := tests/config/test_config.py \
	tests/catalog/test_catalog.py tests/catalog/test_columns.py \
	tests/serving/http/test_http.py tests/serving/http/test_connections.py tests/serving/http/test_upgrades.py \
	tests/models/test_checkpoint.py \
	tests/training/test_progress.py::test_the_best_validated_weights_are_kept_and_patience_ends_a_run

# The lowest versions that pyproject.toml allows, in an environment of their own.
LOWEST := .venv-lowest
installed-lowest:
	$(MAKE) VENV=$(LOWEST) LOCK=lowest-py311 $(LOWEST)/.installed

test-lowest: installed-lowest
	$(LOWEST)/bin/python -m pytest $(WORKERS) -m "not slow" $(ON_LOWEST)

# The tests that start Ray, in an environment of their own: `make test` leaves them out.
WITH_RAY := .venv-ray
installed-fleet: BIN := $(WITH_RAY)/bin
installed-fleet:
	$(MAKE) VENV=$(WITH_RAY) $(WITH_RAY)/.installed
	$(call install,--constraint requirements/$(LOCK).txt --editable ".[cluster]")

test-fleet: installed-fleet
	$(WITH_RAY)/bin/python -m pytest -m ray tests/serving/cluster tests/test_deploy.py tests/test_fleet_install.py

# As a user does: an environment of its own, the wheel with jgr[cluster] from the registry, and one command that starts two
# replicas. tests/test_fleet_install.py does the same with the packages that are here.
FLEET := build/fleet
fleet-wheel: $(STAMP)
	rm -rf $(FLEET)
	$(BIN)/python -m pip wheel --quiet --disable-pip-version-check --no-deps --no-build-isolation -w $(FLEET) .
	$(PYTHON) -m venv $(FLEET)/venv
	$(FLEET)/venv/bin/python -m pip install --quiet --disable-pip-version-check "$$(echo $(FLEET)/*.whl)[cluster]"
	$(BIN)/python -m tools.try_fleet $(FLEET)/venv/bin/jgr

# Compiles for a GPU without one.
compile-gpu: $(GPU)/.installed
	PYTHONPATH=$(GPU) JAX_PLATFORMS=cpu $(BIN)/python -m tools.compile_gpu --processes=2

$(GPU)/.installed: $(STAMP) $(wildcard requirements/gpu-compile-*.txt)
	rm -rf $(GPU)
	toolkit=$$(command -v ptxas >/dev/null || echo "-r requirements/gpu-compile-toolkit.txt") && \
	$(call install,--no-deps --require-hashes --target $(GPU) -r requirements/gpu-compile-$(LOCK).txt $$toolkit)
	@touch $@

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(STAMP)
	$(BIN)/mypy

$(UV):
	@$(has_python)
	$(PYTHON) -m venv build/uv
	build/uv/bin/python -m pip install --quiet --disable-pip-version-check uv==$(UV_VERSION)

$(STAMP): | $(UV)
$(STAMP): pyproject.toml setup.py requirements/py311.txt requirements/py312.txt requirements/lowest-py311.txt
	@$(has_python)
	@echo "Installing jgr and its dependencies into $(VENV) (about 1 GB; once)"
	$(PYTHON) -m venv $(VENV)
	$(call install,--require-hashes -r requirements/$(LOCK).txt)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable .
	@touch $@

# The runtime files, for the Dockerfiles, hold the same pins as py311.txt without training and the developers' tools.
lock: $(UV)
	$(call compile,3.11,py311) --extra dev --upgrade
	$(call compile,3.12,py312) --extra dev --upgrade
	$(call compile,3.11,runtime-py311) --extra redis --constraint requirements/py311.txt
	$(call compile,3.11,runtime-cuda13-py311) --extra cuda13 --extra redis --constraint requirements/py311.txt
	$(call compile,3.11,lowest-py311) --extra test --resolution lowest-direct

compile = $(UV) pip compile --quiet --no-config --generate-hashes --custom-compile-command "make lock" \
	--python-platform x86_64-manylinux_2_28 --python-version $(1) --output-file requirements/$(2).txt \
	pyproject.toml requirements/build.in

clean:
	rm -rf $(VENV) build jgr.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
