"""A Memory Mosaic by the paper's equations for one sequence, one token at a time, in float64 NumPy.

It shares only the stored parameters with `retro_model`. Every step is analytic, so a parameter moved by i*1e-30 gives
the derivative in the imaginary part, without cancellation (the complex step).
"""

import numpy as np

STEP = 1e-30
LAYER_NORM_EPS = 1e-5


def stored(model) -> dict[str, np.ndarray]:
    """Return every parameter by name."""
    return {name: p.detach().double().numpy() for name, p in model.named_parameters()}


def norm(x):
    """x / ||x||, 0 where x is 0."""
    squares = (x * x).sum()
    return x / np.sqrt(squares) if squares != 0 else x


def layer_norm(x, gain):
    x = x - x.mean()
    return x / np.sqrt((x * x).mean() + LAYER_NORM_EPS) * gain


def kernel_smoothing(query, pairs):
    """Equation 2 for keys of one norm: a softmax of dot products."""
    logits = np.array([query @ key for key, _ in pairs])
    weights = np.exp(logits - logits.real.max())
    return sum(weight * value for weight, (_, value) in zip(weights / weights.sum(), pairs))


class Naive:
    """The network of `stored` parameters and a configuration."""

    def __init__(self, config, parameters: dict[str, np.ndarray]):
        self.config, self.parameters = config, parameters

    def decay(self, prefix):
        b = self.parameters[f"{prefix}.stored_decay"]
        return np.exp(-10 * b * np.sign(b.real))

    def key_scale(self, prefix):
        b = self.parameters[f"{prefix}.stored_key_scale"]
        return np.exp(np.where(10 * b.real < 5, 10 * b, 5))

    def value_scale(self, prefix):
        return np.exp(10 * self.parameters[f"{prefix}.stored_value_scale"])

    def heads(self, matrix, x):
        """W x, by head [h,hd]."""
        return (self.parameters[matrix] @ x).reshape(self.config.num_heads, -1)

    def averages(self, prefix, rows):
        """kbar_T [h,hd] of every token, equation 7."""
        kbar, all_of_them = 0, []
        for x in rows:
            kbar = self.heads(f"{prefix}.key.weight", x) + self.decay(prefix)[:, None] * kbar
            all_of_them.append(kbar)
        return all_of_them

    def contextual(self, prefix, rows):
        """The update [d] of every token: keys and values of equation 7, reads of equation 8 with delta = 1."""
        a, s = self.key_scale(prefix), self.value_scale(prefix)
        c = self.parameters[f"{prefix}.value_now"]
        kbar = self.averages(prefix, rows)
        projected = [self.heads(f"{prefix}.value.weight", x) for x in rows]
        updates = []
        for t in range(len(rows)):
            y = np.zeros_like(projected[0])
            for head in range(self.config.num_heads):
                key = [a[head] * norm(kbar[i][head]) for i in range(t + 1)]
                value = [
                    s[head] * norm(c[head] * projected[i][head] + (1 - c[head]) * projected[i + 1][head])
                    for i in range(t)
                ]
                if t:
                    y[head] = kernel_smoothing(key[t], list(zip(key[:t], value)))
            updates.append(self.parameters[f"{prefix}.output.weight"] @ y.reshape(-1))
        return updates

    def persistent(self, prefix, rows):
        keys, values = self.parameters[f"{prefix}.keys"], self.parameters[f"{prefix}.values"]
        gamma, s = self.key_scale(prefix) ** 2, self.value_scale(prefix)
        updates = []
        for kbar in self.averages(prefix, rows):
            y = [
                s[head] * kernel_smoothing(gamma[head] * norm(kbar[head]), list(zip(keys[head], values[head])))
                for head in range(self.config.num_heads)
            ]
            updates.append(self.parameters[f"{prefix}.output.weight"] @ np.concatenate(y))
        return updates

    def logits(self, tokens) -> np.ndarray:
        """[N,V] for token ids [N]."""
        p = self.parameters
        rows = [p["embedding.weight"][token] for token in tokens]
        for b in range(self.config.num_layers):
            for kind in ("context", "persistent"):
                prefix = f"blocks.{b}.{kind}"
                normed = [layer_norm(x, p[f"{prefix}_norm.weight"]) for x in rows]
                update = self.contextual if kind == "context" else self.persistent
                rows = [x + u for x, u in zip(rows, update(prefix, normed))]
        return np.stack(
            [self.config.logit_scale * (p["embedding.weight"] @ layer_norm(x, p["norm.weight"])) for x in rows]
        )


def derivative(config, parameters, name: str, direction: np.ndarray, tokens, weights: np.ndarray) -> float:
    """Return d/dh of sum(weights * logits) where parameter `name` moves by h * direction."""
    moved = {n: p.astype(complex) for n, p in parameters.items()}
    moved[name] = moved[name] + 1j * STEP * direction
    return float((weights * Naive(config, moved).logits(tokens)).sum().imag / STEP)
