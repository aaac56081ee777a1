// Cross-entropy of logits, -log softmax(row)[target], and its gradient, which is softmax(row) minus 1 at the target.
#pragma once
#include "../view.h"
#include "isa.h"

RETRO_EVERY_ISA(
    // logits [T,V] float32 with contiguous rows; targets int64 [T]; weights, losses float32 [T].
    // Computes losses[t] = weights[t] * -log softmax(logits[t])[targets[t]]. If `gradient` is true, the gradient of
    // losses[t] replaces row t of the logits. A row whose target is `ignore_index` has loss 0 and gradient 0. Throws
    // std::invalid_argument for a target that is neither in [0,V) nor equal to `ignore_index`.
    void softmax_losses(const View& logits, const View& targets, int64_t ignore_index, const View& weights,
                        const View& losses, bool gradient, int threads);)
