// Losses of logits and their gradient, for readouts: -log softmax(row)[target], and softmax(row) minus one at the
// target.
#pragma once
#include "../view.h"
#include "isa.h"

RETRO_EVERY_ISA(
    // logits [T,V], rows of consecutive floats; targets int64 [T]; weights, losses float32 [T].
    // losses[t] = weights[t] * -log softmax(logits[t])[targets[t]]; with `gradient` the logits become its gradient.
    // A row whose target is `ignore_index` has loss 0 and gradient 0. Throws std::invalid_argument for a target that is
    // neither in [0,V) nor `ignore_index`.
    void softmax_losses(const View& logits, const View& targets, int64_t ignore_index, const View& weights,
                        const View& losses, bool gradient, int threads);)
