"""retro-reader ask FOLDER [PROMPT]: show in the terminal the passages that a trained model looks up, and their gain.

Without a prompt the model reads a held-out text; it continues a prompt with retrieval and without.
"""

from __future__ import annotations

import sys

from rich.console import Console
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from retro_model.base.progress import printable
from retro_model.data.text_files import find_texts, read_texts
from retro_model.folders.reader import Options, Reader, open_folder
from retro_model.folders.reading import TextReading

from .options import ask

#: (least bits gained or lost, style): blue for a gain, orange for a loss, readable on dark and light terminals
HELPS = ((3.0, "black on #6fb1ff"), (1.0, "black on #a9d0ff"), (0.3, "black on #d6e8ff"))
HURTS = ((3.0, "black on #ff9f50"), (1.0, "black on #ffc999"))
CARD_LINES = 8


def style(gain: float) -> str:
    """Return the style of a token on which retrieval gains `gain` bits."""
    steps, amount = (HELPS, gain) if gain > 0 else (HURTS, -gain)
    return next((name for least, name in steps if amount >= least), "")


def coloured(reading: TextReading, first: int = 0) -> Text:
    """Return the text with each token coloured by its gain. From token `first` on it is bold, unless `first` is 0."""
    text = Text()
    for i, (token, gain, blank) in enumerate(zip(reading.texts, reading.gain, reading.blank)):
        weight = "bold" if first and i >= first else ""
        text.append(printable(token), style="" if blank else f"{style(gain)} {weight}".strip())
    return text


def card(neighbour: dict) -> Panel:
    """Draw a neighbour: the retrieved chunk is dim, its continuation bright."""
    texts, found = neighbour["texts"], neighbour["found"]
    text = Text(printable("".join(texts[:found])), style="dim").append(printable("".join(texts[found:])))
    line = f"line {neighbour['line']}, " if "line" in neighbour else ""
    title = Text(f"{printable(neighbour['name'])}, {line}score {neighbour['score']:.2f}")
    return Panel(Text("\n").join(text.split("\n")[:CARD_LINES]), title=title, title_align="left")


def verdict(reading: TextReading, without: str) -> Text:
    """Return the outcome of one text in a sentence: the gain over random passages, or over no retrieval."""
    found = reading.bits_per_byte()
    control = "random" if "random" in found else "off"
    change = 1 - found["on"] / found[control] if found[control] else 0.0
    names = {"on": "bits per byte", "off": without, "random": "random passages"}
    costs = "; ".join(f"{names[name]}: {cost:.3f}" for name, cost in found.items() if name != "on")
    than = "with random passages" if control == "random" else "without it"
    gain = f"With retrieval this text costs {abs(change):.0%} {'fewer' if change >= 0 else 'more'} bits than {than}."
    return Text(f"{found['on']:.3f} bits per byte; {costs}. {gain} One text is too few to say more.")


def show(console: Console, reader: Reader, reading: TextReading, written_from: int = 0) -> None:
    """Print the coloured text, the neighbours of the chunk that gained most, and the verdict."""
    title = "blue: retrieval made the token likelier; orange: less likely"
    console.print(Panel(coloured(reading, written_from), title=title, title_align="left"))
    gain, m = reading.gain, reading.chunk_len
    chunks = [c for c in range(1, -(-len(gain) // m)) if c <= len(reading.cards) and reading.cards[c - 1]]
    if chunks:
        best = max(chunks, key=lambda c: gain[c * m : (c + 1) * m].sum())
        here = Panel(Text(printable("".join(reading.texts[best * m : (best + 1) * m]))))
        read = Text("It had read (dim: what resembled the text before):")
        console.print(Text("Most was gained here:"), here, read, *map(card, reading.cards[best - 1]))
    if documents := reading.documents():
        table = Table("document", "chunks", "bits gained", title="What was looked up")
        for entry in documents[:8]:
            table.add_row(Text(printable(entry["name"])), str(entry["chunks"]), f"{entry['saved']:+.1f}")
        console.print(table)
    else:
        why = "the library is off or empty, no chunk is complete, or no passage is similar enough to one."
        console.print(f"No passage was read: {why}")
    if written_from:
        console.print("It wrote the bold words itself: their cost says nothing of retrieval.")
    else:
        console.print(verdict(reading, reader.without))


def main(arguments: list[str] | None = None) -> None:
    """Run `retro-reader ask`."""
    options = ask().parse_intermixed_args(arguments)  # a prompt may follow --question
    console = Console()
    try:
        reader = open_folder(options.folder, options.device)
        _change(reader, options.forget, options.add)
        k = reader.neighbours if options.neighbours is None else options.neighbours
        how = Options(k, not options.off, options.temperature, options.tokens, options.seed, options.least_match)
        if options.prompt is None and not reader.passages:
            raise ValueError(
                "prompt: expected a question or a text, for the folder holds out no text to read; got none"
            )
        if options.prompt is None:
            number = reader.start if options.passage is None else options.passage
            ids, passage = reader.passage(number), reader.passages[number]
            where = f"{printable(passage['name'])}, from line {passage['line']}"
            console.print(f"{where}: the model has not seen it", markup=False)
            show(console, reader, reader.score(ids, how))
            return
        prompt = sys.stdin.read() if options.prompt == "-" else options.prompt
        if options.question:
            show_answer(console, reader.answer(prompt, how))
            return
        ids = reader.encode(prompt)
        reading, plain = reader.write(ids, how)
        show(console, reader, reading, reading.extra["prompt_tokens"])
        console.print(Panel(Text(printable(plain)), title=f"{reader.without}, it writes", title_align="left"))
    except (FileNotFoundError, ValueError) as error:
        sys.exit(printable(f"retro-reader ask: {error}"))


def show_answer(console: Console, found: dict) -> None:
    """Print the passages that resemble a question, then the answer."""
    read = found["read"]
    console.print("Your notes say:" if read else why_unread(found))
    console.print(*map(card, found["cards"][: max(read, 1)]))
    how = f"passages in the prompt: {read}" if read else "the decoder alone"
    console.print(Panel(Text(printable(found["answer"])), title=f"Answer ({how})", title_align="left"))


def why_unread(found: dict) -> str:
    """Say why no passage was read."""
    if not found["cards"]:
        return "No passage was read: none shares a word with the question."
    return f"No passage was read: best match {found['best']:.2f}, limit {found['limit']:.2f} (--least-match lowers it)."


def _change(reader: Reader, forget: list[str], add: list[str]) -> None:
    """Remove documents from the library and add files to it."""
    for name in forget:
        numbers = [n for n, entry in enumerate(reader.library.documents) if entry.name == name]
        if not numbers:
            raise ValueError(f"--forget: expected the name of a document in the library; got {name!r}")
        for number in numbers:
            reader.library.forget(number)
    for path in add:
        documents = list(read_texts(find_texts([path])))
        if not documents:
            raise ValueError(f"--add: expected a file with text; got {path}, which has none")
        for document in documents:
            if not isinstance(document.content, str):
                raise ValueError(f"--add: expected text; got token ids in {document.place}")
            reader.library.add(document.place, document.content)
