#!/usr/bin/env bash
# Makes .venv with everything that `make bench` and `make test` need. Called by the Makefile, from the repository root.
#
# torch comes from, in this order: the Python that makes the environment, if it has torch and triton (no network is
# used then); pip, CPU build, where there is no NVIDIA GPU; pip, CUDA build, where there is one.
set -euo pipefail
say() { printf '== %s\n' "$*"; }
pip() { .venv/bin/python -m pip --disable-pip-version-check -q "$@"; }

if "$PYTHON" -c 'import torch, triton' 2>/dev/null; then
  say "using the torch and triton of $PYTHON"
  "$PYTHON" -m venv --system-site-packages .venv
else
  "$PYTHON" -m venv .venv
fi

if ! .venv/bin/python -c 'import torch' 2>/dev/null; then
  index=(${TORCH_INDEX:+--index-url "$TORCH_INDEX"})
  if command -v nvidia-smi >/dev/null && nvidia-smi >/dev/null 2>&1; then
    say "an NVIDIA GPU is here: installing $TORCH with CUDA"
  else
    # ask pip what it would fetch: CUDA libraries are gigabytes, of no use without a GPU
    plan=$(.venv/bin/python -m pip --disable-pip-version-check install --dry-run --quiet --report - "${index[@]}" "$TORCH")
    if grep -qE '"name": "(nvidia-|cuda-)' <<<"$plan"; then
      printf '%s\n' "No GPU here, but pip's '$TORCH' is the CUDA build (gigabytes). Give the address of the CPU builds" \
        "(the CPU command on pytorch.org, 'Get started') and run again:  make setup TORCH_INDEX=ADDRESS" >&2
      exit 1
    fi
    say "no NVIDIA GPU here: installing the CPU build of $TORCH"
  fi
  pip install "${index[@]}" "$TORCH"
fi

# pip takes little processor time, so the compiler runs beside it; pip builds no extensions meanwhile
compile_and_install() {
  say "compiling the extensions; installing what the tests need"
  .venv/bin/python setup.py -q build_ext --inplace &
  local compiling=$!
  RETRO_KERNELS_NO_EXTENSIONS=1 pip install --no-build-isolation -e '.[dev]' || { kill $compiling; return 1; }
  # without dependencies: retro-pytorch's index builder, which nothing here calls, pins old versions of numpy and faiss;
  # later versions of megatron-core have no RETRO
  pip install --no-deps 'retro-pytorch==0.3.9' 'megatron-core==0.14.0' || { kill $compiling; return 1; }
  pip install --no-deps --no-build-isolation -e ./ptx_emulator -e ./demos/reader || { kill $compiling; return 1; }
  wait $compiling || true # `make build` runs next and reports the error of the compiler
}

say "installing what builds the package"
if pip install 'setuptools>=77' 'pybind11>=2.13' 'ninja>=1.11' wheel && compile_and_install; then
  say "ready: .venv"
elif .venv/bin/python -c 'import torch, triton, pybind11, setuptools, pytest'; then
  say "no network: building with what $PYTHON has"
  pip install --no-build-isolation --no-deps --no-index -e . -e ./ptx_emulator -e ./demos/reader
else
  exit 1
fi
