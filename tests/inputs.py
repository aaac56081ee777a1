"""For a while: this module is `retro_kernels.testing.inputs`, with what moved to `retro_kernels.testing.memory`."""

import sys

from retro_kernels.testing import inputs, memory

inputs.guarded, inputs.sliced, inputs.spread, inputs.poisoned_empty = memory.guarded, memory.sliced, memory.spread, memory.poisoned
sys.modules[__name__] = inputs
