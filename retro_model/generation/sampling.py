"""Sampling from any model here: prompts of different lengths, and retrieval whenever a chunk completes."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Sequence
from types import EllipsisType
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from retro_model.base import checks, transfer
from retro_model.generation.chunk_neighbours import ChunkNeighbours, Retrieve

_CONFIGURED = ("vocab_size", "max_len")  # attributes of every model's config
#: columns between two checks on a GPU whether all rows have ended: each check waits for the device
_LOOK_EVERY = 8


class Cache(Protocol):
    """Cache of a model that decodes one batch of rows."""

    @classmethod
    def join(cls, caches: list[Any], capacity: int) -> Any:
        """Return one cache of all rows, in order, which end in the same column and have room for `capacity` columns.

        Only models with a true `decodes_ragged` need it.
        """


class Decodes(Protocol):
    """A model that `generate` can sample from.

        cache = model.make_cache(batch=2, capacity=12)
        logits = model.last_logits(prompts, cache=cache)    # prompts [2,9] -> [2,V]
        logits = model(token, cache=cache)[:, -1]           # token [2,1] -> [2,1,V], and so on

    Attributes:
        config: has `vocab_size`, V, and `max_len`, the most tokens of a row (None: no limit). If it has a true
            `retrieves`, both calls take `neighbours` [B,L,K,R] and `neighbour_mask` of the chunks of `chunk_len` tokens
            that complete within the call.
        decodes_ragged: whether rows of different lengths share a cache. If not, each length is decoded separately.
        pads_prompts: name of both calls' argument for a mask [B,N], under which such rows enter together, padded on the
            left, so that they need no `Cache.join`; may be absent.
        generation_options: names of further keyword options of both calls, which `generate` passes on; may be absent.
    """

    config: Any
    decodes_ragged: bool

    def make_cache(self, batch: int, capacity: int | None = None) -> Any:
        """Return an empty cache for `batch` rows of at most `capacity` tokens; None: as many as the model takes."""

    def last_logits(self, tokens: Tensor, *, cache: Any = None) -> Tensor:
        """Return logits [B,V] after the last of tokens [B,N]. They follow the cache's tokens and are added to it."""

    def __call__(self, tokens: Tensor, *, cache: Any = None) -> Tensor:
        """Return logits [B,N,V] after each of tokens [B,N]; the cache as in `last_logits`."""


def generate(
    model,
    prompts: Tensor | np.ndarray | Sequence[Tensor | np.ndarray | Sequence[int]],
    max_new_tokens: int,
    *,
    retrieve: Retrieve | EllipsisType | None = ...,
    temperature: float = 0.0,
    top_p: float = 1.0,
    generator: torch.Generator | None = None,
    stop_token: int | None = None,
    **options,
) -> list[Tensor]:
    """Continue every prompt. A model that takes neighbours gets them when a chunk completes, in prompts too.

    Prompts may differ in length. A row's continuation is the same as without the other rows, up to rounding and, with
    temperature > 0, up to the random numbers that it draws.

    Example:
        database = ...
        retrieve = lambda chunks: database.values(database.search(chunks, k=2))
        texts = generate(model, [[5, 3, 9], [7]], 64, retrieve=retrieve)

    Args:
        model: any of `Decodes`: a `Retro`, a `RetrofittedDecoder` and so on. It runs in evaluation mode; its mode is
            restored.
        prompts: token ids, one non-empty sequence a row (a list of ints, an int64 tensor, a NumPy array as
            `Tokenizer.encode` returns), or [B,N].
        max_new_tokens: tokens to add to each row. The longest row must fit config.max_len.
        retrieve: called at most once a step, with the complete chunks int64 [n,M] on the model's device. Returns
            neighbours int64 [n,K,R] and their mask, bool [n,K] or [n,K,R] or None, on any device; K and R are the same
            in every call. None: no retrieval. Left out: None, with a warning if the model's configuration has a true
            `retrieves`.
        temperature: divides the logits before sampling; 0: take the most likely token.
        top_p: sample from the fewest tokens that have this probability together (nucleus sampling), 0 < top_p <= 1.
        generator: source of randomness, on the model's device; None: torch's.
        stop_token: a row ends after this token. None: rows end at max_new_tokens, and steps wait for the device only to
            retrieve.
        options: the model's `generation_options`, passed to each of its calls. A tensor has one entry for each prompt.

    Returns:
        One int64 [length] a row: the prompt, then its continuation, the stop token included.

    Raises:
        ValueError, TypeError: naming the argument, or `retrieve` for its result. Ids are checked against the vocabulary
            on every device.

    Source: Borgeaud et al., arXiv 2112.04426, section 2.4 ("Sampling"); top_p: Holtzman et al., arXiv 1904.09751,
    section 3.1.
    """
    if isinstance(retrieve, EllipsisType):
        if getattr(getattr(model, "config", None), "retrieves", False):
            wanted = "a function, or None to decode without retrieval"
            warnings.warn(f"retrieve: expected {wanted}; got nothing", stacklevel=2)
        retrieve = None
    _check_decodes(model, retrieve is not None)
    rows = _prompts(model, prompts)
    _check_options(model, rows, max_new_tokens, retrieve, temperature, top_p, stop_token, options)
    sampling = {"temperature": temperature, "top_p": top_p, "generator": generator}
    training = model.training
    model.eval()
    try:
        with torch.no_grad():
            # by length: prompts of one length go through the model together
            order = sorted(range(len(rows)), key=lambda i: len(rows[i]))
            same_length = itertools.groupby(order, lambda i: len(rows[i]))
            batches = [order] if model.decodes_ragged else [list(same) for _, same in same_length]
            texts = {}
            for batch in batches:
                neighbours = None if retrieve is None else ChunkNeighbours(retrieve, model.config, rows[0].device)
                ends = (max_new_tokens, stop_token)
                inputs = (neighbours, sampling, _rows_of(options, batch))
                sampler = _Sampler(model, [rows[i] for i in batch], *ends, *inputs)
                texts |= zip(batch, sampler.run(), strict=True)
            return [texts[i] for i in range(len(rows))]
    finally:
        model.train(training)


def sample(
    logits: Tensor, *, temperature: float = 0.0, top_p: float = 1.0, generator: torch.Generator | None = None
) -> Tensor:
    """Return one token id [B] for each row of logits [B,V]; see `generate` for the options."""
    if temperature == 0:
        return logits.argmax(-1)
    logits = logits.float()
    logits = logits - logits.amax(-1, keepdim=True)  # divided by a tiny temperature this gives -inf, never NaN
    probabilities = torch.softmax(logits / max(temperature, torch.finfo(logits.dtype).tiny), -1)
    if top_p < 1:
        ranked, order = probabilities.sort(dim=-1, descending=True, stable=True)
        surplus = ranked.cumsum(-1) - ranked >= top_p  # the tokens before this one suffice; never true of the first
        probabilities = torch.zeros_like(ranked).scatter(-1, order, ranked.masked_fill(surplus, 0))
    return torch.multinomial(probabilities, 1, generator=generator).squeeze(-1)


def _rows_of(options: dict, rows) -> dict:
    """Return the options of some rows: their entries of a tensor, and any other value unchanged."""
    return {name: value[rows] if isinstance(value, Tensor) else value for name, value in options.items()}


class _Sampler:
    """State of one `generate`: rows sorted by length, their tokens [B,columns] right-aligned as in the cache."""

    def __init__(self, model, rows, max_new_tokens, stop_token, neighbours, sampling: dict, options: dict):
        self.model, self.rows, self.neighbours = model, rows, neighbours
        self.sampling, self.stop_token, self.options = sampling, stop_token, options
        self.max_new_tokens = max_new_tokens
        self.columns = len(rows[-1])
        self.starts = [self.columns - len(row) for row in rows]
        device = rows[0].device
        self.tokens = torch.zeros(len(rows), self.columns + max_new_tokens, dtype=torch.int64, device=device)
        for tokens, start, row in zip(self.tokens, self.starts, rows):
            tokens[start : self.columns] = row
        self.done = torch.zeros(len(rows), dtype=torch.bool, device=device)
        self.ends = torch.full((len(rows),), self.tokens.shape[1], device=device)

    def run(self) -> list[Tensor]:
        """Return the sequences, in the order of the rows."""
        last = self.tokens.shape[1] - 1
        if self.max_new_tokens:
            logits, cache = self._prefill()
            for column in range(self.columns, last + 1):
                self.tokens[:, column] = sample(logits, **self.sampling)
                if self._stopped(column) or column == last:
                    break
                token, inputs = self.tokens[:, column : column + 1], self._completed(column)
                logits = self.model(token, cache=cache, **inputs, **self.options)[:, -1]
        ends = self.ends.tolist()
        return [tokens[start:end].clone() for tokens, start, end in zip(self.tokens, self.starts, ends)]

    def _stopped(self, column: int) -> bool:
        """Return whether every row has ended at `column`."""
        if self.stop_token is None:
            return False
        stops = ~self.done & (self.tokens[:, column] == self.stop_token)
        self.ends = torch.where(stops, column + 1, self.ends)
        self.done |= stops
        # the check waits for the device; a late one is harmless, because tokens past a row's end are dropped
        looks = self.tokens.device.type == "cpu" or (column - self.columns) % _LOOK_EVERY == _LOOK_EVERY - 1
        return looks and bool(self.done.all())

    def _prefill(self) -> tuple[Tensor, Cache]:
        """Return logits [B,V] after the prompts, and the cache that holds them."""
        one_length = len(self.rows[0]) == self.columns  # one cache, no join
        inputs = {} if self.neighbours is None else self.neighbours.of_prompts(self.rows)
        if not one_length and (mask := getattr(self.model, "pads_prompts", None)):
            cache = self.model.make_cache(len(self.rows), self.tokens.shape[1])
            starts = transfer.numbers(self.starts, self.tokens.device)
            inputs[mask] = (torch.arange(self.columns, device=starts.device) >= starts[:, None]).long()
            return self.model.last_logits(self.tokens[:, : self.columns], cache=cache, **inputs, **self.options), cache
        caches, logits, first = [], [], 0
        for length, group in itertools.groupby(self.rows, len):
            rows = list(group)
            cache = self.model.make_cache(len(rows), self.tokens.shape[1] if one_length else length)
            here = slice(first, first := first + len(rows))
            chunks = length // self.neighbours.chunk_len if inputs else 0
            found = {name: t[here, :chunks] for name, t in inputs.items() if chunks}
            options = _rows_of(self.options, here)
            logits.append(self.model.last_logits(torch.stack(rows), cache=cache, **found, **options))
            caches.append(cache)
        return torch.cat(logits), caches[0] if one_length else type(caches[0]).join(caches, self.tokens.shape[1])

    def _completed(self, column: int) -> dict:
        """Return the neighbours of the chunks that end with `column`, as inputs of the model."""
        if self.neighbours is None:
            return {}
        chunk_len = self.neighbours.chunk_len
        rows = [i for i, start in enumerate(self.starts) if (column + 1 - start) % chunk_len == 0]
        if rows and self.stop_token is not None:
            done = self.done.tolist()
            rows = [i for i in rows if not done[i]]
        if not rows:
            return {}
        chunks = self.tokens[rows, column + 1 - chunk_len : column + 1]
        return self.neighbours.of_places([(row, 0) for row in rows], chunks, len(self.rows))


def _check_decodes(model, retrieves: bool) -> None:
    """Raise TypeError unless a model is as in `Decodes`."""
    wanted = "one that decodes with a cache (`Decodes`)"
    for owner, names in ((model, ("config", "decodes_ragged", "make_cache", "last_logits")), (None, _CONFIGURED)):
        owner, path = (owner, "") if owner is not None else (model.config, "config.")
        if lacking := [path + name for name in names if not hasattr(owner, name)]:
            raise TypeError(f"model: expected {wanted}; got {type(model).__name__}, without {', '.join(lacking)}")
    retrieved = checks.RETRIEVED if retrieves and getattr(model.config, "retrieves", False) else ()
    if retrieved and not hasattr(model.config, "chunk_len"):
        raise TypeError(
            f"model: expected {wanted} that retrieves; got {type(model).__name__}, without config.chunk_len"
        )
    names = ("cache", *retrieved)
    for method in (model.last_logits, getattr(model, "forward", model)):
        checks.takes(method, names, f"{wanted}, whose calls take tokens, {', '.join(names)}")


def _prompts(model, prompts) -> list[Tensor]:
    """Return every prompt as int64 [length] on the model's device, checked."""
    device = next(model.parameters(), torch.empty(0)).device
    if isinstance(prompts, (Tensor, np.ndarray)):
        if prompts.ndim != 2:
            raise ValueError(f"prompts: expected [B,N] (2 dimensions); got shape {list(prompts.shape)}")
    elif not isinstance(prompts, Sequence) or isinstance(prompts, str):
        raise TypeError(f"prompts: expected int64 [B,N] or a sequence of token sequences; got {type(prompts).__name__}")
    if len(prompts) == 0:
        raise ValueError("prompts: expected at least one; got none")
    return [_prompt(f"prompts[{i}]", prompt, model.config.vocab_size).to(device) for i, prompt in enumerate(prompts)]


def _prompt(name: str, prompt, vocab_size: int) -> Tensor:
    if isinstance(prompt, np.ndarray) and prompt.dtype.kind in "iu":
        prompt = torch.from_numpy(prompt.astype(np.int64))
    if not isinstance(prompt, Tensor):
        ids = prompt if isinstance(prompt, Sequence) else [None]
        if any(isinstance(t, bool) or not isinstance(t, (int, np.integer)) for t in ids):
            wanted = "a sequence of int token ids, an int64 tensor or an integer array"
            raise TypeError(f"{name}: expected {wanted}; got {prompt!r}")
        prompt = torch.tensor(prompt, dtype=torch.int64)
    if prompt.dim() != 1 or len(prompt) == 0:
        raise ValueError(f"{name}: expected a prompt of at least one token, [length]; got shape {list(prompt.shape)}")
    if prompt.dtype != torch.int64:
        raise TypeError(f"{name}: expected torch.int64 token ids; got {prompt.dtype}")
    checks.token_range(name, prompt, vocab_size)
    return prompt


def _check_options(model, rows, max_new_tokens, retrieve, temperature, top_p, stop_token, options) -> None:
    checks.integer("max_new_tokens", max_new_tokens, low=0)
    longest, room = max(len(row) for row in rows), model.config.max_len
    if room is not None and longest + max_new_tokens > room:
        wanted = f"at most max_len - longest prompt = {room} - {longest}"
        raise ValueError(f"max_new_tokens: expected {wanted}; got {max_new_tokens}")
    if retrieve is not None and not callable(retrieve):
        raise TypeError(f"retrieve: expected a function of chunks, or None; got {type(retrieve).__name__}")
    if retrieve is not None and not getattr(model.config, "retrieves", False):
        wanted = f"None for a model without retrieval from outside ({type(model).__name__})"
        raise ValueError(f"retrieve: expected {wanted}; got a function")
    if checks.number("temperature", temperature) < 0:
        raise ValueError(f"temperature: expected a number >= 0; got {temperature}")
    if not 0 < checks.number("top_p", top_p) <= 1:
        raise ValueError(f"top_p: expected a probability in (0, 1]; got {top_p}")
    if stop_token is not None:
        checks.integer("stop_token", stop_token, low=0, high=model.config.vocab_size - 1)
    known = getattr(model, "generation_options", ())
    for name, value in options.items():
        if name not in known:
            wanted = f"an option of {type(model).__name__}'s calls ({', '.join(known) or 'none'})"
            raise TypeError(f"{name}: expected {wanted}; got an unknown name")
        if isinstance(value, Tensor) and (value.dim() == 0 or len(value) != len(rows)):
            got = f"shape {list(value.shape)}"
            raise ValueError(f"{name}: expected one entry for each of the {len(rows)} prompts; got {got}")
