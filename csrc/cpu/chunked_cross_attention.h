// Chunked cross-attention over time-merged neighbours; the letters and the formula are those of the Python docstring.
#pragma once
#include "../view.h"
#include "isa.h"

namespace retro {

// The fields of `_problem.ChunkedCrossAttention`, in its order.
struct CrossAttention {
  View query, key, value;
  int64_t chunk_len;
  View rel_key, rel_query;
  int64_t rel_start;
  View content_bias, position_bias, neighbour_mask, neighbour_gate;
  double scale;
  int64_t query_start;
  double dropout_p;
  View seed;
};

// Gradients of the differentiable inputs; a null view is not wanted. Those of rel_key, the biases and the gate are float32.
struct CrossAttentionGrads {
  View query, key, value, rel_key, rel_query, content_bias, position_bias, neighbour_gate;
};

}  // namespace retro

RETRO_EVERY_ISA(
    void chunked_cross_attention_forward(const CrossAttention& call, const View& out, const View& lse, int threads);
    void chunked_cross_attention_backward(const CrossAttention& call, const View& out, const View& lse, const View& dout,
                                          const View& dlse, const CrossAttentionGrads& grads, int threads);)
