"""Models of this package in EleutherAI's evaluation harness. Needs lm_eval (pip install 'retro-kernels[harness]').

lm = RetroLM(model, tokenizer, retrieve=lambda chunks: database.values(database.search(chunks, k=10)))
results = lm_eval.simple_evaluate(lm, tasks=["lambada_openai", "wikitext"])
results = lm_eval.simple_evaluate("retro", "folder=demo-out,neighbours=10", tasks=["wikitext"])

Importing this module registers the model "retro", which reads a model folder. The command is `retro-model lm-eval`.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterable, Sequence

import numpy as np
import torch
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.models.utils import normalize_gen_kwargs
from lm_eval.utils import simple_parse_args_string
from torch import nn

from retro_model.data.hub import as_encoder
from retro_model.data.tokens import BOS
from retro_model.evaluation import question_answering, windows
from retro_model.evaluation.scoring import check_sizes
from retro_model.evaluation.suffixes import score_suffixes
from retro_model.folders.reader import open_folder
from retro_model.generation import generate
from retro_model.generation.chunk_neighbours import Retrieve

#: doc -> (title, text) of its passages, nearest first; None or an empty iterable if it has none
Passages = Callable[[dict], Iterable[tuple[str, str]] | None]


def passages_of(doc: dict) -> list[tuple[str, str]]:
    """Return the field `passages` of a task's document, a list of {title, text}."""
    return [(passage["title"], passage["text"]) for passage in doc.get("passages") or ()]


@register_model("retro")
class RetroLM(TemplateLM):
    """Language model of the evaluation harness for a `Retro` or a `RetrofittedDecoder`, with retrieval in the loop.

    Args:
        model: with its weights.
        tokenizer: a `Tokenizer`, an `Encoder` with `decode`, or any Hugging Face tokenizer.
        retrieve: chunks -> neighbours and mask, as in `generate`; None: retrieval off.
        passages: function to the passages of a task's document, which replace `retrieve` in question answering. Prompts
            are aligned, so that the answer attends the passages (section 4.3).
        num_passages: passages to read.
        bos_id: token that begins every text; None: the tokenizer's.
        window, stride: of rolling likelihoods, in tokens; None: max_len and half of it. The paper's are 2048 and 1024,
            on Wikitext103 a quarter of the window.
        batch_size: rows at a time.

    Raises:
        TypeError, ValueError: naming the argument.
    """

    def __init__(
        self,
        model: nn.Module,
        tokenizer,
        *,
        retrieve: Retrieve | None = None,
        passages: Passages | None = None,
        num_passages: int = question_answering.NEIGHBOURS,
        bos_id: int | None = None,
        window: int | None = None,
        stride: int | None = None,
        batch_size: int = 8,
    ):
        super().__init__()
        self.model, self.encoder, self.retrieve, self.passages = model, as_encoder(tokenizer), retrieve, passages
        self.bos_id = getattr(self.encoder, "bos_id", BOS) if bos_id is None else bos_id
        if self.bos_id is None:
            raise ValueError("bos_id: expected the id that begins a text, because the tokenizer has none; got None")
        # A model without a token that ends a text begins the next text instead.
        self.stop_token = eos if (eos := getattr(self.encoder, "eos_id", None)) is not None else self.bos_id
        self.window = model.config.max_len if window is None else window
        self.stride = self.window // 2 if stride is None else stride
        check_sizes(model.config, self.window, self.stride, batch_size)
        if self.window > model.config.max_len:
            raise ValueError(f"window: expected at most max_len={model.config.max_len}; got {self.window}")
        self.num_passages, self.batch_size = num_passages, batch_size

    @classmethod
    def from_folder(
        cls,
        folder: str,
        *,
        neighbours: int | None = None,
        random: bool = False,
        passages: bool = False,
        device: str | None = None,
        batch_size: int | str | None = None,
        max_batch_size: int | None = None,
        **options,
    ) -> RetroLM:
        """Load a folder of `retro-model retrofit`, as `--model retro --model_args ...` does.

        Args:
            folder: a model folder.
            neighbours: neighbours per chunk; None: as many as in training; 0: retrieval off.
            random: read random chunks of the database instead of the neighbours, as the control of retrieval.
            passages: read the `passages_of` a task's document instead of the neighbours.
            device: the harness's, which defaults to cuda; a machine without CUDA takes cpu.
            batch_size: the harness's. max_batch_size is ignored.
            options: of `RetroLM`, e.g. stride. The window defaults to the folder's.

        Raises:
            FileNotFoundError, ValueError: naming the file or the argument.
        """
        there = device is not None and (not device.startswith("cuda") or torch.cuda.is_available())
        reader = open_folder(folder, device if there else "cpu")
        k = reader.neighbours if neighbours is None else neighbours
        if not isinstance(k, int) or k < 0:
            raise ValueError(f"neighbours: expected a whole number from 0; got {k!r}")
        if not str(batch_size or 1).isdecimal():
            raise ValueError(f"batch_size: expected a number; got {batch_size!r}")
        library, seeds = reader.library, itertools.count()

        def found(chunks):
            ids, _ = library.search(chunks.cpu().numpy(), k)
            given = library.values(library.drawn(ids, next(seeds)) if random else ids)
            return tuple(torch.from_numpy(part).to(chunks.device) for part in given)

        options = {"window": reader.folder.window, "batch_size": int(batch_size or 1), **options}
        options |= {"retrieve": found if k else None, "passages": passages_of if passages else None}
        return cls(reader.model, reader.tokenizer, bos_id=reader.bos_id, **options)

    @classmethod
    def create_from_arg_obj(cls, arg_dict: dict, additional_config: dict | None = None) -> RetroLM:
        return cls.from_folder(**arg_dict, **(additional_config or {}))

    @classmethod
    def create_from_arg_string(cls, arg_string: str, additional_config: dict | None = None) -> RetroLM:
        return cls.create_from_arg_obj(simple_parse_args_string(arg_string), additional_config)

    @property
    def eot_token_id(self) -> int:
        return self.bos_id

    @property
    def max_length(self) -> int:
        return self.model.config.max_len

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_) -> list[int]:
        return [int(token) for token in self.encoder.encode_batch([string])[0]]

    def _encode_pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        """Return the tokens of a context and of its continuation.

        Spaces at the end of the context belong to the continuation. A token that spans both is a token of the
        continuation, together with everything after it.
        """
        kept = context.rstrip()
        whole, before = self.tok_encode(context + continuation), self.tok_encode(kept) if kept else []
        shared = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(whole, before)))
        return whole[:shared], whole[shared:]

    def loglikelihood(self, requests: Sequence, disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """Return the log-likelihood of each continuation, and whether greedy sampling would write it."""
        if self.passages is None:
            return super().loglikelihood(requests, disable_tqdm=disable_tqdm)
        results = []
        for request in requests:
            with self._passages_of(request.doc):
                results += super().loglikelihood([request], disable_tqdm=True)
        return results

    def _loglikelihood_tokens(self, requests, **_) -> list[tuple[float, bool]]:
        contexts = [c if c[:1] == [self.bos_id] else [self.bos_id, *c] for _, c, suffix in requests if suffix]
        options = {"retrieve": self.retrieve, "align": self.passages is not None, "batch_size": self.batch_size}
        scored = iter(score_suffixes(self.model, contexts, [suffix for *_, suffix in requests if suffix], **options))
        return [(-(s := next(scored)).nats, s.greedy) if suffix else (0.0, True) for *_, suffix in requests]

    def loglikelihood_rolling(self, requests: Sequence, disable_tqdm: bool = False) -> list[float]:
        """Return the log-likelihood of whole texts, read in overlapping windows.

        Each token is scored once, in the window with most tokens before it. BOS is not scored.
        """
        m, texts = self.model.config.chunk_len, []  # context, suffix, number of the request
        for number, request in enumerate(requests):
            tokens = [self.bos_id, *self.tok_encode(request.args[0])]
            if len(tokens) == 1:
                continue
            for first, end, scored in windows(-(-len(tokens) // m), self.window // m, self.stride // m):
                begin = max(scored * m, 1)
                texts.append((tokens[first * m : begin], tokens[begin : end * m], number))
        contexts, suffixes, owners = ([text[i] for text in texts if text[1]] for i in range(3))
        options = {"retrieve": self.retrieve, "batch_size": self.batch_size}
        scored = score_suffixes(self.model, contexts, suffixes, **options)
        nats = np.bincount(owners, [s.nats for s in scored], minlength=len(requests))
        return [-float(n) for n in nats]

    def generate_until(self, requests: Sequence, disable_tqdm: bool = False) -> list[str]:
        """Return a continuation of each prompt, up to the first stop string or the token that ends a text."""
        texts = []
        for request in requests:
            with self._passages_of(getattr(request, "doc", None)):
                texts.append(self._generate(*request.args))
        return texts

    def _generate(self, prompt: str, options: dict) -> str:
        options = dict(normalize_gen_kwargs(options))
        ends, count = options.pop("until"), options.pop("max_gen_toks")
        temperature = float(options.pop("temperature", 1.0)) * bool(options.pop("do_sample"))
        top_p = float(options.pop("top_p", 1.0))
        if options:
            unknown, known = ", ".join(sorted(options)), "until, max_gen_toks, do_sample, temperature and top_p"
            raise ValueError(f"generation_kwargs: expected {known}; got {unknown} too")
        room, m = self.max_length - count, self.model.config.chunk_len
        if room < m:
            raise ValueError(f"max_gen_toks: expected at most max_len - chunk_len = {self.max_length - m}; got {count}")
        tokens = [self.bos_id, *self.tok_encode(prompt)][-(room // m * m) :]
        tokens = tokens if self.passages is None else question_answering.aligned_prompt(tokens, m)
        sampling = {"temperature": temperature, "top_p": top_p, "stop_token": self.stop_token}
        made = generate(self.model, [tokens], count, retrieve=self.retrieve, **sampling)[0][len(tokens) :].tolist()
        text = self.encoder.decode(made[:-1] if made[-1:] == [self.stop_token] else made)
        for end in ends:
            text = text.split(end)[0] if end else text
        return text

    @contextlib.contextmanager
    def _passages_of(self, doc: dict | None):
        """Context manager: every chunk's neighbours are the document's passages, if it has any."""
        before = self.retrieve
        if self.passages is not None:
            sizes, found = (self.model.config.neighbour_len, self.num_passages), self.passages(doc) or ()
            passages = question_answering.passage_neighbours(found, self.tok_encode, *sizes)
            passages = tuple(part.to(next(self.model.parameters()).device) for part in passages)
            self.retrieve = question_answering.same_for_every_chunk(*passages) if bool(torch.any(passages[1])) else None
        try:
            yield
        finally:
            self.retrieve = before
