"""RETRO one query at a time: the paper's equations in float64 NumPy loops, sharing only the weights
with `retro_model`.
"""

from math import cos, erf, exp, sin, sqrt

import numpy as np

EPS = 1e-6


def rms_norm(x, weight):
    return x / sqrt((x * x).mean() + EPS) * weight


def encoding(displacement: int, width: int):
    """[sin | cos] of the displacement at frequencies 10000^(-2i/width)."""
    frequencies = [10000 ** (-2 * i / width) for i in range(width // 2)]
    return np.array([sin(displacement * w) for w in frequencies] + [cos(displacement * w) for w in frequencies])


class Naive:
    """The model of a state dictionary and a configuration; every method treats a single sequence."""

    def __init__(self, model):
        self.config = model.config
        self.weights = {name: w.detach().double().numpy() for name, w in model.state_dict().items()}

    def attention(self, prefix: str, heads: int, head_dim: int, query, pairs):
        """Return the update [d] of one query [d] that attends `pairs` of (key/value source [d'], displacement)."""
        w = lambda name: self.weights[f"{prefix}.{name}"]  # noqa: E731
        if not pairs:
            return np.zeros(w("output.weight").shape[0])
        q = (w("query.weight") @ query).reshape(heads, head_dim)
        out = np.zeros((heads, head_dim))
        projected = [
            (
                (w("key.weight") @ source).reshape(heads, head_dim),
                (w("value.weight") @ source).reshape(heads, head_dim),
                (w("positions.projection.weight") @ encoding(displacement, len(query))).reshape(heads, head_dim),
            )
            for source, displacement in pairs
        ]
        for h in range(heads):
            u, v = w("content_bias")[h], w("position_bias")[h]
            logits = [((q[h] + u) @ k[h] + (q[h] + v) @ r[h]) / sqrt(head_dim) for k, _, r in projected]
            top = max(logits)
            weights = [exp(logit - top) for logit in logits]
            for weight, (_, value, _) in zip(weights, projected):
                out[h] += weight / sum(weights) * value[h]
        return w("output.weight") @ out.reshape(-1)

    def feed_forward(self, prefix: str, x):
        inner = self.weights[f"{prefix}.inner.weight"] @ x
        gelu = np.array([z * 0.5 * (1 + erf(z / sqrt(2))) for z in inner])
        return self.weights[f"{prefix}.output.weight"] @ gelu

    def norm(self, name: str, rows):
        return [rms_norm(x, self.weights[f"{name}.weight"]) for x in rows]

    def encode(self, neighbour, chunk, mask):
        """Return E_u^j [R,d'] of one neighbour (token ids [R], mask [R]), conditioned on H_u [M,d]."""
        c = self.config
        chunk = self.norm("encoder.chunk_norm", chunk) if c.encoder_cross_layers else None
        rows = [self.weights["encoder.embedding.weight"][token] for token in neighbour]
        for layer in range(c.encoder_layers):
            prefix, sizes = f"encoder.layers.{layer}", (c.encoder_heads, c.encoder_head_dim)
            normed = self.norm(f"{prefix}.attention_norm", rows)
            rows = [
                x
                + self.attention(
                    f"{prefix}.attention", *sizes, normed[i], [(normed[j], i - j) for j in range(len(rows)) if mask[j]]
                )
                for i, x in enumerate(rows)
            ]
            if layer + 1 in c.encoder_cross_layers:
                normed = self.norm(f"{prefix}.cross_norm", rows)
                rows = [
                    x
                    + self.attention(
                        f"{prefix}.cross", *sizes, normed[i], [(chunk[j], i - j) for j in range(len(chunk))]
                    )
                    for i, x in enumerate(rows)
                ]
            normed = self.norm(f"{prefix}.feed_forward_norm", rows)
            rows = [x + self.feed_forward(f"{prefix}.feed_forward", y) for x, y in zip(rows, normed)]
        return self.norm("encoder.norm", rows)

    def logits(self, tokens, neighbours=None, mask=None):
        """Return [N,V] for token ids [N], neighbours [L,K,R] and mask bool [L,K,R]."""
        c, m = self.config, self.config.chunk_len
        rows = [self.weights["embedding.weight"][token] for token in tokens]
        encoded = None
        for layer in range(1, c.num_layers + 1):
            prefix, sizes = f"layers.{layer - 1}", (c.num_heads, c.head_dim)
            normed = self.norm(f"{prefix}.attention_norm", rows)
            rows = [
                x + self.attention(f"{prefix}.attention", *sizes, normed[i], [(normed[j], i - j) for j in range(i + 1)])
                for i, x in enumerate(rows)
            ]
            if neighbours is not None and layer in c.cca_layers:
                if encoded is None:
                    encoded = [
                        [
                            self.encode(neighbours[u][a], rows[u * m : (u + 1) * m], mask[u][a])
                            for a in range(len(neighbours[u]))
                        ]
                        for u in range(len(tokens) // m)
                    ]
                normed = self.norm(f"{prefix}.cca_norm", rows)
                rows = [
                    x + self.cross_attention(f"{prefix}.cca", t, normed[t], encoded, mask) for t, x in enumerate(rows)
                ]
            normed = self.norm(f"{prefix}.feed_forward_norm", rows)
            rows = [x + self.feed_forward(f"{prefix}.feed_forward", y) for x, y in zip(rows, normed)]
        return np.stack([self.weights["readout.weight"] @ x for x in self.norm("norm", rows)])

    def cross_attention(self, prefix: str, t: int, query, encoded, mask):
        """Return CCA's update of token t. The paper counts u and i from 1 (h_{um+i-1} attends E_u); here all count from
        0.
        """
        c, m = self.config, self.config.chunk_len
        u, i = divmod(t - (m - 1), m)
        if u < 0:
            return np.zeros(c.d_model)
        pairs = [
            (encoded[u][a][j], i - j + m - 1)
            for a in range(len(encoded[u]))
            for j in range(len(encoded[u][a]))
            if mask[u][a][j]
        ]
        return self.attention(prefix, c.num_heads, c.head_dim, query, pairs)
