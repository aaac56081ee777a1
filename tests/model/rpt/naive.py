"""RPT token by token in NumPy float64, written from the equations and not from the module."""

import math

import numpy as np


def softmax(x):
    e = np.exp(x - x.max())
    return e / e.sum()


def gelu(x):
    return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def turned(x, position):
    """Rotate one head's vectors [n,D] at positions [n]: pairs (2i, 2i+1) by position * 10000^(-2i/D)."""
    out = np.empty_like(x)
    for i in range(0, x.shape[1], 2):
        angle = np.asarray(position, float) * 10_000.0 ** (-i / x.shape[1])
        out[:, i] = x[:, i] * np.cos(angle) - x[:, i + 1] * np.sin(angle)
        out[:, i + 1] = x[:, i] * np.sin(angle) + x[:, i + 1] * np.cos(angle)
    return out


class Naive:
    """weights: the module's state dict as float64 arrays; config: an RPTConfig (sizes only are read)."""

    def __init__(self, weights, config):
        self.w, self.c = weights, config

    def norm(self, prefix, x):
        return x / np.sqrt((x * x).mean() + 1e-6) * self.w[f"{prefix}.weight"]

    def attention(self, prefix, x, position, seen):
        """Return the update of one state x at `position`; seen: pairs (state, its position)."""
        d_head, out = self.c.d_model // self.c.num_heads, []
        states, positions = np.array([y for y, _ in seen]).reshape(-1, self.c.d_model), [p for _, p in seen]
        for h in range(self.c.num_heads):
            w_query, w_key, w_value = (
                self.w[f"{prefix}.{n}.weight"][h * d_head : (h + 1) * d_head] for n in ("query", "key", "value")
            )
            q = turned((w_query @ x)[None], [position])[0]
            logits = turned(states @ w_key.T, positions) @ q / math.sqrt(d_head)
            values = states @ w_value.T
            if f"{prefix}.null_key" in self.w:
                logits = np.append(logits, q @ self.w[f"{prefix}.null_key"][h] / math.sqrt(d_head))
                values = np.vstack([values, self.w[f"{prefix}.null_value"][h]])
            out.append(softmax(logits) @ values if len(logits) else np.zeros(d_head))
        return self.w[f"{prefix}.output.weight"] @ np.concatenate(out)

    def feed_forward(self, prefix, x):
        inner = self.w[f"{prefix}.inner.weight"] @ x
        if f"{prefix}.gate.weight" in self.w:
            gate = self.w[f"{prefix}.gate.weight"] @ x
            return self.w[f"{prefix}.output.weight"] @ (gate / (1 + np.exp(-gate)) * inner)
        return self.w[f"{prefix}.output.weight"] @ gelu(inner)

    def visible(self, t):
        """Return the first key that token t sees."""
        s = self.c.segment
        return max(0, s * (t // s - 1) if self.c.window == "segments" else t - 2 * s + 1)

    def layer(self, number, rows, read=None):
        """Apply a layer. read: t -> CCA's update of token t, from the states before it."""
        prefix = f"layers.{number - 1}"
        normed = [self.norm(f"{prefix}.attention_norm", x) for x in rows]
        rows = [
            x
            + self.attention(
                f"{prefix}.attention", normed[t], t, [(normed[j], j) for j in range(self.visible(t), t + 1)]
            )
            for t, x in enumerate(rows)
        ]
        if read is not None and number in self.c.cca_layers:
            rows = [x + read(f"{prefix}.cca", t, self.norm(f"{prefix}.cca_norm", x)) for t, x in enumerate(rows)]
        return [
            x + self.feed_forward(f"{prefix}.feed_forward", self.norm(f"{prefix}.feed_forward_norm", x)) for x in rows
        ]

    def lower(self, tokens):
        rows = [self.w["embedding.weight"][t] for t in tokens]
        for number in range(1, self.c.num_layers // 2 + 1):
            rows = self.layer(number, rows)
        return rows

    def chunk_states(self, rows):
        """Return e of every complete chunk; H itself without a retriever."""
        m = self.c.chunk_len
        chunks = [rows[i : i + m] for i in range(0, len(rows) - m + 1, m)]
        if not self.c.retriever:
            return chunks
        states = []
        for chunk in chunks:
            normed = [(self.norm("retriever.norm", x), p) for p, x in enumerate(chunk)]
            states.append([x + self.attention("retriever.attention", y, p, normed) for x, (y, p) in zip(chunk, normed)])
        return states

    def retrieve(self, states, k):
        """Return scores [l,l] with -inf where not retrievable, index [l,k]."""
        mean = [np.mean(e, 0) for e in states]
        as_query = [self.norm("retriever.query_norm", c) if self.c.query_norm else c for c in mean]
        as_key = [self.norm("retriever.key_norm", c) if self.c.key_norm else c for c in mean]
        scores = np.full((len(states), len(states)), -np.inf)
        index = np.full((len(states), k), -1)
        for i in range(len(states)):
            for j in range(i - self.c.excluded_chunks + 1):
                q, key = self.w["retriever.query.weight"] @ as_query[i], self.w["retriever.key.weight"] @ as_key[j]
                scores[i, j] = self.c.score_scale * (q @ key)
            best = sorted(range(max(0, i - self.c.excluded_chunks + 1)), key=lambda j: -scores[i, j])[:k]
            index[i, : len(best)] = best
        return scores, index

    def neighbour(self, states, chunk, j):
        """Return [2m,d]: neighbour j as the chunk `chunk` (its H) reads it."""
        rows = [*states[j], *states[j + 1]]
        normed = [(self.norm("neighbours.norm", x), p) for p, x in enumerate(rows)]
        rows = [x + self.attention("neighbours.attention", y, p, normed) for x, (y, p) in zip(rows, normed)]
        keys = [(self.norm("neighbours.cross_key_norm", h), p) for p, h in enumerate(chunk)]
        queries = [self.norm("neighbours.cross_query_norm", x) for x in rows]
        return [x + self.attention("neighbours.cross", y, p, keys) for p, (x, y) in enumerate(zip(rows, queries))]

    def gates(self, neighbours):
        """neighbours: [l][K] of states or None -> [l][K] of gates."""
        flat = [n for row in neighbours for n in row]
        pooled = {a: np.mean(n, 0) for a, n in enumerate(flat) if n is not None}
        normed = {a: self.norm("gate.norm", c) for a, c in pooled.items()}
        values = {}
        for a, c in pooled.items():
            c = c + self.attention("gate.attention", normed[a], a, [(normed[b], b) for b in normed if b <= a])
            raw = self.w["gate.weight"] @ self.norm("gate.out_norm", c) / self.c.d_model
            values[a] = max(self.c.gate_floor, 1 / (1 + math.exp(-raw)))
        width = len(neighbours[0]) if neighbours else 0
        return [[values.get(i * width + a) for a in range(width)] for i in range(len(neighbours))]

    def logits(self, tokens, index=None, k=None, retrieval=True):
        """Return [N,V] and the retrieval: scores, index, gates."""
        m, rows, read, retrieved = self.c.chunk_len, self.lower(tokens), None, (None, None, None)
        if retrieval and self.c.cca_layers:
            states = self.chunk_states(rows)
            scores = None
            if self.c.retriever:
                scores, own = self.retrieve(states, k or self.c.num_neighbours)
                index = own if index is None else index
            neighbours = [
                [None if j < 0 else self.neighbour(states, rows[i * m : (i + 1) * m], j) for j in index[i]]
                for i in range(len(states))
            ]
            gates = self.gates(neighbours)
            retrieved = scores, index, gates

            def read(prefix, t, x):
                u, seen = (t + 1) // m - 1, []
                if u >= 0:
                    for n, g in zip(neighbours[u], gates[u]):
                        seen += [] if n is None else [(g * state, p) for p, state in enumerate(n)]
                return self.attention(prefix, x, (t + 1) % m + m - 1, seen)

        for number in range(self.c.num_layers // 2 + 1, self.c.num_layers + 1):
            rows = self.layer(number, rows, read)
        return np.stack([self.w["embedding.weight"] @ self.norm("norm", x) for x in rows]), retrieved


def lambda_rank(scores, targets, tau):
    """Return (sum over pairs, number of pairs) of one row, by the definition."""
    there = [j for j in range(len(scores)) if scores[j] > -np.inf]
    gain = {j: 2.0 ** max(targets[j], 0) - 1 for j in there}
    ranked = sorted(there, key=lambda j: -scores[j])
    rank = {j: ranked.index(j) + 1 for j in there}
    ideal = sum(g / math.log2(1 + r) for r, g in enumerate(sorted(gain.values(), reverse=True), 1))
    total, pairs = 0.0, 0
    for a in there:
        for b in there:
            if targets[a] > 0 and targets[a] > targets[b]:
                weight = abs(gain[a] - gain[b]) * abs(1 / math.log2(1 + rank[a]) - 1 / math.log2(1 + rank[b])) / ideal
                total += weight * max(0.0, tau - (scores[a] - scores[b]))
                pairs += 1
    return total, pairs
