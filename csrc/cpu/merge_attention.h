// Merge of attentions over disjoint parts of the keys, and its gradients.
#pragma once
#include "../view.h"
#include "isa.h"

RETRO_EVERY_ISA(
    // outs [P,B,N,H,D] and out [B,N,H,D] of one float type; lses [P,B,H,N] and lse [B,H,N] of float32
    void merge_attention_forward(const View& outs, const View& lses, const View& out, const View& lse, int threads);

    // dout and dlse may be null, which stands for zeros. douts [P,B,N,H,D] and dlses [P,B,H,N] may be null, and are then
    // not computed.
    void merge_attention_backward(const View& outs, const View& lses, const View& dout, const View& dlse,
                                  const View& douts, const View& dlses, int threads);)
