// Losses of logits and their gradient, for readouts: -log softmax(row)[target], and softmax(row) less one there.
#pragma once
#include "../view.h"
#include "isa.h"

RETRO_EVERY_ISA(
    // logits [T,V], rows of consecutive floats; targets int64 [T] in [0,V); weights, losses float32 [T].
    // losses[t] = weights[t] * -log softmax(logits[t])[targets[t]]; with `gradient` the logits become its gradient
    void softmax_losses(const View& logits, const View& targets, const View& weights, const View& losses, bool gradient,
                        int threads);)
