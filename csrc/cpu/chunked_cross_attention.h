// Chunked cross-attention. The letters and the formula are defined in the Python docstring.
#pragma once
#include "../view.h"
#include "isa.h"

namespace retro {

// The fields of `call.ChunkedCrossAttention`, in its order.
struct CrossAttention {
  View query, key, value;
  int64_t chunk_len;
  View rel_key, rel_query;
  int64_t rel_start;
  View content_bias, position_bias, neighbour_mask, neighbour_gate;
  double scale;
  int64_t query_start;
  double dropout_p;
  View seed, batch_start;
};

// Returns the call of batch entry b alone.
inline CrossAttention entry(CrossAttention c, int64_t b) {
  for (View* x : {&c.query, &c.key, &c.value, &c.rel_query, &c.neighbour_mask, &c.neighbour_gate})
    *x = x->entry(b);
  c.query_start += position_of(c.batch_start, b);
  c.batch_start = View();
  return c;
}

// Gradients of the differentiable inputs. A gradient with a null view is not computed. The gradients of rel_key, the
// biases and the gate are float32. The gradients of rel_key and the biases have one part per batch entry if
// batch_start is given.
struct CrossAttentionGrads {
  View query, key, value, rel_key, rel_query, content_bias, position_bias, neighbour_gate;
};

inline CrossAttentionGrads entry(const CrossAttentionGrads& g, int64_t b) {
  return {g.query.entry(b),     g.key.entry(b),         g.value.entry(b),        g.rel_key.drop(b),
          g.rel_query.entry(b), g.content_bias.drop(b), g.position_bias.drop(b), g.neighbour_gate.entry(b)};
}

}  // namespace retro

RETRO_EVERY_ISA(
    void chunked_cross_attention_forward(const CrossAttention& call, const View& out, const View& lse, int threads);
    void chunked_cross_attention_backward(const CrossAttention& call, const View& out, const View& lse, const View& dout,
                                          const View& dlse, const CrossAttentionGrads& grads, int threads);)
