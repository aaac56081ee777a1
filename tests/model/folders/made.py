"""Tiny model folders. Nothing is trained; the weights start with a copying circuit, so retrieval helps."""

from pathlib import Path

import numpy as np
import torch

from retro_model import Retro, RetroConfig, checkpoint
from retro_model.data.database import ChunkDatabase
from retro_model.data.embed import HashedTfidf
from retro_model.data.store import build_store
from retro_model.data.tokens import Tokenizer
from retro_model.folders import folder as folders
from retro_model.layers import copying
from tests.model import decoders

HOSTILE = "<script>document.title = 'taken over'</script><img src=x onerror=\"document.title = 'taken over'\">"
M = 16

NOTES = {
    "boiler.md": "# Boiler\n\nThe boiler needs a pressure of 1.7 bar when it is cold.\n",
    "cat.md": "# Cat\n\nThe cat is called Professor Biscuit and eats fish.\n",
    "keys.md": "# Keys\n\nThe key of the shed lies in the bread bin.\n",
}
TEMPLATE = "{% for m in messages %}<user>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<answer>{% endif %}"


def texts() -> list[tuple[str, str, str]]:
    """Return five made-up files; the held-out text resembles `harbour.txt`, and `<b>hostile.html` tests escaping."""
    random = np.random.default_rng(0)
    nouns = "harbour crane ledger rope captain winter cargo signal anchor tide lantern pilot quay sail barrel market"
    verbs = "moved counted lifted repaired watched painted carried signed lost found"

    def sentences(count: int) -> str:
        words = lambda of: random.choice(of.split())  # noqa: E731
        said = (f"The {words(nouns)} {words(verbs)} the {words(nouns)} near the {words(nouns)}." for _ in range(count))
        return "\n".join(said) + "\n"

    files = [(f"{name}.txt", name, sentences(60)) for name in ("harbour", "bridge", "valley", "island")]
    return [*files, ("<b>hostile.html", "hostile", f"{HOSTILE}\n" * 30)]


def held_out() -> list[tuple[str, str, str]]:
    """Return the second half of harbour.txt under another name and with another end, and a hostile text."""
    harbour = texts()[0][2].split("\n")
    return [
        ("port.txt", "port", "\n".join(harbour[30:50]) + "\nThen the story ended otherwise.\n"),
        ("note.html", "note", f"A note. {HOSTILE}\n" * 6),
    ]


def retro(path: Path) -> Path:
    """A RETRO folder of five files."""
    torch.manual_seed(0)
    tokenizer = Tokenizer.train([text for _, _, text in texts()], 400)
    tokenizer.save(path / "tokenizer.json")
    store = build_store(path / "all", texts(), tokenizer, chunk_len=M)
    build_store(path / "validation", held_out(), tokenizer, chunk_len=M, bos=True)
    embedder = HashedTfidf(64).fit(store)
    embedder.save(path / "embedder.npz")
    ChunkDatabase.build(path / "embeddings", store, embedder)
    model = Retro(config(tokenizer.vocab_size))
    copying.start_copying(model, 0)
    checkpoint.save(path / "retro", model)
    parts = {
        "model": "retro",
        "tokenizer": "tokenizer.json",
        "held_out": "validation",
        "store": "all",
        "keys": "embeddings",
        "embedder": "embedder.npz",
    }
    folders.describe(
        path, "retro", "A tiny RETRO", parts, 128, {"neighbours": 2, "bos": True, "verdict": "Retrieval helps."}
    )
    return path


def config(vocab_size: int) -> RetroConfig:
    return RetroConfig.small(vocab_size, 64, 64, 2, num_layers=2, chunk_len=M, share_embeddings=True, max_len=512)


def decoder(folder: Path) -> None:
    """A tiny Llama of the Hugging Face library and its tokeniser."""
    import transformers

    tokenizer = Tokenizer.train([text for _, _, text in texts()], 400)
    theirs = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer.model, bos_token="<bos>", pad_token="<pad>"
    )
    theirs.save_pretrained(folder)
    torch.manual_seed(0)
    decoders.llama(tokenizer.vocab_size, 3, d_ff=32, longest=256, bos_token_id=1).save_pretrained(folder)


def text_files(folder: Path) -> None:
    """Write the texts as files, four times each with other words first."""
    for number in range(4):
        for name, _, text in texts():
            words = text.split()
            plain = name.replace("<b>", "").rpartition(".")[0]
            (folder / f"{plain}-{number}.txt").write_text(" ".join(words[number:] + words[: 7 * number]))


def write_notes(folder: Path) -> None:
    """Write three notes."""
    for name, text in NOTES.items():
        (folder / name).write_text(text)


def chatting_decoder(folder: Path) -> None:
    """Save an untrained decoder whose tokeniser has a chat template."""
    import transformers

    tokenizer = Tokenizer.train([*NOTES.values(), "<user><answer> roof old what how?"], 400)
    theirs = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer.model, bos_token="<bos>", eos_token="<pad>", pad_token="<pad>"
    )
    theirs.chat_template = TEMPLATE
    theirs.save_pretrained(folder)
    torch.manual_seed(0)
    model = decoders.gpt2(tokenizer.vocab_size, 2, longest=256)
    model.config.bos_token_id, model.config.eos_token_id = 1, 0
    model.generation_config.bos_token_id, model.generation_config.eos_token_id = 1, 0
    model.save_pretrained(folder)


def notes(decoder: Path, texts: Path, out: Path) -> Path:
    """A folder that `retrofit` makes of three notes."""
    from retro_model.commands.retrofit import command

    chatting_decoder(decoder)
    write_notes(texts)
    command.main([str(decoder), "--texts", str(texts), "--out", str(out), "--chunk-len", "16", "--window", "64"])
    return out
