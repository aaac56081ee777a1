"""Fixtures of the demonstration's tests."""

import pytest

import pages


@pytest.fixture(scope="module")
def chromium():
    with pages.chromium() as started:
        yield started
