// Root-mean-square norms of float32 rows, for models: y = x / rms(x) * weight, and its gradients.
#pragma once
#include "../view.h"
#include "isa.h"

RETRO_EVERY_ISA(
    // x, y [T,d], weight [d], rows of consecutive elements; rstd [T] receives 1 / sqrt(mean(x^2) + eps)
    void rms_norm_forward(const View& x, const View& weight, const View& y, const View& rstd, double eps, int threads);

    // dy, dx as x; dweight [d]; partial [P,d] is room for the sums of P groups of rows, which dweight adds up in order.
    // Null dx or dweight: not wanted
    void rms_norm_backward(const View& x, const View& weight, const View& rstd, const View& dy, const View& dx,
                           const View& dweight, const View& partial, int threads);)
