// Exact top-k over [B,S,D] keys with the masks inside the scan, and its gradients.
#pragma once
#include "../view.h"
#include "isa.h"

RETRO_EVERY_ISA(
    // query [B,Q,D], key [B or 1,S,D]; query_doc [B,Q], key_doc and key_mask [B or 1,S], or null; scores [B,Q,k]
    // float32 and indices [B,Q,k] int64, both contiguous. causal: key j is a candidate of query i if j <= i + shift.
    void topk_chunks_forward(const View& query, const View& key, const View& query_doc, const View& key_doc,
                             const View& key_mask, const View& scores, const View& indices, bool l2, bool causal,
                             int64_t shift, int threads);
    // dscores [B,Q,k] float32; dquery and dkey may be null, otherwise every row of them is written
    void topk_chunks_backward(const View& query, const View& key, const View& indices, const View& dscores,
                              const View& dquery, const View& dkey, bool l2, int threads);)
