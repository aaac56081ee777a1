"""Retrofit by a decoder's own attention in plain PyTorch: one softmax over both sets of keys.

Written from the definition: one token and one layer at a time, with the decoder's own projections and tables of
positions. It shares no line with the package.
"""

import torch


class Llama:
    """Projections, positions and residual sums of Llama, and of decoders with the same blocks."""

    def __init__(self, decoder):
        self.layers, self.last = decoder.model.layers, decoder.model.norm
        self.rotary, self.embed_tokens = decoder.model.rotary_emb, decoder.model.embed_tokens

    def embed(self, tokens):
        return self.embed_tokens(tokens)

    def tables(self, layer, x, positions):
        """Return cosines and sines [1,n,E] of a layer at positions [1,n]."""
        return self.rotary(x, positions)

    def turn(self, layer, x, positions):
        """Rotate heads [n,H,D] to positions [n]."""
        cos, sin = (table[0].unsqueeze(1) for table in self.tables(layer, x, positions[None]))
        width = cos.shape[-1]
        part, rest = x[..., :width], x[..., width:]
        low, high = part.chunk(2, -1)
        return torch.cat([part * cos + torch.cat([-high, low], -1) * sin, rest], -1)

    def project(self, layer, x):
        """Return queries [n,H,D], keys and values [n,G,D] of states x [n,d], not rotated."""
        attention = layer.self_attn
        normed = layer.input_layernorm(x)
        projections = (attention.q_proj, attention.k_proj, attention.v_proj)
        q, k, v = (p(normed).unflatten(-1, (-1, attention.head_dim)) for p in projections)
        if hasattr(attention, "q_norm"):
            q, k = attention.q_norm(q), attention.k_norm(k)
        return q, k, v

    def add(self, layer, x, out):
        """Return the block's output from its input x [n,d] and the attended [n,H,D]."""
        x = x + layer.self_attn.o_proj(out.flatten(1))
        return x + layer.mlp(layer.post_attention_layernorm(x)[None])[0]  # layers of experts take rows of tokens

    def window(self, layer):
        """Return the number of own keys that a token sees, or None."""
        attention = attention_of(layer)
        kinds = getattr(attention.config, "layer_types", None)
        slides = not kinds or kinds[attention.layer_idx] == "sliding_attention"
        return getattr(attention.config, "sliding_window", None) if slides else None


class Gemma2(Llama):
    """Norms after the attention and after the feed-forward."""

    def add(self, layer, x, out):
        x = x + layer.post_attention_layernorm(layer.self_attn.o_proj(out.flatten(1)))
        return x + layer.post_feedforward_layernorm(layer.mlp(layer.pre_feedforward_layernorm(x)))


class Gemma3(Gemma2):
    """One rotary base for windowed layers, another for the rest."""

    def tables(self, layer, x, positions):
        return self.rotary(x, positions, layer.self_attn.layer_type)


class Phi3(Llama):
    """One matrix projects to queries, keys and values."""

    def project(self, layer, x):
        attention, config = layer.self_attn, layer.self_attn.config
        heads = attention.qkv_proj(layer.input_layernorm(x)).unflatten(-1, (-1, attention.head_dim))
        key_heads = config.num_key_value_heads
        return heads.split([config.num_attention_heads, key_heads, key_heads], 1)


class SmolLM3(Llama):
    """Some layers do not rotate."""

    def turn(self, layer, x, positions):
        return super().turn(layer, x, positions) if layer.self_attn.use_rope else x


class Olmo(Llama):
    """Projections are clamped."""

    def project(self, layer, x):
        most = layer.self_attn.config.clip_qkv
        return tuple(t.clamp(-most, most) for t in super().project(layer, x))


class Olmo2(Llama):
    """Blocks norm their output instead of their input; queries and keys are normed before they are split."""

    def project(self, layer, x):
        attention = layer.self_attn
        q, k = attention.q_norm(attention.q_proj(x)), attention.k_norm(attention.k_proj(x))
        return tuple(t.unflatten(-1, (-1, attention.head_dim)) for t in (q, k, attention.v_proj(x)))

    def add(self, layer, x, out):
        x = x + layer.post_attention_layernorm(layer.self_attn.o_proj(out.flatten(1)))
        return x + layer.post_feedforward_layernorm(layer.mlp(x))


class Olmo3(Olmo2):
    """One rotary base for windowed layers, another for the rest."""

    def tables(self, layer, x, positions):
        return self.rotary(x, positions, layer.self_attn.attention_type)


class Granite(Llama):
    """Embeddings and the outputs of blocks are scaled."""

    def embed(self, tokens):
        return self.embed_tokens(tokens) * self.layers[0].self_attn.config.embedding_multiplier

    def add(self, layer, x, out):
        by = layer.self_attn.config.residual_multiplier
        x = x + by * layer.self_attn.o_proj(out.flatten(1))
        return x + by * layer.mlp(layer.post_attention_layernorm(x))


class StableLm(Llama):
    """Attention and feed-forward may both read the block's input; each head may have a norm of its own."""

    def project(self, layer, x):
        q, k, v = super().project(layer, x)
        attention = layer.self_attn
        if attention.qk_layernorm:
            norms = (attention.q_layernorm.norms, attention.k_layernorm.norms)
            q, k = (torch.stack([n(h) for n, h in zip(m, t.unbind(1))], 1) for m, t in zip(norms, (q, k)))
        return q, k, v

    def add(self, layer, x, out):
        if not layer.use_parallel_residual:
            return super().add(layer, x, out)
        return x + layer.self_attn.o_proj(out.flatten(1)) + layer.mlp(layer.input_layernorm(x))


class GPT2(Llama):
    """Learnt positions are added to the embeddings, and queries are not rotated."""

    def __init__(self, decoder):
        self.layers, self.last = decoder.transformer.h, decoder.transformer.ln_f
        self.wte, self.wpe = decoder.transformer.wte, decoder.transformer.wpe

    def embed(self, tokens):
        return self.wte(tokens) + self.wpe(torch.arange(len(tokens)))

    def turn(self, layer, x, positions):
        return x

    def project(self, layer, x):
        heads = layer.attn.num_heads
        return tuple(p.unflatten(-1, (heads, -1)) for p in layer.attn.c_attn(layer.ln_1(x)).chunk(3, -1))

    def add(self, layer, x, out):
        x = x + layer.attn.c_proj(out.flatten(1))
        return x + layer.mlp(layer.ln_2(x))


class GPTNeoX(Llama):
    """A part of each head rotates; attention and feed-forward both read the block's input."""

    def __init__(self, decoder):
        base = decoder.gpt_neox
        self.layers, self.last = base.layers, base.final_layer_norm
        self.rotary, self.embed_tokens = base.rotary_emb, base.embed_in

    def project(self, layer, x):
        attention = layer.attention
        joined = attention.query_key_value(layer.input_layernorm(x))
        return joined.unflatten(-1, (-1, 3 * attention.head_size)).chunk(3, -1)

    def add(self, layer, x, out):
        return x + layer.attention.dense(out.flatten(1)) + layer.mlp(layer.post_attention_layernorm(x))


KINDS = {
    "gpt2": GPT2,
    "gpt_neox": GPTNeoX,
    "gemma2": Gemma2,
    "gemma3_text": Gemma3,
    "phi3": Phi3,
    "smollm3": SmolLM3,
    "olmo": Olmo,
    "olmo2": Olmo2,
    "olmo3": Olmo3,
    "granite": Granite,
    "stablelm": StableLm,
}


def attend(q, keys, values, scaling, shift=None):
    """Return one token's attention [H,D]: q [H,D], keys and values [S,G,D], `shift` [H,S] added to the logits."""
    share = q.shape[0] // keys.shape[1]
    keys, values = keys.repeat_interleave(share, 1), values.repeat_interleave(share, 1)
    logits = torch.einsum("hd,shd->hs", q, keys) * scaling
    return torch.einsum("hs,shd->hd", torch.softmax(logits if shift is None else logits + shift, -1), values)


def attention_of(layer):
    return getattr(layer, "self_attn", None) or getattr(layer, "attn", None) or layer.attention


def read(kind, tokens):
    """Return keys, rotated to their positions, and values [n,G,D] of every layer, for tokens [n] alone."""
    x, positions, kept = kind.embed(tokens), torch.arange(len(tokens)), []
    for layer in kind.layers:
        q, k, v = kind.project(layer, x)
        q, k, window = kind.turn(layer, q, positions), kind.turn(layer, k, positions), kind.window(layer)
        kept.append((k, v))
        first = [0 if window is None else max(0, n + 1 - window) for n in range(len(tokens))]
        out = [attend(q[n], k[f : n + 1], v[f : n + 1], attention_of(layer).scaling) for n, f in enumerate(first)]
        x = kind.add(layer, x, torch.stack(out))
    return kept


def logits(
    decoder,
    tokens,
    neighbours,
    mask,
    *,
    bias,
    scale,
    layers,
    chunk_len,
    sink,
    maps=None,
    prefix=None,
    second_look=False,
):
    """Logits [N,V] of one row: tokens [N], neighbours and mask [L,K,R], bias and scale [attending layers, H].

    maps: [attending layers, H, D, D] of queries that meet neighbours and of neighbours' values; None: none. prefix:
    tokens [P] in front of the text and of each neighbour, in the place of the sink. second_look: row n + p is token p,
    read with the neighbours of its own chunk; chunks that have ended are seen in these rows.
    """
    before = torch.tensor([sink]) if prefix is None else prefix
    lead, ahead = len(before), 0 if prefix is None else len(prefix)
    tokens = tokens if prefix is None else torch.cat([prefix, tokens])
    kind, m, r = KINDS.get(decoder.config.model_type, Llama)(decoder), chunk_len, neighbours.shape[-1]
    states = [[read(kind, torch.cat([before, row])) for row in chunk] for chunk in neighbours]
    n, looks = len(tokens), 2 if second_look else 1
    x, positions = kind.embed(tokens).repeat(looks, 1), torch.arange(n).repeat(looks)
    for at, layer in enumerate(kind.layers):
        raw, k, v = kind.project(layer, x)
        q, k, out = kind.turn(layer, raw, positions), kind.turn(layer, k, positions), []
        window = kind.window(layer)
        for row in range(len(x)):
            again, p = divmod(row, n)
            first, here = 0 if window is None else max(0, p + 1 - window), p - ahead
            chunk, i = (here // m, here % m) if again else ((here + 1) // m - 1, (here + 1) % m)
            seen = [j + n * (second_look and (again or j - ahead < here // m * m)) for j in range(first, p + 1)]
            keys, values, scaling = k[seen], v[seen], attention_of(layer).scaling
            if at + 1 not in layers or not 0 <= chunk < len(mask) or not mask[chunk].any():
                out.append(attend(q[row], keys, values, scaling))
                continue
            seen = mask[chunk].flatten()
            near = [torch.cat([one[at][part][lead:] for one in states[chunk]])[seen] for part in (0, 1)]
            place = layers.index(at + 1)
            # two queries: one for the own keys, one for the neighbours'
            share = q.shape[1] // k.shape[1]
            meets = raw[row : row + 1]
            meets = meets if maps is None else torch.einsum("nhd,hde->nhe", meets, maps[0][place])
            far = kind.turn(layer, meets, torch.tensor([lead + r + i]))[0]
            own = torch.einsum("hd,shd->hs", q[row], keys.repeat_interleave(share, 1)) * scaling
            others = torch.einsum("hd,shd->hs", far, near[0].repeat_interleave(share, 1)) * scaling
            weights = torch.softmax(torch.cat([own, others + bias[place][:, None]], 1), -1)
            theirs = near[1].repeat_interleave(share, 1) * scale[place][None, :, None]
            theirs = theirs if maps is None else torch.einsum("shd,hde->she", theirs, maps[1][place])
            both = torch.cat([values.repeat_interleave(share, 1), theirs])
            out.append(torch.einsum("hs,shd->hd", weights, both))
        x = kind.add(layer, x, torch.stack(out))
    out = decoder.get_output_embeddings()(kind.last(x[:n]))[ahead:] / getattr(decoder.config, "logits_scaling", 1)
    cap = getattr(decoder.config, "final_logit_softcapping", None)
    return out if cap is None else cap * torch.tanh(out / cap)
