// Root-mean-square norms of float32 rows, for models: y = x / rms(x) * weight, and its gradients.
#pragma once
#include "../view.h"
#include "isa.h"

RETRO_EVERY_ISA(
    // x, y [T,d] and weight [d] have contiguous rows. rstd [T] receives 1 / sqrt(mean(x^2) + eps).
    void rms_norm_forward(const View& x, const View& weight, const View& y, const View& rstd, double eps, int threads);

    // dy and dx have the shape of x, dweight is [d]. partial [P,d] is scratch memory for the sums of P groups of rows,
    // which are added in order to give dweight. dx and dweight may be null, and are then not computed.
    void rms_norm_backward(const View& x, const View& weight, const View& rstd, const View& dy, const View& dx,
                           const View& dweight, const View& partial, int threads);)
