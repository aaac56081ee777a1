"""The dropout generator against the known answers published with Random123 (kat_vectors, philox4x32 10)."""

import pytest
import torch

from retro_kernels.reference_lib.attention import dropout_keep, philox_word


@pytest.mark.parametrize(
    "counter, key, word",
    [
        ((0, 0, 0, 0), (0, 0), 0x6627E8D5),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, 0x408F276D),
        ((0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), (0xA4093822, 0x299F31D0), 0xD16CFE09),
    ],
)
def test_known_answers(counter, key, word):
    seed = key[0] | (key[1] << 32)
    seed = seed - 2**64 if seed >= 2**63 else seed
    assert philox_word(torch.tensor([seed]), *(torch.tensor([c]) for c in counter)).tolist() == [word]


def test_keep_rate():
    keep = dropout_keep(torch.tensor([1234]), 0.3, 2, 3, torch.arange(50), 200)
    assert keep.shape == (2, 3, 50, 200) and abs(keep.double().mean().item() - 0.7) < 0.01
