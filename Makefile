# `make bench`: every op checked and timed on this machine; a table, its records and a page in bench/out.  `make test`:
# everything a change must pass; `make check`: a part of it, for the inner loop.  `make docs`: build/site.
# All make .venv and build the extensions first. Variables: PYTHON, TORCH (what pip installs as torch), TORCH_INDEX.

PYTHON ?= python3
TORCH ?= torch==2.13.0
TORCH_INDEX ?=
PY = .venv/bin/python
JOBS ?= $(shell nproc 2>/dev/null || echo 2)
# a worker keeps the tests of a module together, and one that is done takes from another
PYTEST = OMP_NUM_THREADS=1 $(PY) -m pytest -n $(JOBS) --dist worksteal

.PHONY: setup build bench check check-compiled test nightly docs gpu sanitize mutants lint clean
.DELETE_ON_ERROR:

setup: .venv/ready build

.venv/ready: pyproject.toml tools/setup.sh
	PYTHON="$(PYTHON)" TORCH="$(TORCH)" TORCH_INDEX="$(TORCH_INDEX)" bash tools/setup.sh
	touch $@

# In place and incremental; no network. On a machine that has torch and triton: make build PY=python3
build:
	$(PY) setup.py -q build_ext --inplace
	$(PY) -c "from bench.emulate.program import library; library()"

bench: setup
	COLUMNS=80 $(PY) -m bench run --json bench/out/latest.jsonl --fresh --deadline 420
	$(PY) -m bench report bench/out/latest.jsonl --format html --output bench/out/latest.html

# Where it can't be had its test is skipped, and says so.
.venv/oldest: .venv/ready
	$(PY) -m pip --disable-pip-version-check install -q --no-deps --target $@ 'triton==3.6.*' || mkdir -p $@

# Rules of the tree, contracts, definitions, one model of each kind; no interpreter, no compiled kernels, no harness runs,
# no model through torch.compile.
CHECK = tests/test_house.py tests/reference tests/aot/test_configs.py tests/bench/test_record.py tests/bench/test_work.py \
  $(addprefix tests/ops/test_,validation.py contract.py empty_rows.py fallback.py leaky_average.py relative_logits.py) \
  $(addprefix tests/model/,test_config.py test_layers.py test_retro.py memory_mosaics/test_model.py rpt/test_model.py)

check: setup lint
	$(PYTEST) $(CHECK) -k "not one_graph"

# Triton's interpreter changes what `import triton` means, so its tests have a process of their own.
test: setup lint .venv/oldest
	$(PYTEST) tests
	TRITON_INTERPRET=1 $(PYTEST) tests/ops -k "triton or topk_stream"

# What takes long and breaks rarely: tests marked `nightly`, and every launch with the oldest triton.
nightly: setup .venv/oldest
	$(PYTEST) tests -m nightly --timeout 0
	RETRO_KERNELS_EVERY_LAUNCH=1 $(PYTEST) tests/aot/test_oldest.py --timeout 0

# The ops' suite on compiled code: what Triton makes of each kernel for an architecture (ARCH: 80, 86, 89, 90, 100, 120), executed without a GPU.
ARCH ?= 90
check-compiled: setup
	RETRO_KERNELS_EMULATE=$(ARCH) $(PYTEST) tests/ops -k "(triton or topk_stream) and not fuzz"

# The speeds' table from the records; build/site, from docs/ and the docstrings; a warning is an error. NO_MKDOCS_2_WARNING silences an advertisement.
docs: .venv/ready
	$(PY) -m tools.tables
	NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --strict
	$(PY) -m tools.links build/site

# On a machine with a GPU, torch and triton, without network: `make gpu PY=python3`; STAGE=right|fast|tune|look for one of them.
STAGE ?= all
gpu:
	$(PY) -m bench gpu $(STAGE)

# The C++ with the address, undefined-behaviour and thread sanitizers (SANITIZERS="address thread": fewer); build/sanitize is kept.
SANITIZERS ?=
sanitize: setup
	$(PY) -m tools.sanitize $(SANITIZERS)

# Faults of one line, planted one at a time: which do the tests not notice? About an hour; `python -m tools.mutants 'bench/*'` for a part.
mutants: setup
	$(PY) -m tools.mutants

lint: .venv/ready
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	find csrc bench tests tools -regex '.*\.\(h\|cpp\|cu\|cuh\)' | xargs $(dir $(PY))clang-format --dry-run -Werror

clean:
	rm -rf build .venv bench/out retro_kernels/*.so retro_model/*.so compile_commands.json
