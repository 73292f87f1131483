# Two commands do all the set-up on a fresh machine: `make demo` and `make test`. Both make .venv from the lock.
# On Windows, which has no make: see CONTRIBUTING.md for the four lines that do the same.
PYTHON ?= python3
WORKERS ?= logical
TIDY = trimtab tests tools bench
# Bytecode is written even where the environment says not to: the tests start many processes, and each would compile every module.
ENV = HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false OMP_NUM_THREADS=1 PYTHONPATH=. PYTHONDONTWRITEBYTECODE=

# A stamp is named after what an environment was made from, so that a changed lock makes a new one and a touched file does not.
NEWEST := .venv/made-from-$(shell cat locks/newest.txt pyproject.toml | cksum | cut -d ' ' -f 1)
OLDEST := .venv-oldest/made-from-$(shell cat locks/oldest.txt pyproject.toml | cksum | cut -d ' ' -f 1)

COMPILER := .venv/compiler-$(shell cksum < locks/compiler.txt | cut -d ' ' -f 1)

PEERS := .venv-peers/made-from-$(shell cat locks/peers.txt | cksum | cut -d ' ' -f 1)

FORMATS := .venv-formats/made-from-$(shell cksum < locks/formats.txt | cut -d ' ' -f 1)

CLIENTS := $(shell cat locks/clients.txt tests/clients/package-lock.json | cksum | cut -d ' ' -f 1)
FUZZ := schemathesis-4.32.5
AXE := axe-core-4.14.1

.PHONY: demo mutants test test-all test-oldest test-upstream test-slow test-ray test-peers test-formats test-clients test-page test-sanitized test-gpu lint format house house-timed bench clean

demo: $(NEWEST)
	.venv/bin/python -m trimtab demo

test: $(NEWEST) $(COMPILER)
	$(ENV) .venv/bin/python -m pytest -q -n $(WORKERS) --maxprocesses 8 --dist loadfile tests

# The CUDA compiler, which needs no GPU, so that the kernels are compiled by the tests. torch's builds for GPUs bring one.
$(COMPILER): $(NEWEST)
	( .venv/bin/python -c "from trimtab.engine.cuda import nvrtc; raise SystemExit(not nvrtc.find_compiler())" \
		|| .venv/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -r locks/compiler.txt ) && touch $@ \
		|| echo "no network or no such package: the kernels are not compiled by the tests"

test-oldest: $(OLDEST)
	$(ENV) .venv-oldest/bin/python -m pytest -q -n $(WORKERS) --maxprocesses 8 --dist loadfile tests

# Everything that runs on a CPU without a network: the tests, what takes minutes, and mutated files by the ten thousand (15 minutes
# on two cores; TRIMTAB_FUZZ_CASES sets another number of each kind).
test-all: test test-slow
	$(ENV) .venv/bin/python -m tests.fuzz_files.run

# The known bugs of other packages, shown on releases that have them and on releases that have not; minutes.
test-upstream: $(NEWEST) $(OLDEST)
	$(ENV) TRIMTAB_OTHER_PYTHON=.venv-oldest/bin/python .venv/bin/python -m pytest -q -m slow tests/upstream

# What takes minutes: whole matrices, every kill, all examples of hypothesis, in this environment; requests made from the API's
# description in one of its own.
test-slow: $(NEWEST) $(OLDEST) .venv-fuzz/made-from-$(FUZZ)
	$(ENV) TRIMTAB_FUZZ_PYTHON=.venv-fuzz/bin/python TRIMTAB_OTHER_PYTHON=.venv-oldest/bin/python .venv/bin/python -m pytest -q -m slow tests
	$(ENV) TRIMTAB_TEST_EXAMPLES=all .venv/bin/python -m pytest -q -m "hypothesis and not slow" tests

.venv-fuzz/made-from-$(FUZZ):
	rm -rf .venv-fuzz
	$(PYTHON) -m venv .venv-fuzz
	.venv-fuzz/bin/python -m pip install --quiet --disable-pip-version-check $(subst schemathesis-,schemathesis==,$(FUZZ))
	touch $@

# The official clients, in Python and npm environments of their own, against a served demo model.
test-clients: $(NEWEST) .venv-clients/made-from-$(CLIENTS)
	$(ENV) TRIMTAB_CLIENTS_PYTHON=$(CURDIR)/.venv-clients/bin/python .venv/bin/python -m pytest -q -m slow tests/clients

.venv-clients/made-from-$(CLIENTS):
	rm -rf .venv-clients tests/clients/node_modules
	$(PYTHON) -m venv .venv-clients
	.venv-clients/bin/python -m pip install --quiet --disable-pip-version-check -r locks/clients.txt
	cd tests/clients && npm ci --ignore-scripts --no-audit --no-fund
	touch $@

# Two replicas on a local Ray, in an environment of its own beside the newest one. OpenTelemetry comes with Ray, and its traces
# are tested there.
test-ray: $(NEWEST)
	test -x .venv-ray/bin/python || ($(PYTHON) -m venv .venv-ray && .venv-ray/bin/python -m pip install --quiet -r locks/newest.txt "ray[serve]==2.60.0" \
		"opentelemetry-exporter-otlp-proto-http>=1.27")
	$(ENV) .venv-ray/bin/python -m pytest -q -m slow tests/serve/ray
	$(ENV) .venv-ray/bin/python -m pytest -q tests/serve/observe/test_tracing.py

# Do tests find a wrong line? 60 mutants of each room, a minute or two each; what is in bench/results/mutants.json is not tried again.
mutants: $(NEWEST)
	test -x .mutants/tools/bin/cosmic-ray || ($(PYTHON) -m venv .mutants/tools && .mutants/tools/bin/python -m pip install --quiet cosmic-ray==8.7.0)
	test -d .mutants/coverage || .venv/bin/python -m pip install --quiet --target .mutants/coverage coverage==7.17.5
	for room in planning adapters lora merging scheduling; do $(ENV) .venv/bin/python tools/mutants.py $$room || exit 1; done

# Other servers, in an environment of their own, asked whether their adapter is alive: llama-cpp-python and `transformers serve`.
# llama.cpp is compiled once, which takes minutes (half an hour on two busy cores); pip keeps what it built.
test-peers: $(NEWEST) $(PEERS)
	$(ENV) TRIMTAB_PEERS_PYTHON=$(CURDIR)/.venv-peers/bin/python .venv/bin/python -m pytest -q -m slow tests/peers

$(PEERS):
	rm -rf .venv-peers
	$(PYTHON) -m venv .venv-peers
	CMAKE_BUILD_PARALLEL_LEVEL=2 CMAKE_ARGS=-DLLAVA_BUILD=OFF .venv-peers/bin/python -m pip install --quiet --disable-pip-version-check -r locks/peers.txt
	touch $@

# The formats' own libraries, next to the newest environment: they make the golden files again, and read models themselves.
test-formats: $(NEWEST) $(FORMATS)
	$(ENV) PYTHONPATH=.:$(CURDIR)/.venv-formats .venv/bin/python -m pytest -q tests/golden/formats tests/gguf/test_foreign.py \
		tests/engine/formats/test_format_models.py -k "golden or foreign or stock_route or stock_computes"

$(FORMATS): $(NEWEST)
	rm -rf .venv-formats
	.venv/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --target .venv-formats -r locks/formats.txt
	touch $@

# The page in a headless Chromium of the system (apt-get install chromium), and every state of it looked through by axe-core
# (from npm, for this alone). What is not there is skipped with a reason.
test-page: $(NEWEST)
	test -e .npm-page/made-from-$(AXE) || (rm -rf .npm-page && mkdir .npm-page && \
		npm install --silent --no-audit --no-fund --ignore-scripts --prefix .npm-page $(subst axe-core-,axe-core@,$(AXE)) && \
		touch .npm-page/made-from-$(AXE)) || echo "no npm or no network: the page is not looked through by axe-core"
	$(ENV) .venv/bin/python -m pytest -q -m slow tests/page || [ $$? -eq 5 ]  # 5: nothing to run here

# Every access of the kernels, on a CPU: one beside a tensor, or not aligned, ends the run with its line.
test-sanitized: $(NEWEST)
	LD_PRELOAD="$$(g++ -print-file-name=libasan.so) $$(g++ -print-file-name=libstdc++.so)" TRIMTAB_TESTS_SANITIZED=1 \
		ASAN_OPTIONS=detect_leaks=0:use_sigaltstack=0:detect_stack_use_after_return=0 $(ENV) .venv/bin/python -m pytest -q -s \
		-p no:xdist -k "not compile" tests/cuda_on_cpu tests/engine/kernels tests/engine/batched_lora tests/engine/tiers/test_near_experts.py \
		tests/engine/formats/test_head8.py tests/engine/families/test_mixture_steps.py tests/engine/towers/test_tower_ops.py

# On a GPU machine the environment is its owner's: torch there is built for its CUDA.
test-gpu:
	TRIMTAB_TEST_DEVICE=cuda $(ENV) $(PYTHON) -m pytest -q tests/gpu

lint: $(NEWEST)
	.venv/bin/ruff check $(TIDY)
	.venv/bin/ruff format --check $(TIDY)
	.venv/bin/mypy

format: $(NEWEST)
	.venv/bin/ruff check --fix $(TIDY)
	.venv/bin/ruff format $(TIDY)

# Is the code getting simpler? A table of its numbers; fails where one is worse than its record (two minutes, most of it for the
# files that `trimtab run` and a chat request enter). The second one times starts and the default tests, and fails nothing.
house: $(NEWEST)
	$(ENV) .venv/bin/python tools/house.py

house-timed: $(NEWEST)
	$(ENV) .venv/bin/python tools/house.py --timed

bench:
	$(ENV) $(PYTHON) -m bench.memory --work $${TMPDIR:-/tmp}/trimtab-bench --save bench/results/memory.json

clean:
	rm -rf .venv .venv-oldest .venv-ray .venv-fuzz .venv-clients tests/clients/node_modules .venv-peers .venv-formats .npm-page .mutants .pytest_cache .mypy_cache .ruff_cache .hypothesis

$(NEWEST): LOCK = locks/newest.txt
$(OLDEST): LOCK = locks/oldest.txt
$(NEWEST) $(OLDEST):
	@echo "making $(@D) from $(LOCK): a few minutes, once"
	rm -rf $(@D)
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install --quiet --disable-pip-version-check -r $(LOCK)
	$(@D)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	touch $@
