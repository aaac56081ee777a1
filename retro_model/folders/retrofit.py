"""Reader of a retrofitted Hugging Face decoder: RETRO's reader with the decoder's tokeniser."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from torch import nn

from retro_model.data.hub import HubTokenizer
from retro_model.data.tokens import byte_alphabet

from .retro import RetroReader


class HubText(HubTokenizer):
    """Tokeniser of the Hugging Face library with `decode_bytes`, which is exact for byte-level vocabularies."""

    def __init__(self, tokenizer) -> None:
        super().__init__(tokenizer)
        self.pieces: dict[int, bytes] = {}
        if self.exact:
            byte_of = byte_alphabet()
            for token, number in tokenizer.get_vocab().items():
                known = self.byte_lengths[number] and all(c in byte_of for c in token)
                self.pieces[number] = bytes(byte_of[c] for c in token) if known else b""

    @classmethod
    def load(cls, path: str | Path) -> HubText:
        """Load a folder that `save_pretrained` wrote, without the network and without running code of the folder."""
        from transformers import AutoTokenizer

        return cls(AutoTokenizer.from_pretrained(path, local_files_only=True, trust_remote_code=False))

    def decode_bytes(self, ids) -> bytes:
        """Return the bytes of token ids; special tokens have none."""
        numbers = np.asarray(ids).tolist()
        return b"".join(self.pieces.get(i, b"") for i in numbers) if self.exact else self.decode(numbers).encode()


class RetrofitReader(RetroReader):
    """Reader of a `RetrofittedDecoder`; see `Reader`."""

    without = "the decoder as it was"

    def __init__(self, folder, device: str = "cpu") -> None:
        super().__init__(folder, device)
        theirs = self.tokenizer.theirs
        self.asks, self.bos_id = bool(getattr(theirs, "chat_template", None)), self.tokenizer.bos_id
        self.stop_token = theirs.eos_token_id if self.asks else None  # it ends an answer

    def _tokenizer(self) -> HubText:
        return HubText.load(self.folder.part("tokenizer"))

    def _model(self) -> nn.Module:
        from retro_model.integrations.huggingface import RetrofitForCausalLM

        local = {"local_files_only": True, "trust_remote_code": False}
        model = RetrofitForCausalLM.from_pretrained(self.folder.part("model"), **local).model
        if hasattr(model, "keeping"):  # own attention reads neighbours that recur once
            self._kept = model.keeping()
            self._kept.__enter__()
        return model

    def question(self, text: str) -> np.ndarray:
        if not self.asks:
            return super().question(text)
        self.encode(text)  # raises for a text that is empty or too long
        said = [{"role": "user", "content": text}]
        found = self.tokenizer.theirs.apply_chat_template(said, add_generation_prompt=True, return_dict=False)
        if len(found) >= self.folder.window:
            raise ValueError(f"text: expected a question of less than {self.folder.window} tokens; got {len(found)}")
        return np.asarray(found, np.int64)
