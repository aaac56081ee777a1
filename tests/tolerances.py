"""For a while: this module is `retro_kernels.testing.tolerances`."""

import sys

from retro_kernels.testing import tolerances

sys.modules[__name__] = tolerances
