// Position logits, (query_i + position_bias) · rel_key[i + query_offset - j - rel_start], and their gradients.
#pragma once
#include "../view.h"
#include "isa.h"

namespace retro {

// The fields of `call.RelativeLogits`, in its order.
struct RelativeLogits {
  View query, rel_key;
  int64_t key_len, rel_start;
  View position_bias;
  int64_t query_offset;
};

}  // namespace retro

RETRO_EVERY_ISA(
    void relative_logits_forward(const RelativeLogits& call, const View& logits, int threads);
    // Gradients have the types of their inputs. A gradient with a null view is not computed.
    void relative_logits_backward(const RelativeLogits& call, const View& dlogits, const View& dquery, const View& drel_key,
                                  const View& dposition_bias, int threads);)
