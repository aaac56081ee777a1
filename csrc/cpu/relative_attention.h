// Attention with relative-position logits; the letters and the formula are those of the Python docstring.
#pragma once
#include "../view.h"
#include "isa.h"

namespace retro {

// The fields of `_problem.RelativeAttention`, in its order.
struct RelativeAttention {
  View query, key, value, rel_key, rel_query;
  int64_t rel_start;
  View content_bias, position_bias;
  bool causal;
  int64_t causal_gap, window;  // window < 0: unbounded
  int64_t query_offset;
  View key_mask, query_segment, key_segment;
  double scale, dropout_p;
  View seed;
};

// Gradients of the differentiable inputs, in their own types; a null view is not wanted.
struct RelativeAttentionGrads {
  View query, key, value, rel_key, rel_query, content_bias, position_bias;
};

}  // namespace retro

RETRO_EVERY_ISA(
    void relative_attention_forward(const RelativeAttention& call, const View& out, const View& lse, int threads);
    void relative_attention_backward(const RelativeAttention& call, const View& out, const View& lse, const View& dout,
                                     const View& dlse, const RelativeAttentionGrads& grads, int threads);)
