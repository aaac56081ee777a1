"""The comparison that checks every backend: errors that it accepts and refuses."""

import pytest
import torch

from retro_kernels.testing import assert_passes

WANT = torch.tensor([1.0, -2.0, 3.0], dtype=torch.float64)


def refused(got, want=WANT, eager=None, dtype=torch.float32, match="relative error") -> None:
    with pytest.raises(AssertionError, match=match):
        assert_passes("y", got, want, eager, dtype)


def test_an_error_beyond_the_table_is_refused():
    got = WANT.float()
    assert_passes("y", got, WANT, got, torch.float32)
    refused(got * (1 + 3e-6))
    refused(got, torch.zeros_like(WANT))  # with an expected value of 0 the absolute error counts
    assert_passes("y", got * (1 + 3e-6), WANT, got * (1 - 2e-6), torch.float32)  # eager does no better
    refused(got * (1 + 3e-6), eager=got * torch.nan)  # eager's overflow excuses nothing
    refused(got[:2], match="shape")


def test_nan_and_infinities_must_be_where_they_are_expected():
    got, inf = WANT.float(), torch.inf
    for bad in (inf, -inf):
        refused(torch.where(got == 3, bad, got), match="not comparable")
        refused(got, torch.where(WANT == 3, bad, WANT), match="not comparable")
        refused(torch.where(got == 3, -bad, got), torch.where(WANT == 3, bad, WANT), match="not comparable")
        assert_passes("y", torch.where(got == 3, bad, got), torch.where(WANT == 3, bad, WANT), got, torch.float32)
    refused(torch.where(got == 3, torch.nan, got), match="1 NaN of 3, first at .2.")
    refused(got, torch.where(WANT == 3, torch.nan, WANT), match="not comparable")


@pytest.mark.parametrize("sign", [1, -1])
def test_what_exceeds_a_type_is_infinite_in_it_and_nothing_else_is(sign):
    """float16 ends at 65504 and rounds values below 65520 to it."""
    largest, beyond = sign * 65504.0, sign * torch.inf
    for want, right, wrong in (
        (65519.0, largest, beyond),
        (65520.0, beyond, largest),
        (7e4, beyond, largest),
        (7e4, beyond, -beyond),
    ):
        expected = torch.tensor([1.0, sign * want], dtype=torch.float64)
        assert_passes("y", torch.tensor([1.0, right], dtype=torch.float16), expected, None, torch.float16)
        refused(torch.tensor([1.0, wrong], dtype=torch.float16), expected, dtype=torch.float16, match="not comparable")
    assert_passes("y", torch.tensor([sign * 7e4]), torch.tensor([sign * 7e4], dtype=torch.float64), None, torch.float32)
