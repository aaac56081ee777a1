// Leaky average, y_t = x_t + decay * y_{t-1} over [B,N,H,D], and its gradients.
#pragma once
#include "../view.h"
#include "isa.h"

RETRO_EVERY_ISA(
    // x, y [B,N,H,D]; decay [H]; initial [B,H,D] or null; segment [B,N] of integers, or null
    void leaky_average_forward(const View& x, const View& decay, const View& initial, const View& segment, const View& y, int threads);
    // dx, dinitial and ddecay (float32 [H]) may be null, and are then not computed
    void leaky_average_backward(const View& y, const View& dy, const View& decay, const View& initial, const View& segment,
                                const View& dx, const View& ddecay, const View& dinitial, int threads);)
