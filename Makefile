# The same commands for people and for CI. `make demo` needs python3 3.10 or newer, pip and make; nothing else.
PYTHON ?= python3
VENV ?= .venv
COMFYUI_PATH ?=
COMFYUI_PYTHON ?= $(firstword $(wildcard $(COMFYUI_PATH)/.venv/bin/python $(COMFYUI_PATH)/venv/bin/python \
                    $(COMFYUI_PATH)/../venv/bin/python) $(PYTHON))
ARGS ?=
TESTS ?= tests/comfy

# Threads that wait without spinning: on a busy machine the demo and the tests run four times as fast, on an idle
# one as fast as before.
export OMP_WAIT_POLICY ?= PASSIVE

IN_VENV := $(VENV)/bin/python
# `import vc_attention` under a Python that must get nothing installed. Never put this folder itself on the path:
# nodes/ and kernels/ would shadow ComfyUI's nodes.py and the package `kernels`.
SHIM := $(CURDIR)/build/shim
COMFY_TOOLS := $(CURDIR)/build/comfy-tools
TRAIN_TOOLS := $(CURDIR)/build/train-tools

.PHONY: help demo demo-comfy lint format test test-gpu test-comfy bench table fidelity train clean venv-demo venv-test shim

help:
	@echo "make demo        render a clip twice, exact and with VC-Attention, into demo/output/ (ARGS='--mode 4-bit')"
	@echo "make demo-comfy  the same through ComfyUI (COMFYUI_PATH, COMFYUI_PYTHON)"
	@echo "make lint        ruff check and format check"
	@echo "make test        lint, tests that need no GPU and no ComfyUI, and the installed wheel"
	@echo "make test-gpu    tests of the GPU kernels, with this machine's python3 and torch"
	@echo "make test-comfy  tests inside a real ComfyUI (COMFYUI_PATH, COMFYUI_PYTHON)"
	@echo "make bench       time the GPU kernels against every peer found here, append rows to benchmarks/results/"
	@echo "make table       draw the tables of the README and of three pages in docs from the rows"
	@echo "make fidelity    render under every number format on one GPU, append rows, draw docs/fidelity.md"
	@echo "make train       train the demo's video model on one GPU (PYTHON with torch; ARGS='--minutes 10')"
	@echo "make clean       remove what these commands made"

venv-demo:
	@$(PYTHON) demo/setup_env.py --venv $(VENV) demo/requirements.txt

venv-test:
	@$(PYTHON) demo/setup_env.py --venv $(VENV) tests/requirements.txt

demo: venv-demo
	@$(IN_VENV) demo/run.py $(ARGS)

demo-comfy: venv-demo
	@test -n "$(COMFYUI_PATH)" || { echo "set COMFYUI_PATH to a ComfyUI folder" >&2; exit 2; }
	@$(IN_VENV) demo/run_comfy.py --comfyui "$(COMFYUI_PATH)" --python "$(COMFYUI_PYTHON)" $(ARGS)

lint: venv-test
	$(IN_VENV) -m ruff check .
	$(IN_VENV) -m ruff format --check .

format: venv-test
	$(IN_VENV) -m ruff check --fix .
	$(IN_VENV) -m ruff format .

# `bin/pytest`, not `python -m pytest`: the latter puts this folder on sys.path.
test: lint
	$(VENV)/bin/pytest tests/plain tests/torch_cpu tests/comfy $(ARGS)
	$(IN_VENV) tests/check_wheel.py

shim:
	@mkdir -p $(SHIM)
	@ln -sfn ../../kernels $(SHIM)/vc_attention

test-gpu: shim
	PYTHONPATH=$(SHIM) PYTHONSAFEPATH=1 REQUIRE=$(or $(REQUIRE),cuda) $(PYTHON) -m pytest tests/gpu $(ARGS)

test-comfy: shim
	@test -n "$(COMFYUI_PATH)" || { echo "set COMFYUI_PATH to a ComfyUI folder" >&2; exit 2; }
	@for tool in pytest playwright; do \
	    PYTHONPATH=$(COMFY_TOOLS) $(COMFYUI_PYTHON) -c "import $$tool" 2>/dev/null || \
	    $(COMFYUI_PYTHON) -m pip install --quiet --upgrade --target $(COMFY_TOOLS) $$tool || exit; done
	PYTHONPATH=$(SHIM):$(COMFY_TOOLS) PYTHONSAFEPATH=1 REQUIRE=$(or $(REQUIRE),comfy) COMFYUI_PATH=$(COMFYUI_PATH) \
	    $(COMFYUI_PYTHON) -m pytest $(TESTS) $(ARGS)

bench: shim
	PYTHONPATH=$(SHIM) $(PYTHON) benchmarks/bench.py $(ARGS)

table: venv-test
	$(IN_VENV) benchmarks/table.py
	$(IN_VENV) benchmarks/fidelity_page.py
	$(IN_VENV) benchmarks/fourbit_page.py

fidelity: shim
	PYTHONPATH=$(SHIM) $(PYTHON) benchmarks/fidelity.py --strip docs/fidelity-strip.png $(ARGS)
	PYTHONPATH=$(SHIM) $(PYTHON) benchmarks/fidelity_page.py --plots

train:
	@PYTHONPATH=$(TRAIN_TOOLS) $(PYTHON) training/photographs.py >/dev/null 2>&1 || \
	    $(PYTHON) -m pip install --quiet --no-deps --upgrade --target $(TRAIN_TOOLS) -r training/requirements.txt
	PYTHONPATH=$(TRAIN_TOOLS) $(PYTHON) training/train.py $(ARGS)

clean:
	rm -rf $(VENV) build dist *.egg-info demo/output .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -not -path './.git/*' -prune -exec rm -rf {} +
