"""The static estimate of time: dependent instructions wait, independent ones issue, bytes take time."""

import pytest
import torch
import triton
import triton.language as tl

import probe
from ptx_emulator.estimate import model
from ptx_emulator.estimate.calibration import judge
from ptx_emulator.estimate.calibration.judge import ROWS, TILES
from ptx_emulator.launches import Launch
from ptx_emulator.machines import MACHINES
from ptx_emulator.parse import Constant, Register, Statement, Vector
from ptx_emulator.program import Program

H200 = MACHINES["H200"]
STEPS = 200


def alone(body: str) -> tuple[float, dict[str, float]]:
    """Return the scoreboard's (cycles, busy pipes) of a CTA of one warp."""
    memory = torch.zeros(probe.THREADS * 8, dtype=torch.int64).numpy()
    program = Program(probe.module(body))
    program.trace()
    probe.execute(program, memory, memory, shared_bytes=256)
    return model.scoreboard(program, 1, 1.0, 500.0, H200)


def chain(instruction: str) -> str:
    return "mov.f32 %r1, 0f3f800000;\n" + f"{instruction} %r1, %r1, %r1;\n" * STEPS + "st.global.b32 [%l34], %r1;"


def test_a_chain_waits_for_each_result_and_independent_work_does_not():
    independent = "mov.f32 %r1, 0f3f800000;\n" + "".join(f"add.f32 %r{k + 2}, %r1, %r1;\n" for k in range(STEPS))
    waiting, busy = alone(chain("add.f32"))
    issued, same = alone(independent)
    assert waiting > 4 * STEPS and issued < 1.5 * STEPS
    assert busy["issue"] == pytest.approx(same["issue"], abs=2) and busy["tensor"] == 0


def test_a_load_that_a_barrier_follows_is_exposed_and_one_that_nobody_needs_is_hidden():
    load = "ld.global.b32 %r1, [%l33];\n"
    work = "".join(f"add.f32 %r{k + 2}, %r300, %r300;\n" for k in range(STEPS))
    hidden, _ = alone("mov.u32 %r299, smem;\n" + load + work)
    assert hidden < 500 + 2 * STEPS
    exposed, _ = alone("mov.u32 %r299, smem;\n" + load + "st.shared.b32 [%r299], %r1;\nbar.sync 0;\n" + work)
    assert exposed > 500 + STEPS


@triton.jit
def double_kernel(x_ptr, out_ptr):
    at = tl.program_id(0) * 2048 + tl.arange(0, 2048)
    tl.store(out_ptr + at, 2 * tl.load(x_ptr + at))


@pytest.mark.parametrize("machine", ["A100", "H200"])
@pytest.mark.parametrize("in_place", [False, True])
def test_a_copy_is_bound_by_its_bytes(machine, in_place):
    """A kernel in place moves its tensor twice too."""
    size, gpu = 1 << 26, MACHINES[machine]
    x, y = (torch.empty(size, dtype=torch.float32, device="meta") for _ in range(2))
    compiled = {"blocks_per_sm": 16, "instructions": 40, "warps": 4}
    launch = Launch(double_kernel, (size // 2048,), {"x_ptr": x, "out_ptr": x if in_place else y})
    found = model.estimate(launch, gpu, compiled)
    assert found.hbm_bytes == 8 * size == found.l2_bytes and found.bound == "HBM"
    assert 1.0 <= (found.seconds - model.BEGIN) / (8 * size / gpu.hbm) < 1.05


def test_a_product_reads_its_operands_from_shared_memory_while_it_runs():
    def cycles(shape: str, a) -> float:
        opcode = f"wgmma.mma_async.sync.aligned.{shape}.f32.bf16.bf16"
        return model._operand_cycles(
            Statement(opcode, [Vector(()), a, Register("b"), Constant(1)], None, False, "", ""), 4
        )

    assert cycles("m64n64k16", Register("a")) == 32  # 4 KB at 128 bytes a cycle, the bandwidth of shared memory
    assert cycles("m64n64k16", Vector(())) == 16 and cycles("m64n256k16", Register("a")) == 80


def test_the_estimate_is_within_its_stated_spread_of_published_times():
    """Three of the 59 rows of `ptx-emulator estimate --calibration`."""
    first = ROWS[0], next(r for r in ROWS if r.kernel == "relu_squared"), next(r for r in ROWS if r.machine == "A100")
    for one in judge.judged(first):
        assert one.ratio == pytest.approx(1, rel=judge.SPREAD), one


def test_a_third_of_each_kernels_rows_is_held_back():
    held = judge.held_back()
    for kernel in {row.kernel for row in ROWS}:
        rows = [at for at, row in enumerate(ROWS) if row.kernel == kernel]
        assert len(held & set(rows)) == len(rows) // 3


def test_the_fastest_of_tiles_is_chosen():
    """The fastest and the slowest published tile of one of the ten sizes of `ptx-emulator estimate --calibration`."""
    rows = sorted((row for row in TILES if row.sizes[:3] == (64, 4096, 4096)), key=lambda row: row.microseconds)
    best, slower = judge.fastest(list(judge.judged([rows[0], rows[-1]])))
    assert best.row == rows[0] and slower == 1.0


def test_a_sector_is_read_before_it_is_written_in_part_only():
    assert model.moved(size=4096, ctas=4, read=0, written=32, in_part=0, bytes_written=1024) == 4096
    assert model.moved(size=4096, ctas=4, read=0, written=32, in_part=32, bytes_written=512) == 2 * 4096
    assert model.moved(size=4096, ctas=4, read=4, written=0, in_part=0, bytes_written=0) == 512


@triton.jit
def twice_kernel(x_ptr, width, BLOCK: tl.constexpr):
    """Divide each row by its sum in place: two loops over the row."""
    row, at = tl.program_id(0).to(tl.int64) * width, tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for first in range(0, width, BLOCK):
        total += tl.load(x_ptr + row + first + at)
    total = tl.sum(total, 0)
    for first in range(0, width, BLOCK):
        tl.store(x_ptr + row + first + at, tl.load(x_ptr + row + first + at) / total)


@pytest.mark.parametrize(("width", "times"), [(1 << 13, 2), (1 << 17, 3)])
def test_a_row_is_read_again_from_hbm_only_if_the_resident_rows_exceed_l2(width, times):
    x = torch.empty(4096, width, dtype=torch.float32, device="meta")
    compiled = {"blocks_per_sm": 2, "instructions": 40, "warps": 32}
    launch = Launch(twice_kernel, (4096,), {"x_ptr": x, "width": width, "BLOCK": 4096}, {"num_warps": 32})
    found = model.estimate(launch, MACHINES["A100"], compiled)
    assert found.hbm_bytes == pytest.approx(times * 4 * 4096 * width, rel=0.01)
