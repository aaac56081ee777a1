// Products of float32 matrices, for the linear maps of models: c = a b + bias.
#pragma once
#include "../view.h"
#include "isa.h"

RETRO_EVERY_ISA(
    // a [M,K] and b [K,N], rows or columns of consecutive elements; bias [N] or none; c [M,N], rows of consecutive
    // elements, which overlaps none of them
    void matmul(const View& a, const View& b, const View& bias, const View& c, int threads);)
