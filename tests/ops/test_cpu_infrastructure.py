"""The compiled extension: instruction sets, the thread pool, memory."""

import hashlib
import mmap
import multiprocessing
import os
import shutil
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import retro_kernels as rk
from retro_kernels import cpu_lib as cpu
from retro_kernels import extensions
from retro_kernels.testing import inputs
from tests.fresh import python

pytestmark = pytest.mark.skipif(extensions.unavailable("_cpu") is not None, reason=str(extensions.unavailable("_cpu")))


def isas() -> list[str]:
    return [] if extensions.unavailable("_cpu") else extensions.extension("_cpu").supported_isas().split()


def test_set_isa(kernels):
    for name in isas():
        kernels.set_isa(name)
        assert kernels.isa_name() == name
    with pytest.raises(ValueError, match="instruction set mmx is not supported here"):
        kernels.set_isa("mmx")


@pytest.mark.skipif("avx512bf16" not in isas(), reason="no products of pairs here")
def test_products_of_pairs_are_the_default_unless_the_processor_is_intels_without_amx(kernels, monkeypatch):
    monkeypatch.delenv("RETRO_KERNELS_ISA", raising=False)
    kernels.set_isa("")
    intel = "GenuineIntel" in Path("/proc/cpuinfo").read_text()
    assert kernels.isa_name() == ("amx" if "amx" in isas() else "avx512" if intel else "avx512bf16")
    for name in isas():  # each is served if the environment asks for it
        monkeypatch.setenv("RETRO_KERNELS_ISA", name)
        kernels.set_isa("")
        assert kernels.isa_name() == name


def test_an_unknown_isa_is_a_reason_like_any_other():
    code = """
import retro_kernels as rk
from retro_kernels import info
print(rk.backends()['topk_chunks']['cpu'].reason)
info.lines()
"""
    said = python("-c", code, RETRO_KERNELS_ISA="mmx")
    assert said.startswith("RETRO_KERNELS_ISA: instruction set mmx is not supported here; have: portable")


def _run_in_child(kw, connection):
    # bytes from NumPy: torch's OpenMP pool does not survive a fork
    connection.send(hashlib.sha256(rk.leaky_average(**kw, backend="cpu").numpy()).hexdigest())


def test_pool_survives_fork():
    kw = inputs.leaky(1, B=4, N=64, H=8, D=64)
    want = hashlib.sha256(rk.leaky_average(**kw, backend="cpu").numpy()).hexdigest()  # starts the parent's pool
    ours, theirs = multiprocessing.get_context("fork").Pipe()
    child = multiprocessing.get_context("fork").Process(target=_run_in_child, args=(kw, theirs))
    child.start()
    assert ours.poll(30), "the child hangs"
    assert ours.recv() == want
    child.join(30)
    assert child.exitcode == 0


CHILD = """
import os, signal, torch, retro_kernels as rk
from retro_kernels.testing import inputs
torch.set_num_threads(2)
torch.rand(1 << 20).exp().sum()  # torch's threads run, ours have not been asked for
kw = inputs.leaky(1, B=4, N=64, H=8, D=64)
if os.fork() == 0:
    signal.alarm(30)
    rk.leaky_average(**kw, backend="cpu")
    os._exit(0)
print(os.waitstatus_to_exitcode(os.wait()[1]))
"""


def test_a_child_forked_before_the_first_call_does_not_wait_for_its_parents_threads():
    assert python("-c", CHILD) == "0\n"


FIRST = """
import os, sys, torch, retro_kernels as rk
from retro_kernels import extensions
from retro_kernels.testing import inputs
torch.set_num_threads(5000)
kw = inputs.differentiable(inputs.leaky(1, B=64, N=8, H=64, D=64))
before = len(os.listdir("/proc/self/task"))  # torch itself obeys
rk.leaky_average(**kw, backend="cpu").sum().backward()
print(len(os.listdir("/proc/self/task")) - before, "torch._dynamo" in sys.modules)
print(extensions.extension("_cpu").isa_name())
"""


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="threads are counted in /proc")
def test_thousands_of_threads_are_not_started():
    """Nor does a first call import torch's compiler. The environment chooses its instruction set."""
    threads, compiler, isa = python("-c", FIRST, OMP_NUM_THREADS="1", RETRO_KERNELS_ISA="portable").split()
    assert int(threads) < max(16, os.cpu_count()) and compiler == "False" and isa == "portable"


def test_a_stale_extension_is_a_reason_like_any_other():
    fields, abi = extensions.extension("_cpu").fields, extensions.ABI["_cpu"]
    assert extensions._stale(SimpleNamespace(abi=abi, fields=fields), abi) is None
    assert "abi is 1, the package's" in extensions._stale(SimpleNamespace(abi=1), abi)
    assert "abi is None" in extensions._stale(SimpleNamespace(), 1)
    fewer = fields | {"RelativeAttention": 18}
    assert (
        extensions._stale(SimpleNamespace(abi=abi, fields=fewer), abi)
        == "it takes 18 fields of RelativeAttention, the package has 20"
    )


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="other systems' libraries are not looked into")
def test_a_truncated_extension_is_a_reason_and_no_dead_process(tmp_path):
    """The loader maps the length in the file's header, and touching a missing page kills the process (SIGBUS)."""
    package, library = Path(rk.__file__).parent, Path(extensions.extension("_cpu").__file__)
    shutil.copytree(package, tmp_path / package.name, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    whole, cut = library.read_bytes(), tmp_path / package.name / library.name
    for share in (0, 1e-4, 0.01, 0.99, 0.5):
        cut.write_bytes(whole[: int(len(whole) * share)])
        assert extensions._damage(cut), share
    assert extensions._damage(library) is None
    code = "import retro_kernels as rk; print(rk.backends()['topk_chunks']['cpu'].reason)"
    assert python("-c", code, cwd=tmp_path).startswith("the extension retro_kernels._cpu is damaged: ")


def advised(address: int) -> bool:
    """Return whether the mapping of `address` uses huge pages ("hg" among its flags)."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        fields = line.split()
        if "-" in fields[0] and not fields[0].endswith(":"):
            begin, end = (int(x, 16) for x in fields[0].split("-"))
            inside = begin <= address < end
        elif inside and fields[0] == "VmFlags:":
            return "hg" in fields
    raise LookupError(hex(address))


@pytest.mark.skipif(not Path("/sys/kernel/mm/transparent_hugepage/enabled").exists(), reason="no huge pages here")
def test_large_outputs_ask_for_huge_pages(kernels):
    """Without them every call has a page fault per 4 KiB."""
    with mmap.mmap(-1, 8 << 20) as memory:
        begin, page = np.frombuffer(memory, np.uint8).ctypes.data, mmap.PAGESIZE
        assert not advised(begin)
        kernels.advise_huge_pages(begin + 1, 4 << 20)  # whole pages only
        assert [advised(begin + x) for x in (0, page, (4 << 20) - 1, 4 << 20)] == [False, True, True, False]
    large = cpu.empty((8 << 20,), torch.float32)
    assert large.shape == (8 << 20,) and large.dtype == torch.float32 and advised(large.data_ptr() + large.nbytes // 2)
    small = cpu.empty((1024, 3), torch.bfloat16)
    assert small.shape == (1024, 3) and small.dtype == torch.bfloat16


@pytest.mark.skipif("amx" not in isas(), reason="no AMX here")
def test_tile_registers_are_shared_with_torch(kernels):
    """torch configures the tile registers of a thread for its own products of bfloat16, and so do these kernels."""
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 1, 200, 4, 72).bfloat16().unbind()
    a = torch.randn(120, 96).bfloat16()
    kernels.set_isa("amx")
    alone, product = rk.relative_attention(q, k, v, causal=True, backend="cpu"), a @ a.T
    with ThreadPoolExecutor(3) as threads:
        jobs = [threads.submit(rk.relative_attention, q, k, v, causal=True, backend="cpu") for _ in range(30)]
        products = [threads.submit(torch.mm, a, a.T) for _ in range(30)]
        for _ in range(30):
            assert torch.equal(rk.relative_attention(q, k, v, causal=True, backend="cpu"), alone)
            assert torch.equal(a @ a.T, product)
    assert all(torch.equal(job.result(), alone) for job in jobs)
    assert all(torch.equal(job.result(), product) for job in products)


@pytest.mark.skipif("amx" not in isas(), reason="no AMX here")
@pytest.mark.parametrize("width", [16, 24, 64, 72])
def test_a_row_has_the_same_bits_in_a_whole_tile_and_in_a_part_of_one(kernels, width):
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 1, 150, 2, width).bfloat16().unbind()
    table = torch.randn(2, 150, width).bfloat16()
    kernels.set_isa("amx")

    def attend(rows):
        first = (x[:, :rows] for x in (q, k, v))
        return rk.relative_attention(*first, rel_key=table, rel_start=0, causal=True, backend="cpu")

    # 40 rows fill two tiles and a part; the rows behind them fill that part too
    assert torch.equal(attend(150)[:, :40], attend(40))


@pytest.mark.skipif("amx" not in isas(), reason="no AMX here")
@pytest.mark.parametrize("width", [1, 8, 31, 64, 100, 1100])
def test_tiles_score_as_vectors_do(kernels, width):
    """Whole numbers, whose sums are exact: words of the last tile that no row holds must count nothing."""
    torch.manual_seed(0)
    q, k = (torch.randint(-3, 4, (1, n, width)).bfloat16() for n in (37, 131))
    found = {}
    for name in ("avx512bf16", "amx"):
        kernels.set_isa(name)
        found[name] = rk.topk_chunks(q, k, k=5, backend="cpu")
    assert all(torch.equal(a, b) for a, b in zip(*found.values(), strict=True))
