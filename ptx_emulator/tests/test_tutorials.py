"""The tutorials' kernels on every architecture: values, and no report of the emulator."""

import pytest

import ptx_emulator
import tutorials


@pytest.mark.parametrize("arch", [80, 90, 100])
@pytest.mark.parametrize("launch", tutorials.EVERY, ids=lambda one: one.__name__)
def test_values(launch, arch):
    with ptx_emulator.gpu(arch) as log:
        got, want, tolerance = launch()
    assert (got - want).abs().max() <= tolerance
    if launch in (tutorials.persistent_product, tutorials.descriptors_made_in_the_kernel):
        (one,) = log.launches
        assert any("bulk.tensor" in counted.opcode for counted in one.counted()) == (arch > 80)
