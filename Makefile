# Two commands do everything on a fresh Linux machine with Python >= 3.10, make and a C/C++ compiler:
#   make demo    the main job on real input, with its checks and a benchmark
#   make test    the tests (`make test-all`: those of the benchmark's and the documentation's tools as well)
# Both set up what they need in .venv, or use `python3` as it is where it has everything. Another Python: make PYTHON=...

PYTHON ?= python3
JOBS ?= $(shell n=$$(env -u OMP_NUM_THREADS nproc 2>/dev/null || echo 2); echo $$((n < 4 ? n : 4)))

OLD = sys.exit("[set-up] %s is Python %d.%d; Rooftile needs 3.10 or newer. Name another one: make PYTHON=python3.12 ..." % ((sys.executable,) + sys.version_info[:2]))
WITH = @$(PYTHON) -c 'import sys; sys.version_info >= (3, 10) or $(OLD)' && $(PYTHON) tools/setup_env.py

# Files whose tables are generated from the cases and results/.
TABLES = README.md $(wildcard docs/*.md docs/*/*.md)

# Python's processes, some dozens in the tests, share what one has compiled to bytecode.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test test-all lint format types docs docs-check site site-serve package clean

demo:
	$(WITH) demo -m rooftile.demo

# Each worker computes on one thread: the tests are many and small. Tests of a file share what it has built or compiled.
test test-all: export OMP_NUM_THREADS = 1
test test-all: export OPENBLAS_NUM_THREADS = 1
test:
	$(WITH) test -m pytest -n $(JOBS) --dist loadfile $(ARGS)

test-all:
	$(WITH) test -m pytest -n $(JOBS) --dist loadfile -m "nightly or not nightly" $(ARGS)
	$(WITH) test tools/compile_targets.py options

lint:
	$(WITH) dev -m ruff check .
	$(WITH) dev -m ruff format --check .

format:
	$(WITH) dev -m ruff check --fix .
	$(WITH) dev -m ruff format .

types:
	$(WITH) dev -m mypy

docs:
	$(WITH) demo -m rooftile.bench.docs $(TABLES)

docs-check:
	$(WITH) demo -m rooftile.bench.docs --check $(TABLES)

# mkdocs.yml makes warnings errors.
site site-serve: export NO_MKDOCS_2_WARNING = 1
site:
	$(WITH) site -m mkdocs build $(ARGS)

site-serve:
	$(WITH) site -m mkdocs serve

# The wheel and the source distribution, tried in an empty environment.
package:
	$(WITH) dev tools/check_package.py

clean:
	rm -rf .venv .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist site
