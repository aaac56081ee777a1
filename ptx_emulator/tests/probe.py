"""A few lines of PTX as a kernel of one or more warps: values in, values out."""

from __future__ import annotations

import numpy as np

from ptx_emulator.program import Program, Region

THREADS = 32
#: registers by letter: how they are declared, and bytes
KINDS = {"r": ("b32", 4), "l": ("b64", 8), "h": ("b16", 2), "p": ("pred", 4)}

_TEMPLATE = """
.version 8.4
.target sm_90
.address_size 64
.extern .shared .align 16 .b8 smem[];
.visible .entry probe(
	.param .u64 probe_in,
	.param .u64 probe_out
)
.reqntid {threads}
.reqnctapercluster {ctas}
{{
	.reg .pred 	%p<20>;
	.reg .b16 	%h<40>;
	.reg .b32 	%r<400>;
	.reg .b64 	%l<40>;
	ld.param.b64 	%l30, [probe_in];
	ld.param.b64 	%l31, [probe_out];
	mov.u32 	%r300, %tid.x;
	mov.u32 	%r301, %ctaid.x;
	mad.lo.s32 	%r302, %r301, {threads}, %r300;
	mul.wide.u32 	%l32, %r302, {row};
	add.s64 	%l33, %l30, %l32;
	add.s64 	%l34, %l31, %l32;
{body}
	ret;
}}
"""


def module(body: str, threads: int = THREADS, row: int = 64, ctas: int = 1) -> str:
    """Return PTX of a kernel of one cluster. row: bytes of input and output of a thread."""
    return _TEMPLATE.format(body=body, threads=threads, row=row, ctas=ctas)


def run(body: str, values: np.ndarray | None = None, *, threads: int = THREADS, ctas: int = 1, **options) -> np.ndarray:
    """Return uint64 [ctas * threads, 8], which `body` leaves at %l34; it finds `values`, one row a thread, at %l33."""
    registers = np.zeros((ctas * threads, 8), np.uint64) if values is None else np.ascontiguousarray(values, np.uint64)
    out = np.zeros_like(registers)
    program = Program(module(body, threads, 8 * registers.shape[1], ctas))
    execute(program, registers, out, ctas=ctas, **options)
    return out


def execute(program: Program, *arrays: np.ndarray, ctas: int = 1, **options) -> None:
    """Run a program of `module` on its input and output, each as an argument tensor with its number as its name."""
    regions = [Region(k, one.ctypes.data, one.nbytes, f"tensor {k}") for k, one in enumerate(arrays)]
    program.run((ctas,), [region.address for region in regions], regions=regions, **options)


def one(opcode: str, target: str, sources: str, values: np.ndarray) -> np.ndarray:
    """Return uint64 [threads]: one instruction on values [threads, len(sources)]; registers by their
    letter in KINDS.
    """
    lines, operands = [], []
    for at, letter in enumerate(sources):
        register = f"%{letter}{at + 1}"
        if letter == "p":
            lines += [f"ld.global.b32 %r{at + 1}, [%l33+{8 * at}];", f"setp.ne.b32 %p{at + 1}, %r{at + 1}, 0;"]
        else:
            lines.append(f"ld.global.{KINDS[letter][0]} {register}, [%l33+{8 * at}];")
        operands.append(register)
    lines.append(f"{opcode} %{target}10, {', '.join(operands)};")
    if target == "p":
        lines += ["selp.b32 %r11, 1, 0, %p10;", "st.global.b32 [%l34], %r11;"]
    else:
        lines.append(f"st.global.{KINDS[target][0]} [%l34], %{target}10;")
    registers = np.zeros((len(values), 8), np.uint64)
    registers[:, : values.shape[1]] = values
    return run("\n".join(lines), registers, threads=len(values))[:, 0]
