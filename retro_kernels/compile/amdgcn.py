"""Resources of a kernel that Triton compiled for an AMD processor, read from its assembly."""

from __future__ import annotations

import re
from typing import NamedTuple

_KEYS = ("vgpr_count", "agpr_count", "vgpr_spill_count", "private_segment_fixed_size", "group_segment_fixed_size")
_STACK = re.compile(r"^\s*scratch_(load|store)_", re.MULTILINE)
_MATRIX = re.compile(r"^\s*v_(mfma|smfmac|wmma|swmmac)_", re.MULTILINE)


class Usage(NamedTuple):
    """registers: VGPRs per thread, AGPRs included. spills: VGPRs that are kept in memory. stack: bytes per thread that
    instructions access. lds: bytes per block, without those requested at launch. matrix: number of MFMA or WMMA
    instructions. waves: wavefronts that fit a SIMD, by registers.
    """

    registers: int
    agprs: int
    spills: int
    stack: int
    lds: int
    matrix: int
    waves: int


def usage(assembly: str) -> Usage:
    """Return the numbers of the metadata at the end of the assembly, and count its matrix instructions."""
    found = [re.search(rf"\.{key}:\s+(\d+)", assembly) for key in _KEYS]
    counts = [int(match[1]) if match else 0 for match in found]  # only processors with AGPRs count them
    waves = re.search(r"^; Occupancy: (\d+)", assembly, re.MULTILINE)
    used = Usage(*counts, len(_MATRIX.findall(assembly)), int(waves[1]) if waves else 0)
    # The compiler reserves a frame for SGPRs before it decides to keep them in lanes of VGPRs.
    return used if _STACK.search(assembly) else used._replace(stack=0)
