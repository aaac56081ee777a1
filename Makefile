# `make bench` checks and times every op on this machine, and writes records and a page to bench/out. `make test` runs what
# a change must pass, `make check` a part of it for the inner loop. `make docs` builds build/site. Each makes .venv and the
# extensions first. Variables: PYTHON, TORCH (requirement of torch for pip), TORCH_INDEX.

PYTHON ?= python3
TORCH ?= torch==2.13.0
TORCH_INDEX ?=
PY = .venv/bin/python
# so that an interpreter in which nothing is installed finds the harness and the emulator
export PYTHONPATH := $(CURDIR)/bench:$(CURDIR)/ptx_emulator/src$(addprefix :,$(PYTHONPATH))
JOBS ?= $(shell nproc 2>/dev/null || echo 2)
# a worker keeps the tests of a module together, and takes tests from another when it is done
PYTEST = OMP_NUM_THREADS=1 $(PY) -m pytest -n $(JOBS) --dist worksteal

.PHONY: setup build bench check check-compiled test nightly docs gpu sanitize lint clean
.DELETE_ON_ERROR:

setup: .venv/ready build

.venv/ready: pyproject.toml tools/setup.sh
	PYTHON="$(PYTHON)" TORCH="$(TORCH)" TORCH_INDEX="$(TORCH_INDEX)" bash tools/setup.sh
	touch $@

# In place and incremental; no network. On a machine that has torch and triton: make build PY=python3
build:
	$(PY) setup.py -q build_ext --inplace
	$(PY) -c "from ptx_emulator.program import library; library()"

# Seconds after which the measurements end. One case of every op is timed in any case, and the rest is listed.
DEADLINE ?= 420
bench: setup
	COLUMNS=80 $(PY) -m retro_bench run --json bench/out/latest.jsonl --fresh --deadline $(DEADLINE); code=$$?; \
	  $(PY) -m retro_bench report bench/out/latest.jsonl --format html --output bench/out/latest.html && exit $$code

# Without a network the folder is empty, and its test is skipped.
.venv/oldest: .venv/ready
	$(PY) -m pip --disable-pip-version-check install -q --no-deps --target $@ 'triton==3.6.*' || mkdir -p $@

# Rules of the tree, contracts, definitions, one model of each kind. Left out: the interpreter, compiled kernels, the
# harness and torch.compile.
CHECK = tests/test_house.py tests/reference tests/aot/test_tiles.py tests/bench/test_record.py tests/bench/test_work.py \
  $(addprefix tests/ops/test_,validation.py contract.py empty_rows.py fallback.py leaky_average.py relative_logits.py) \
  $(addprefix tests/model/,test_config.py test_layers.py test_retro.py memory_mosaics/test_model.py rpt/test_model.py)

check: setup lint
	$(PYTEST) $(CHECK) -k "not one_graph"

# Triton's interpreter changes what `import triton` means, so its tests have a process of their own.
test: setup lint .venv/oldest
	$(PYTEST) tests ptx_emulator/tests demos/reader/tests
	TRITON_INTERPRET=1 $(PYTEST) tests/ops -k "triton or topk_stream"

# Slow tests that rarely fail: those marked `nightly`, and every launch with the oldest triton.
nightly: setup .venv/oldest
	$(PYTEST) tests ptx_emulator/tests -m nightly --timeout 0
	TRITON_INTERPRET=1 $(PYTEST) tests/ops -k "triton or topk_stream" -m nightly --timeout 0
	RETRO_KERNELS_EVERY_LAUNCH=1 $(PYTEST) tests/aot/test_oldest.py --timeout 0

# The ops' suite on Triton kernels compiled for an architecture (ARCH: 80, 86, 89, 90, 100, 120) and emulated without a GPU.
ARCH ?= 90
check-compiled: setup
	RETRO_KERNELS_EMULATE=$(ARCH) $(PYTEST) tests/ops -k "(triton or topk_stream) and not fuzz"

# The table of speeds, and the site; a warning is an error. NO_MKDOCS_2_WARNING silences an advertisement.
docs: .venv/ready
	$(PY) -m tools.tables
	NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --strict
	$(PY) -m tools.links build/site

# On a machine with a GPU, torch and triton: `make gpu PY=python3`. STAGE=right|fast|tune|look runs one stage.
STAGE ?= all
gpu:
	$(PY) -m retro_bench gpu $(STAGE)

# The C++ under the address, undefined-behaviour and thread sanitizers, or those that SANITIZERS names.
SANITIZERS ?=
sanitize: setup
	$(PY) -m tools.sanitize $(SANITIZERS)

lint: .venv/ready
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	find csrc bench ptx_emulator tests tools -regex '.*\.\(h\|cpp\|cu\|cuh\)' | xargs $(dir $(PY))clang-format --dry-run -Werror

clean:
	rm -rf build .venv bench/out retro_kernels/*.so retro_model/*.so compile_commands.json
