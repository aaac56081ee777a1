"""Sampling from Retro: neighbours are retrieved whenever a chunk completes and condition what follows."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from retro_kernels import _validate

from .retro.cache import RetroCache
from .retro.inputs import check_neighbour_mask, check_tokens

if TYPE_CHECKING:
    from .retro.retrofit import RetrofitCache

Retrieve = Callable[[Tensor], tuple[Tensor, Tensor | None]]


def generate(
    model,
    prompts: Tensor | np.ndarray | Sequence[Tensor | np.ndarray | Sequence[int]],
    max_new_tokens: int,
    *,
    retrieve: Retrieve | None = None,
    temperature: float = 0.0,
    top_p: float = 1.0,
    generator: torch.Generator | None = None,
    stop_token: int | None = None,
) -> list[Tensor]:
    """Continue every prompt, retrieving neighbours at the end of each chunk of the prompt and of what is generated.

    Prompts may differ in length: each row's chunks complete at its own time, and a row gets what it would get alone (up to
    rounding, and with temperature > 0 up to which random numbers it draws).

    Example:
        database = ...
        texts = generate(model, [[5, 3, 9], [7]], 64, retrieve=lambda chunks: database.values(database.search(chunks, k=2)))

    Args:
        model: a `Retro` or a `RetrofittedDecoder` (which takes prompts of one length at a time). Runs in evaluation mode; its mode is restored.
        prompts: token ids, one non-empty sequence a row (a list of ints, an int64 tensor, a NumPy array as `Tokenizer.encode` gives), or [B,N].
        max_new_tokens: tokens to add to each row; prompt and addition fit config.max_len.
        retrieve: called with the complete chunks int64 [n,M] on the model's device, at most once a step; gives neighbours int64
            [n,K,R] and their mask, bool [n,K] or [n,K,R] or None, on any device. K and R stay the same. None: RETRO[OFF].
        temperature: 0: the most likely token; else logits are divided by it before sampling.
        top_p: sample from the fewest tokens that have this probability together (nucleus sampling), 0 < top_p <= 1.
        generator: source of randomness, on the model's device; None: torch's.
        stop_token: a row ends after this token. None: never, and then no step waits for the device but to retrieve.

    Returns:
        One int64 [length] a row: the prompt, then its continuation, the stop token included.

    Raises:
        ValueError, TypeError: naming the argument; `retrieve` for what it returns. Ids are checked against the vocabulary on every device.

    Source: Borgeaud et al., arXiv 2112.04426, section 2.4 ("Sampling"); top_p: Holtzman et al., arXiv 1904.09751, section 3.1.
    """
    rows = _prompts(model, prompts)
    _check_options(model, rows, max_new_tokens, retrieve, temperature, top_p, stop_token)
    training = model.training
    model.eval()
    try:
        with torch.no_grad():
            # by length, so that prompts of one length lie side by side
            order = sorted(range(len(rows)), key=lambda i: len(rows[i]))
            batches = [order] if model.decodes_ragged else [list(same) for _, same in itertools.groupby(order, lambda i: len(rows[i]))]
            texts = {}
            for batch in batches:
                sampler = _Sampler(model, [rows[i] for i in batch], max_new_tokens, retrieve, temperature, top_p, generator, stop_token)
                texts |= zip(batch, sampler.run(), strict=True)
            return [texts[i] for i in range(len(rows))]
    finally:
        model.train(training)


def sample(logits: Tensor, *, temperature: float = 0.0, top_p: float = 1.0, generator: torch.Generator | None = None) -> Tensor:
    """One token id [B] for each row of logits [B,V]; see `generate` for the options."""
    if temperature == 0:
        return logits.argmax(-1)
    logits = logits.float()
    logits = logits - logits.amax(-1, keepdim=True)  # a tiny temperature then gives -inf, never NaN
    probabilities = torch.softmax(logits / max(temperature, torch.finfo(logits.dtype).tiny), -1)
    if top_p < 1:
        ranked, order = probabilities.sort(dim=-1, descending=True, stable=True)
        surplus = ranked.cumsum(-1) - ranked >= top_p  # the tokens before this one are enough; never so for the first
        probabilities = torch.zeros_like(ranked).scatter(-1, order, ranked.masked_fill(surplus, 0))
    return torch.multinomial(probabilities, 1, generator=generator).squeeze(-1)


class _Sampler:
    """The state of one `generate`: rows sorted by length, their tokens [B,columns] right-aligned as in the cache."""

    def __init__(self, model, rows: list[Tensor], max_new_tokens, retrieve, temperature, top_p, generator, stop_token):
        self.model, self.rows, self.retrieve = model, rows, retrieve
        self.options = {"temperature": temperature, "top_p": top_p, "generator": generator}
        self.stop_token, self.max_new_tokens = stop_token, max_new_tokens
        self.chunk_len, self.device = model.config.chunk_len, rows[0].device
        self.columns = len(rows[-1])
        self.starts = [self.columns - len(row) for row in rows]
        self.tokens = torch.zeros(len(rows), self.columns + max_new_tokens, dtype=torch.int64, device=self.device)
        for tokens, start, row in zip(self.tokens, self.starts, rows):
            tokens[start : self.columns] = row
        self.done = torch.zeros(len(rows), dtype=torch.bool, device=self.device)
        self.ends = torch.full((len(rows),), self.tokens.shape[1], device=self.device)
        self.neighbour_shape: torch.Size | None = None  # [K,R] of what was retrieved before

    def run(self) -> list[Tensor]:
        """The sequences, in the order of the rows."""
        last = self.tokens.shape[1] - 1
        if self.max_new_tokens:
            logits, cache = self._prefill()
            for column in range(self.columns, last + 1):
                self.tokens[:, column] = sample(logits, **self.options)
                if self._stopped(column) or column == last:
                    break
                neighbours, mask = self._completed(column)
                logits = self.model(self.tokens[:, column : column + 1], neighbours, neighbour_mask=mask, cache=cache)[:, -1]
        ends = self.ends.tolist()
        return [tokens[start:end].clone() for tokens, start, end in zip(self.tokens, self.starts, ends)]

    def _stopped(self, column: int) -> bool:
        """Whether every row has ended with its token in `column` or before."""
        if self.stop_token is None:
            return False
        stops = ~self.done & (self.tokens[:, column] == self.stop_token)
        self.ends[stops] = column + 1
        self.done |= stops
        return bool(self.done.all())

    def _prefill(self) -> tuple[Tensor, RetroCache | RetrofitCache]:
        """Logits [B,V] after the prompts, and the cache that holds them: prompts of one length go through the model together."""
        parts = [row[: len(row) // self.chunk_len * self.chunk_len].view(-1, self.chunk_len) for row in self.rows]
        found = self._retrieve(torch.cat(parts))
        caches, logits, first = [], [], 0
        one_length = len(self.rows[0]) == self.columns  # then no cache has to be joined to another
        for length, group in itertools.groupby(self.rows, len):
            rows = list(group)
            cache = self.model.make_cache(len(rows), self.tokens.shape[1] if one_length else length)
            chunks = length // self.chunk_len
            neighbours = mask = None
            if found is not None and chunks:
                here = slice(first, first + len(rows) * chunks)
                neighbours, mask = (t[here].unflatten(0, (len(rows), chunks)) for t in found)
                first = here.stop
            logits.append(self.model.last_logits(torch.stack(rows), neighbours, neighbour_mask=mask, cache=cache))
            caches.append(cache)
        return torch.cat(logits), caches[0] if one_length else RetroCache.join(caches, self.tokens.shape[1])

    def _completed(self, column: int) -> tuple[Tensor | None, Tensor | None]:
        """Neighbours [B,1,K,R] and mask of the chunks that end with `column`; all False in rows where none does."""
        rows = [i for i, start in enumerate(self.starts) if (column + 1 - start) % self.chunk_len == 0]
        if self.stop_token is not None:
            done = self.done.tolist()
            rows = [i for i in rows if not done[i]]
        found = self._retrieve(self.tokens[rows, column + 1 - self.chunk_len : column + 1]) if rows else None
        if found is None:
            return None, None
        given = [t.new_zeros(len(self.rows), 1, *t.shape[1:]) for t in found]
        for target, t in zip(given, found):
            target[rows, 0] = t
        return given[0], given[1]

    def _retrieve(self, chunks: Tensor) -> tuple[Tensor, Tensor] | None:
        """Neighbours [n,K,R] of chunks [n,M] and their mask, checked and on the model's device; None: no retrieval."""
        if self.retrieve is None or len(chunks) == 0:
            return None
        found = self.retrieve(chunks)
        if not isinstance(found, tuple) or len(found) != 2:
            raise TypeError(f"retrieve: expected it to return (neighbours, mask); got {type(found).__name__}")
        neighbours, mask = found
        sizes = {"n": len(chunks)}
        if self.neighbour_shape is not None:
            sizes["K"], sizes["R"] = self.neighbour_shape
        _validate.shape("retrieve's neighbours", neighbours, "n,K,R", sizes)
        if neighbours.dtype != torch.int64:
            raise TypeError(f"retrieve's neighbours: expected torch.int64 token ids; got {neighbours.dtype}")
        check_tokens("retrieve's neighbours", neighbours, self.model.config.vocab_size)
        if mask is None:
            mask = torch.ones_like(neighbours, dtype=torch.bool)
        check_neighbour_mask(mask, neighbours, "retrieve's mask", "n,K,R")
        self.neighbour_shape = neighbours.shape[1:]
        mask = mask if mask.dim() == 3 else mask.unsqueeze(-1).expand(neighbours.shape)
        return neighbours.to(self.device), mask.to(self.device)


def _prompts(model, prompts) -> list[Tensor]:
    """Every prompt as int64 [length] on the model's device, checked."""
    device = next(model.parameters()).device
    if isinstance(prompts, (Tensor, np.ndarray)):
        if prompts.ndim != 2:
            raise ValueError(f"prompts: expected [B,N] (2 dimensions); got shape {list(prompts.shape)}")
    elif not isinstance(prompts, Sequence) or isinstance(prompts, str):
        raise TypeError(f"prompts: expected int64 [B,N] or a sequence of token sequences; got {type(prompts).__name__}")
    if len(prompts) == 0:
        raise ValueError("prompts: expected at least one; got none")
    rows = []
    for i, prompt in enumerate(prompts):
        name = f"prompts[{i}]"
        if isinstance(prompt, np.ndarray) and prompt.dtype.kind in "iu":
            prompt = torch.from_numpy(prompt.astype(np.int64))
        if not isinstance(prompt, Tensor):
            if not isinstance(prompt, Sequence) or any(isinstance(t, bool) or not isinstance(t, (int, np.integer)) for t in prompt):
                raise TypeError(f"{name}: expected a sequence of int token ids, an int64 tensor or an integer array; got {prompt!r}")
            prompt = torch.tensor(prompt, dtype=torch.int64)
        if prompt.dim() != 1 or len(prompt) == 0:
            raise ValueError(f"{name}: expected a prompt of at least one token, [length]; got shape {list(prompt.shape)}")
        if prompt.dtype != torch.int64:
            raise TypeError(f"{name}: expected torch.int64 token ids; got {prompt.dtype}")
        check_tokens(name, prompt, model.config.vocab_size)
        rows.append(prompt.to(device))
    return rows


def _check_options(model, rows, max_new_tokens, retrieve, temperature, top_p, stop_token) -> None:
    _validate.integer("max_new_tokens", max_new_tokens, low=0)
    longest, room = max(len(row) for row in rows), model.config.max_len
    if longest + max_new_tokens > room:
        raise ValueError(f"max_new_tokens: expected at most max_len - longest prompt = {room} - {longest}; got {max_new_tokens}")
    if retrieve is not None and not callable(retrieve):
        raise TypeError(f"retrieve: expected a function of chunks, or None; got {type(retrieve).__name__}")
    if retrieve is not None and not model.config.retrieves:
        raise ValueError("retrieve: expected None for a model without retrieval (cca_layers=()); got a function")
    if _validate.number("temperature", temperature) < 0:
        raise ValueError(f"temperature: expected a number >= 0; got {temperature}")
    if not 0 < _validate.number("top_p", top_p) <= 1:
        raise ValueError(f"top_p: expected a probability in (0, 1]; got {top_p}")
    if stop_token is not None:
        _validate.integer("stop_token", stop_token, low=0, high=model.config.vocab_size - 1)
