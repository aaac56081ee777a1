"""Contextual and persistent memories: layers from activations [B,N,d_model] to a residual update.

The norm before a memory and the addition after it are the caller's.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import retro_kernels as rk
from retro_kernels.checks import HEAD_DIM_MIN, HEAD_DIM_STEP
from retro_model.base import checks

from .cache import ContextualState, PersistentState, Scalars
from .config import check_heads

RATE = 10.0  # scalars are stored divided by RATE, so that Adam moves them ten times as fast as weights
DECAY_MAX = 1 - 2**-20  # a leaky average needs decay < 1
LOG_KEY_SCALE_MAX = 5.0  # key_scale <= e^5: key_scale^2, the largest logit, fits float16
FIRST_LOG_DECAYS = (0.5, 5.0)  # -log(decay) of the first and of the last head, initially
FIRST_LOG_KEY_SCALE, FIRST_LOG_VALUE_SCALE = 1.0, -0.5


def normalised(x: Tensor, scale: Tensor) -> Tensor:
    """Return scale x / ||x|| for x [B,N,h,hd] and scale [h]; 0, with gradient 0, for x = 0."""
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=scale.dtype)
    inverse = norm.masked_fill(norm == 0, math.inf).reciprocal()
    return x * (scale[:, None] * inverse).to(x.dtype)


def read(query: Tensor, key: Tensor, value: Tensor, **options) -> tuple[Tensor, Tensor]:
    """Return sum_i softmax_i(query·key_i) value_i [B,N,h,hd] and the log-sum-exp [B,h,N], for heads of any width."""
    width = query.shape[-1]
    # padding with zeros changes neither a dot product nor a sum
    missing = max(HEAD_DIM_MIN, -(-width // HEAD_DIM_STEP) * HEAD_DIM_STEP) - width
    if missing:
        query, key, value = (F.pad(t, (0, missing)) for t in (query, key, value))
    out, lse = rk.relative_attention(query, key, value, scale=1.0, return_lse=True, **options)
    return out[..., :width], lse


class _Memory(nn.Module):
    """Base of both memories: keys are normalised leaky averages; an output projection maps reads to an update."""

    def __init__(self, d_model, num_heads, *, attention_dropout, output_dropout, backend, device, dtype):
        super().__init__()
        where = {"device": device, "dtype": dtype}
        self.d_model, self.num_heads, self.head_dim = d_model, num_heads, check_heads(d_model, num_heads)
        self.attention_dropout = checks.probability("attention_dropout", attention_dropout)
        self.output_dropout, self.backend = checks.probability("output_dropout", output_dropout), backend
        self.key = nn.Linear(d_model, d_model, bias=False, **where)
        self.output = nn.Linear(d_model, d_model, bias=False, **where)
        for name in ("stored_decay", "stored_key_scale", "stored_value_scale"):
            self.register_parameter(name, nn.Parameter(torch.empty(num_heads, **where)))

    def reset_parameters(self, depth: int = 1) -> None:
        """Set initial weights. depth: number of memories of this kind that write to the same residual stream."""
        nn.init.normal_(self.key.weight, std=self.d_model**-0.5)
        nn.init.normal_(self.output.weight, std=(self.d_model * depth) ** -0.5)
        with torch.no_grad():
            self.stored_decay.copy_(torch.linspace(*FIRST_LOG_DECAYS, self.num_heads) / RATE)
        nn.init.constant_(self.stored_key_scale, FIRST_LOG_KEY_SCALE / RATE)
        nn.init.constant_(self.stored_value_scale, FIRST_LOG_VALUE_SCALE / RATE)

    @property
    def decay(self) -> Tensor:
        """lambda_phi [h], decay of the keys' averages."""
        return torch.exp(-(RATE * _wide(self.stored_decay)).abs()).clamp(max=DECAY_MAX)

    @property
    def value_scale(self) -> Tensor:
        """alpha_psi [h], length of a value."""
        return torch.exp(RATE * _wide(self.stored_value_scale))

    @property
    def key_scale(self) -> Tensor:
        """alpha_phi [h], length of a contextual memory's key; its square is the inverse bandwidth."""
        return torch.exp((RATE * _wide(self.stored_key_scale)).clamp(max=LOG_KEY_SCALE_MAX))

    def heads_of(self, x: Tensor) -> Tensor:
        """Split x [B,N,d] into heads [B,N,h,hd]."""
        return x.unflatten(-1, (self.num_heads, self.head_dim))

    def averages(self, x: Tensor, segment: Tensor | None, state: Scalars | None) -> Tensor:
        """Return kbar [B,N,h,hd], leaky averages of the key projections. They restart where `segment` changes."""
        checks.shape("x", x, "B,N,d_model", {"d_model": self.d_model})
        heads, decay = self.heads_of(self.key(x)), self.scalar("decay", state)
        initial = None if state is None else state.average
        return rk.leaky_average(heads, decay, initial=initial, segment=segment, backend=self.backend)

    def scalar(self, name: str, state: Scalars | None) -> Tensor:
        """Return a scalar of every head. A state caches it."""
        return getattr(self, name) if state is None else state.scalar(self, name)

    def read_options(self) -> dict:
        return {"dropout_p": self.attention_dropout if self.training else 0.0, "backend": self.backend}

    def update(self, y: Tensor) -> Tensor:
        """Return the update [B,N,d] of a read y [B,N,h,hd]."""
        return F.dropout(self.output(y.flatten(-2)), self.output_dropout, self.training)

    def extra_repr(self) -> str:
        return f"num_heads={self.num_heads}, head_dim={self.head_dim}, attention_dropout={self.attention_dropout}"


class ContextualMemory(_Memory):
    """h associative memories of a sequence's own past. Keys summarise the past; values depend on the next token.

        k_T = key_scale Norm(kbar_T),     kbar_T = W_phi x_T + decay kbar_{T-1}
        v_T = value_scale Norm(vbar_T),   vbar_T = value_now W_psi x_T + value_next W_psi x_{T+1}
        y_T = sum_{i<T} softmax_i(k_T·k_i) v_i,   y_1 = 0;     update_T = W_z [y_T of every head]

    Key and query are one vector, and the model has no positions. A value depends on the next token, so a token reads
    only
    the pairs before its own: y_T predicts v_T, which is not known yet.

    Example:
        memory = ContextualMemory(64, num_heads=4)
        y = x + memory(norm(x))  # x [B,N,64]

    Args:
        d_model: d, width in and out; num_heads divides it.
        num_heads: h, memories, of any width d/h up to 256. A width below 16 or no multiple of 8 is padded with zeros.
        attention_dropout: probability, in training, of dropping a pair from a read.
        output_dropout: probability, in training, of dropping an entry of the update.
        backend: of `retro_kernels`; None: the fastest that serves the call.

    Cost: time O(N^2), as attention; memory O(N).

    Source: Zhang et al., "Memory Mosaics", arXiv 2405.06394, equations 3, 7 and 8. The scalars' form and initial values
    follow the authors' code.
    """

    def __init__(
        self,
        d_model: int,
        num_heads: int,
        *,
        attention_dropout: float = 0.0,
        output_dropout: float = 0.0,
        backend: str | None = None,
        device=None,
        dtype=None,
    ):
        dropout = {"attention_dropout": attention_dropout, "output_dropout": output_dropout}
        super().__init__(d_model, num_heads, **dropout, backend=backend, device=device, dtype=dtype)
        self.value = nn.Linear(d_model, d_model, bias=False, device=device, dtype=dtype)
        #: c [h], weight of a token in its own value; 0: the value depends on the next token alone
        self.value_now = nn.Parameter(torch.empty(num_heads, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self, depth: int = 1) -> None:
        super().reset_parameters(depth)
        nn.init.normal_(self.value.weight, std=self.d_model**-0.5)
        nn.init.uniform_(self.value_now)

    @property
    def value_next(self) -> Tensor:
        """1 - c [h], weight of the next token in a value."""
        return 1 - _wide(self.value_now)

    def values(self, projected: Tensor, state: ContextualState | None = None) -> Tensor:
        """Return v [B,N-1,h,hd] of W_psi x [B,N,h,hd], without the last token's, which is not known yet."""
        now, following = (self.scalar(name, state)[:, None].to(projected.dtype) for name in ("value_now", "value_next"))
        return normalised(now * projected[:, :-1] + following * projected[:, 1:], self.scalar("value_scale", state))

    def forward(self, x: Tensor, *, segment: Tensor | None = None, state: ContextualState | None = None) -> Tensor:
        """Return the update [B,N,d] of x [B,N,d].

        Args:
            segment: int64 [B,N], for packed documents: memories and averages restart where it changes.
            state: cache of the tokens before these, which are appended. Not with `segment`.
        """
        average = self.averages(x, segment, state)
        key, projected = normalised(average, self.scalar("key_scale", state)), self.heads_of(self.value(x))
        options = self.read_options() | visible_documents(segment)
        if state is None:
            stored, value, seen = key[:, :-1], self.values(projected), {}
        else:
            stored, value, seen = state.store(average, key, projected, lambda x: self.values(x, state))
        # the default query_offset S-N makes a token read the pairs stored before it
        y, lse = read(key, stored, value, causal=True, **options, **seen)
        if state is not None:
            state.settle(key, lse)
        return self.update(y)


class PersistentMemory(_Memory):
    """h associative memories of N_m trained pairs each, instead of a feed-forward layer.

        q_T = query_scale Norm(kbar_T),   kbar_T = W_phi x_T + decay kbar_{T-1}
        y_T = value_scale sum_{i=1..N_m} softmax_i(q_T·K_i) V_i;     update_T = W_z [y_T of every head]

    Example:
        memory = PersistentMemory(64, num_heads=4, slots=224)
        y = x + memory(norm(x))  # x [B,N,64]; 3.5 d slots have the parameters of a feed-forward of width 4d

    Args:
        d_model, num_heads, attention_dropout, output_dropout, backend: as in `ContextualMemory`.
        slots: N_m, pairs of each head.

    Source: Zhang et al., arXiv 2405.06394, section 4 and figure 7; Sukhbaatar et al., arXiv 1907.01470.
    """

    decayed = ("keys", "values")  # weight decay applies to them as to a feed-forward's matrices

    def __init__(
        self,
        d_model: int,
        num_heads: int,
        slots: int,
        *,
        attention_dropout: float = 0.0,
        output_dropout: float = 0.0,
        backend: str | None = None,
        device=None,
        dtype=None,
    ):
        dropout = {"attention_dropout": attention_dropout, "output_dropout": output_dropout}
        super().__init__(d_model, num_heads, **dropout, backend=backend, device=device, dtype=dtype)
        shape = (num_heads, checks.integer("slots", slots, low=1), self.head_dim)
        self.keys, self.values = (nn.Parameter(torch.empty(shape, device=device, dtype=dtype)) for _ in range(2))
        self.reset_parameters()

    def reset_parameters(self, depth: int = 1) -> None:
        super().reset_parameters(depth)
        for pairs in (self.keys, self.values):
            nn.init.normal_(pairs, std=self.head_dim**-0.5)

    @property
    def query_scale(self) -> Tensor:
        """gamma = alpha_phi^2 [h], length of a query."""
        return self.key_scale.square()

    def forward(self, x: Tensor, *, segment: Tensor | None = None, state: PersistentState | None = None) -> Tensor:
        """Return the update [B,N,d] of x [B,N,d]. Arguments as in `ContextualMemory.forward`."""
        average = self.averages(x, segment, state)
        if state is not None:
            state.store(average[:, -1])
        # one batch entry, because all rows share the pairs
        query = normalised(average, self.scalar("query_scale", state)).flatten(0, 1).unsqueeze(0)
        pairs = (t.to(query.dtype).transpose(0, 1).unsqueeze(0) for t in (self.keys, self.values))
        y = read(query, *pairs, **self.read_options())[0].reshape(average.shape)
        return self.update(y * self.scalar("value_scale", state)[:, None].to(y.dtype))


def visible_documents(segment: Tensor | None) -> dict[str, Tensor]:
    """Return arguments of a read in which a token sees only the pairs of its own run of equal `segment` [B,N]."""
    if segment is None:
        return {}
    run = F.pad((segment[:, 1:] != segment[:, :-1]).cumsum(1), (1, 0))  # a segment that recurs is another document
    return {"query_segment": run, "key_segment": run[:, :-1]}


def _wide(scalar: Tensor) -> Tensor:
    """Convert half types to float32."""
    return scalar.float() if scalar.dtype in (torch.float16, torch.bfloat16) else scalar
