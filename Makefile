# Everything runs in .venv, which the first target makes; needs python3 (3.10 or later) and pip.
PYTHON ?= python3
BIN = .venv/bin

.PHONY: install demo test check format docs dist bench gpu
install: .venv/installed

.venv/installed: pyproject.toml constraints.txt
	@echo "installing torch, transformers and growkit into .venv, which takes minutes"
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

demo: install
	$(BIN)/growkit demo

test: install
	$(BIN)/python -m pytest --quiet --numprocesses auto --dist worksteal

check: install
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: install
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# In an environment of its own: the API reference is read from the sources, without torch.
docs: .venv-docs/installed
	.venv-docs/bin/mkdocs build

.venv-docs/installed: pyproject.toml
	$(PYTHON) -m venv .venv-docs
	.venv-docs/bin/python -m pip install --quiet --upgrade 'pip>=25.1'
	.venv-docs/bin/python -m pip install --quiet --group docs
	touch $@

dist: install
	rm -rf dist
	$(BIN)/python -m build --no-isolation
	$(BIN)/python -m twine check --strict dist/*

bench: install
	$(BIN)/python benchmarks/growth_speed.py
	$(BIN)/python benchmarks/attention_speed.py
	$(BIN)/python benchmarks/low_rank.py
	$(BIN)/python benchmarks/calibration.py
	$(BIN)/python benchmarks/proof_speed.py
	$(BIN)/python benchmarks/proof_memory.py

# With the packages that $(PYTHON) has: machines with a GPU often have no network.
gpu:
	@PYTHONPATH=. $(PYTHON) benchmarks/gpu.py
