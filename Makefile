PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# torchvision is compiled against one torch: the pair is named here, once.
TORCH ?= torch==2.14.1 torchvision==0.29.1
PYTEST := $(BIN)/python -m pytest

.PHONY: demo test everything lint typing clean

$(STAMP): pyproject.toml Makefile
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q --disable-pip-version-check $(TORCH)
	$(BIN)/python -m pip install -q --disable-pip-version-check -e '.[model,calibrate,dev]'
	touch $@

demo: $(STAMP)
	$(BIN)/python examples/demo.py demo

# Two workers on two cores; every file stays on one worker so that its fixtures are built once.
test: $(STAMP)
	OMP_NUM_THREADS=1 $(PYTEST) -n 2 --dist loadfile --no-loadscope-reorder

# Slow tests and matrices whole, of which `test` takes a fifth, by the commit: less than an hour.
everything: $(STAMP)
	H3COMPILE_SHARD=all OMP_NUM_THREADS=1 $(PYTEST) -n 2 --dist loadfile --no-loadscope-reorder

# mypy cannot see setuptools' package-dir mapping: a link tree shows it the installed layout.
typing:
	rm -rf build/typing && mkdir -p build/typing/h3compile
	for f in h3compile/*; do ln -s ../../../$$f build/typing/$$f; done
	for d in passes backends models; do ln -s ../../../$$d build/typing/h3compile/$$d; done

lint: $(STAMP) typing
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy build/typing/h3compile

clean:
	rm -rf build demo .pytest_cache .mypy_cache .ruff_cache
