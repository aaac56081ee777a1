// Attention with relative-position logits. The letters and the formula are defined in the Python docstring.
#pragma once
#include "../view.h"
#include "isa.h"

namespace retro {

// The fields of `call.RelativeAttention`, in the same order. An integer that is None in Python is negative here.
struct RelativeAttention {
  View query, key, value, rel_key, rel_query;
  int64_t rel_start;
  View content_bias, position_bias;
  bool causal;
  int64_t causal_gap, window;
  int64_t query_offset;
  View key_mask, query_segment, key_segment;
  double scale, dropout_p;
  View seed;
  int64_t window_block;
  View batch_offset;
};

// Returns the call of batch entry b alone.
inline RelativeAttention entry(RelativeAttention c, int64_t b) {
  for (View* x : {&c.query, &c.key, &c.value, &c.rel_query, &c.key_mask, &c.query_segment, &c.key_segment})
    *x = x->entry(b);
  c.query_offset += position_of(c.batch_offset, b);
  c.batch_offset = View();
  return c;
}

// Gradients of the differentiable inputs. A gradient with a null view is not computed. The gradients of rel_key and the
// biases are float32. They have one part per batch entry if batch_offset is given.
struct RelativeAttentionGrads {
  View query, key, value, rel_key, rel_query, content_bias, position_bias;
};

inline RelativeAttentionGrads entry(const RelativeAttentionGrads& g, int64_t b) {
  return {g.query.entry(b),     g.key.entry(b),         g.value.entry(b),       g.rel_key.drop(b),
          g.rel_query.entry(b), g.content_bias.drop(b), g.position_bias.drop(b)};
}

}  // namespace retro

RETRO_EVERY_ISA(
    void relative_attention_forward(const RelativeAttention& call, const View& out, const View& lse, int threads);
    void relative_attention_backward(const RelativeAttention& call, const View& out, const View& lse, const View& dout,
                                     const View& dlse, const RelativeAttentionGrads& grads, int threads);)
