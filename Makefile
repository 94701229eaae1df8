# Every target makes the development environment first, if need be. `make help` lists them.

PYTHON ?= python3
PYTEST_ARGS ?=
BUILD := build

# Expanded when a recipe runs, hence after `env` has done its work
BIN = .venv/bin

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
MAKEFLAGS += --no-builtin-rules

BENCHMARKS = $(sort $(patsubst benchmarks/%.py,%,$(wildcard benchmarks/*.py)))

.PHONY: help
help: ## list the targets
	@grep -hE '^[a-z0-9%-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

.PHONY: env
env: ## make the development environment if need be and print its bin folder, and nothing else
	@$(PYTHON) tools/environment.py

.PHONY: quiet-env
quiet-env:
	@$(PYTHON) tools/environment.py > /dev/null

.PHONY: demo
demo: quiet-env ## build, sign, verify and train a real model; minutes, set-up included
	$(BIN)/python demo/run.py --work $(BUILD)/demo --model "$$($(BIN)/python tools/smollm2.py)"

.PHONY: test
test: quiet-env ## run every test (PYTEST_ARGS="-k name" for some)
	$(BIN)/python -m pytest $(PYTEST_ARGS)

.PHONY: lint
lint: quiet-env ## check style, types, import contracts, dependencies and spelling
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/deptry .
	cd runtime && ../$(BIN)/deptry .
	cd formats && ../$(BIN)/deptry .
	$(BIN)/codespell

.PHONY: format
format: quiet-env ## rewrite the sources in the house style
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

.PHONY: docs
docs: quiet-env ## build the documentation into build/site, failing on every broken link
	$(BIN)/mkdocs build --strict --quiet --site-dir $(BUILD)/site

.PHONY: model
model: quiet-env ## print the folder of the test model (SmolLM2-135M-Instruct), making it if need be
	@$(BIN)/python tools/smollm2.py

.PHONY: rngd-env
rngd-env: ## print the Python of the RNGD toolchain's environment, making it (7 GB) if need be
	@$(PYTHON) tools/rngd_environment.py

.PHONY: bench
bench: $(addprefix bench-,$(subst _,-,$(filter-out rngd_%,$(BENCHMARKS)))) ## run every benchmark but those of RNGD

bench-%: quiet-env ## run one benchmark: bench-cpu-train runs benchmarks/cpu_train.py
	$(BIN)/python benchmarks/$(subst -,_,$*).py $(BENCH_ARGS)

# Minutes to hours of the vendor's compiler. Results are recorded in docs/explanation/validation.md; what was compiled
# stays in RNGD_WORK, so that a run that was ended goes on.
RNGD_WORK ?= $(BUILD)/rngd

.PHONY: rngd-8b rngd-8b-512
rngd-8b: quiet-env ## build the Llama-3.1-8B bundle for RNGD, cold, warm and with another rank
	$(BIN)/python benchmarks/rngd_build.py --config tests/npucc/data/llama-3.1-8b.json --work $(RNGD_WORK)/8b

rngd-8b-512: quiet-env ## the same with 512 tokens
	$(BIN)/python benchmarks/rngd_build.py --config tests/npucc/data/llama-3.1-8b.json --seq-len 512 --other-rank 0 \
	  --work $(RNGD_WORK)/8b-512

.PHONY: rngd-models
rngd-models: quiet-env ## build the bundles of all models for RNGD, with 128 and 512 tokens
	for model in smollm2-135m llama-3.2-1b llama-3.1-8b llama-2-7b; do for tokens in 128 512; do \
	  $(BIN)/python benchmarks/rngd_build.py --config tests/npucc/data/$$model.json --seq-len $$tokens --other-rank 0 \
	  --work $(RNGD_WORK)/$$model-$$tokens || exit 1; done; done

.PHONY: rngd-curve
rngd-curve: quiet-env ## train SmolLM2 for 30 steps in the vendor's executor, against the cpu target
	$(BIN)/python benchmarks/rngd_curve.py --work $(RNGD_WORK)/curve

.PHONY: rngd-lowered
rngd-lowered: quiet-env ## one step of two layers of SmolLM2 with lowered graphs
	$(BIN)/python benchmarks/rngd_curve.py --verify lowered --steps 0 --layers 2 --work $(RNGD_WORK)/lowered

.PHONY: golden
golden: quiet-env ## write the golden bundle of a new format version (an existing one is never replaced)
	$(BIN)/python tools/golden.py

.PHONY: clean
clean: ## delete everything that can be made again, but for the environment
	rm -rf $(BUILD) dist .mypy_cache .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +
