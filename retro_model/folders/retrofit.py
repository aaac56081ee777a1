"""Reader of a retrofitted Hugging Face decoder, with the decoder's tokeniser. It answers questions."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import nn

from retro_model.base import progress
from retro_model.data.hub import HubTokenizer
from retro_model.retrofit.decoders import base_of

from .questions import QuestionSearch, chat_prompt, sentence_encoder, with_passages
from .reader import Options, Reader
from .reading import token_texts

SHOWN = 4  # passages of the library that are shown to a question


class RetrofitReader(Reader):
    """Reader of a `RetrofittedDecoder`; see `Reader`."""

    def __init__(self, folder, device: str = "cpu", model=None) -> None:
        super().__init__(folder, device, model)
        self.without = "the decoder and the shared prefix" if self.model.always_attends else "the decoder as it was"
        theirs = self.tokenizer.theirs
        self.asks, self.bos_id = bool(getattr(theirs, "chat_template", None)), self.tokenizer.bos_id
        self.stop_token = theirs.eos_token_id if self.asks else None  # it ends an answer
        encoder = folder.facts.get("encoder")
        self.questions = QuestionSearch(self.library, sentence_encoder(encoder) if encoder else None)

    def _tokenizer(self) -> HubTokenizer:
        return HubTokenizer.load(self.folder.part("tokenizer"))

    def _model(self) -> nn.Module:
        from retro_model.integrations.huggingface import RetrofitForCausalLM

        progress.hide_theirs()
        local = {"local_files_only": True, "trust_remote_code": False}
        model = RetrofitForCausalLM.from_pretrained(self.folder.part("model"), **local).model
        if hasattr(model, "keeping"):  # own attention reads neighbours that recur once
            self._kept = model.keeping()
            self._kept.__enter__()
        return model

    def find(self, text: str, options: Options) -> dict:
        """Return the passages that resemble a question: cards, best match first, of which the first k are read.

        The cards have the fields of a reading's cards. `best` is the best match, `limit` the least match that is read,
        and `read` the number of passages that `answer` puts into the prompt.
        """
        if not self.asks:
            return super().find(text, options)
        self.encode(text)  # raises for a text that is empty or too long
        ids, matches = self.questions.search(text, max(SHOWN, options.k))
        near = [(int(i), float(match)) for i, match in zip(ids, matches) if i >= 0]
        cards = []
        for chunk, match in near:
            tokens, mask = self.library.values(np.array([chunk]))
            card = self.library.place(chunk)._asdict() | {"score": round(match, 3), "found": 0}
            cards.append(card | {"texts": token_texts(self.tokenizer.decode_bytes, tokens[0][mask[0]])})
        passed = sum(match >= options.least for _, match in near) if options.retrieval else 0
        best = near[0][1] if near else 0.0
        return {"cards": cards, "best": round(best, 3), "limit": options.least, "read": min(passed, options.k)}

    def answer(self, text: str, options: Options, told: Callable[[str], None] = lambda text: None) -> dict:
        """Return `find` with the answer, greedily decoded. The passages are in the prompt (in-context retrieval).

        told: called with the answer so far, after each token.
        """
        found = self.find(text, options)
        passages = ["".join(card["texts"]) for card in found["cards"][: found["read"]]]
        prompt = torch.as_tensor(chat_prompt(self.tokenizer, with_passages(text, passages)), device=self.device)
        room = self.model.config.max_len - options.new_tokens
        if len(prompt) > room:
            raise ValueError(f"text: expected a question and passages of at most {room} tokens; got {len(prompt)}")
        written: list[int] = []

        class Streamer:
            def put(self, tokens) -> None:
                if tokens.numel() == 1:  # the first call has the prompt
                    written.append(int(tokens))
                    told(said())

            def end(self) -> None:
                pass

        def said() -> str:
            return self.tokenizer.decode_bytes([t for t in written if t != self.stop_token]).decode("utf-8", "replace")

        decoder = base_of(self.model.decoder)
        options_of = {"max_new_tokens": options.new_tokens, "do_sample": False, "eos_token_id": self.stop_token}
        inputs = {"attention_mask": torch.ones_like(prompt)[None], "pad_token_id": self.stop_token}
        decoder.generate(prompt[None], streamer=Streamer(), **inputs, **options_of)
        return found | {"answer": said()}
