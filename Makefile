# Every command works on a machine that has Python 3.11+ and make, and nothing else.
PYTHON ?= python3
BIN := .venv/bin
PARALLEL := -n auto --maxprocesses 4 --dist worksteal

.PHONY: demo test test-all test-gpu check bench docs figures release-check clean

demo: .venv/installed-demo  ## every estimator on a small network, trained on the spot: a table, and a plot in demo/
	$(BIN)/neuromanifold demo --out demo

test: check  ## style, types, tests: what CI runs
	$(BIN)/pytest $(PARALLEL) -m "not slow"

test-all: check docs  ## also the slow tests, property tests drawn anew, and the docs
	HYPOTHESIS_PROFILE=explore $(BIN)/pytest $(PARALLEL)

test-gpu: .venv/installed-test  ## on a machine with a GPU: tests that use it; compiled kernels and whole networks against float64
	TRITON_INTERPRET=0 $(BIN)/python benchmarks/gpu_session.py --sections tests checks --budget 600 --out dist/gpu

check: .venv/installed-test
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

bench: .venv/installed-test  ## ratios measured side by side, printed and kept in benchmarks/results/
	$(BIN)/python benchmarks/core.py
	$(BIN)/python benchmarks/estimators.py
	$(BIN)/python benchmarks/samplewise.py --skip-others
	$(BIN)/python benchmarks/accuracy.py digits
	$(BIN)/python benchmarks/bounds.py
	$(BIN)/python benchmarks/operators.py
	$(BIN)/python benchmarks/ablation.py

docs: .venv/installed-docs  ## docs/_build/html/index.html, with every figure made anew
	$(BIN)/sphinx-build -W --keep-going -q -b html docs docs/_build/html

figures: .venv/installed-demo  ## docs/images/fisher-histograms.png, which the README shows
	$(BIN)/python docs/figures/readme.py

release-check: .venv/installed-release  ## wheel and sdist built, checked, and tried in a fresh environment; workflows linted
	$(BIN)/check-jsonschema --builtin-schema vendor.github-workflows .github/workflows/*.yml
	$(BIN)/check-jsonschema --builtin-schema vendor.github-issue-forms .github/ISSUE_TEMPLATE/bug.yml .github/ISSUE_TEMPLATE/feature.yml
	$(BIN)/check-jsonschema --builtin-schema vendor.citation-file-format CITATION.cff
	$(BIN)/zizmor --offline --quiet .github
	rm -rf dist && $(BIN)/python -m build --outdir dist
	$(BIN)/twine check --strict dist/*
	$(PYTHON) -m venv dist/fresh
	dist/fresh/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt "$$(echo dist/*.whl)[cli]"
	cd dist && fresh/bin/python ../tests/try_release.py ..

clean:
	rm -rf .venv dist docs/_build docs/reference/api docs/reference/commands.md demo .mypy_cache .pytest_cache .ruff_cache .hypothesis

# One virtual environment; a stamp for each set of extras that has been installed into it.
.venv/installed-demo: EXTRAS := demo
.venv/installed-test: EXTRAS := test
.venv/installed-docs: EXTRAS := docs
.venv/installed-release: EXTRAS := release

.venv/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "neuromanifold needs Python 3.11 or later; name one with: make PYTHON=python3.12 ..."; exit 1; }
	$(PYTHON) -m venv .venv

.venv/installed-%: .venv/bin/python pyproject.toml constraints.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[$(EXTRAS)]"
	@touch $@
