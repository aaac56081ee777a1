"""Give a decoder a library: build the database, train the added parameters, score with a control, save the folder.

The command runs no code of the decoder's folder, fetches nothing, and leaves its weights as they are. A stopped run
continues when the command is called again. The result is for `retro-reader ask` and `serve`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import sys
import time
from pathlib import Path

import numpy as np
import torch

from retro_model import evaluation
from retro_model.base.progress import counting
from retro_model.evaluation.outcome import LEAST_DOCUMENTS
from retro_model.folders import folder as folders
from retro_model.folders import reader
from retro_model.retrofit import OwnAttention

from ..neighbours.options import TFIDF
from . import texts
from .fitting import changes, fit
from .options import ATTENTION, RATES, Fit, Sizes, parser
from .prefix import choose
from .prepared import PreparedLibrary, check_positive, decoder_folder, prepare, read_decoder, show_line, stream

HELD_BYTES = 600  # characters per held-out document, because scoring them three times takes as long as the training
CONTROL = "the control's neighbours"
NAMED = 5  # held-out documents in a sentence
MEASURED = 5  # held-out passages whose numbers the page shows before they are opened


def run(
    decoder: Path | None,
    folder: Path,
    sizes: Sizes,
    how: Fit,
    *,
    attention: str = "own",
    layers: tuple[int, ...] | None = None,
    rank: int = 0,
    prefix: bool = False,
    folder_of_texts: Path | None = None,
    text_field: str = "text",
    strict: bool = False,
    measures_small: bool = True,
    encoder: Path | None = None,
    show=show_line,
) -> str:
    """Run all stages into `folder` and return the verdict.

    decoder: see `decoder_folder`. attention: "own" for the decoder's own attention, "new" for RETRO's layers and
    encoder. layers, rank: see `fitting.changes`. prefix: whether to choose a shared prefix for own
    attention, see `prefix.choose`.
    text_field, strict: see `texts.read`.
    measures_small: hold documents out of a folder with few documents too. Without held-out documents nothing is
    trained or scored. encoder: folder of the encoder that finds passages for questions; None: words alone.
    Raises: FileNotFoundError, ImportError, RuntimeError, ValueError naming the fault.
    """
    check_positive(sizes)
    texts.check_results_folder(folder, folder_of_texts)
    decoder = decoder_folder(decoder, show)  # before the slow imports, because it says what is missing
    from retro_model.integrations.huggingface import RetrofitForCausalLM

    if attention not in ATTENTION:
        raise ValueError(f"attention: expected one of {', '.join(ATTENTION)}; got {attention!r}")
    began, seconds = time.perf_counter(), {}

    def done(stage: str) -> None:
        seconds[stage] = round(time.perf_counter() - began, 1)

    reading = {"text_field": text_field, "strict": strict, "show": show}
    title, documents = texts.load(folder_of_texts, **reading)
    show(f"{title}: {len(documents):,} documents")
    if sizes.held_out and not measures_small and texts.is_small(documents):
        sizes = dataclasses.replace(sizes, held_out=0)
        show(
            "too few documents to measure a gain: none is held out, and nothing is trained (--held-out N changes that)"
        )
    rest, held = texts.divide(documents, sizes.held_out, sizes.held_bytes, sizes.database_bytes, show)
    library = prepare(folder, decoder, rest, held, sizes, show)
    model = read_decoder(decoder)
    torch.manual_seed(how.seed)
    options = changes(attention, sizes, model.config.num_hidden_layers, layers, rank)
    if prefix and attention == "own":
        show("choosing a shared prefix on documents of the library")
        bos = model.config.bos_token_id
        sink = bos if isinstance(bos, int) else 0
        chosen = choose(model, library.database.store, window=sizes.window, sink=sink, seed=how.seed)
        options["prefix"] = chosen.tokens
        show(f"  {chosen.said()}")
    whole = RetrofitForCausalLM.from_decoder(model, **options)
    whole.save_pretrained(folder / "model")
    library.tokenizer.theirs.save_pretrained(folder / "tokenizer")
    describe(folder, decoder, title, library, sizes, "Not scored yet." if held else "", encoder)
    done("ready")
    show(f"ready after {seconds['ready']:.0f} s, nothing trained: retro-reader serve {folder}")
    if not held:
        return library_in_words(library)
    how = _unless_far(library, sizes, how, attention, show)
    show(f"training: {how.steps} steps")
    read = how if attention == "own" else dataclasses.replace(how, windows=None)
    batches = functools.partial(stream, library, sizes, read)
    keeping = getattr(whole.model, "keeping", contextlib.nullcontext)  # own attention has it
    with keeping():
        training = fit(whole.model, batches, how, sizes, folder / "training", show)
    whole.save_pretrained(folder / "model")
    done("trained")
    show(f"scoring {len(library.held_out.documents)} held-out documents: off, on, on with {CONTROL}")
    scoring = time.process_time()
    kept = getattr(whole.model, "keeping", contextlib.nullcontext)()
    kept.__enter__()  # until the end: the page reads the same neighbours
    off, on, random = score(whole.model, library, sizes, how)
    said = evaluation.gain_of_retrieval(on, random, library.held_out, CONTROL)
    describe(folder, decoder, title, library, sizes, said, encoder)
    costs = {name: evaluation.bits_per_byte(s) for name, s in {"off": off, "on": on, "random": random}.items()}
    record = {
        "bits_per_byte": costs,
        "on_minus_random": evaluation.bootstrap(on, random, library.held_out),
        "on_minus_off": evaluation.bootstrap(on, off, library.held_out),
        "verdict": said,
        "training": training,
        "scoring_cpu_seconds": time.process_time() - scoring,
        "seconds_by_part": getattr(whole.model, "seconds", {}),
        "plan": dataclasses.asdict(sizes),
        "fit": dataclasses.asdict(how),
        "library": library.facts,
    }
    done("scored")
    (folder / "retrofit.json").write_text(json.dumps(record | {"seconds": seconds}, indent=1) + "\n")
    for name, bits in zip(("off", "on", f"on with {CONTROL}"), costs.values()):
        show(f"  {name}: {bits:.4f} bits per byte")
    gap, low, high = record["on_minus_off"]
    many = len(library.held_out.documents) >= LEAST_DOCUMENTS
    show(f"  on minus off: {gap:+.4f}" + f" (95% over documents: {low:+.4f} to {high:+.4f})" * many)
    show(said)
    show(f"To see and change the retrieved passages: retro-reader serve {folder} (numbers for its page follow)")
    with counting(f"numbers of the first {MEASURED} held-out passages for the page") as report:
        reader.measure(folder, report, whole.model, MEASURED)
    done("shown")
    show("seconds since the start: " + ", ".join(f"{stage} {passed:.0f}" for stage, passed in seconds.items()))
    return said


def _unless_far(library: PreparedLibrary, sizes: Sizes, how: Fit, attention: str, show) -> Fit:
    """Return the settings of the training; without steps if own attention would read no passage."""
    nearest = float(library.similarity(sizes).max(initial=-1.0))
    if attention != "own" or nearest >= sizes.least_similarity:
        return how
    show(
        f"no passage is similar enough to be read: the best has {nearest:.2f}, the limit is {sizes.least_similarity}; "
        f"nothing is trained; lower the limit: --least-similarity {max(0.0, round(nearest - 0.1, 1))}"
    )
    return dataclasses.replace(how, steps=0)


def library_in_words(library: PreparedLibrary) -> str:
    """Say how many documents are read, and which were held out."""
    reads, held = len(library.database.store.documents), [entry.name for entry in library.held_out.documents]
    said = f"Reads {reads:,} document{'s' * (reads != 1)}"
    if not held:
        return f"{said}; none was held out."
    named = ", ".join(held[:NAMED]) + (f" and {len(held) - NAMED} more" if len(held) > NAMED else "")
    return f"{said}; {len(held)} {'was' if len(held) == 1 else 'were'} kept for the test: {named}."


def score(model, library: PreparedLibrary, sizes: Sizes, how: Fit) -> tuple[evaluation.Scores, ...]:
    """Score the held-out documents: off, on, and on with the control's neighbours."""
    near, windows = library.neighbours[:, : sizes.neighbours], {"window": sizes.window, "stride": sizes.stride}
    if isinstance(model, OwnAttention):
        near = np.where(library.far(sizes), -1, near)
    random = evaluation.exchanged_neighbours(near, library.held_out, library.database, how.seed)
    given = {"off": (), "on": (near, library.database), CONTROL: (random, library.database)}
    scores, options = [], windows | {"autocast": how.autocast}
    for name, args in given.items():
        with counting(f"scoring, {name}") as report:
            scores.append(evaluation.score(model, library.held_out, *args, **options, report=report))
    return tuple(scores)


def describe(
    folder: Path,
    decoder: Path,
    title: str,
    library: PreparedLibrary,
    sizes: Sizes,
    verdict: str,
    encoder: Path | None = None,
) -> None:
    """Write the description that makes `folder` a model folder, for `retro-reader ask` and `serve`."""
    facts = {name: getattr(sizes, name) for name in ("neighbours", "least_similarity", "passage_chunks")}
    facts |= {"bos": library.tokenizer.bos_id is not None, "verdict": verdict, "summary": library_in_words(library)}
    facts |= {} if encoder is None else {"encoder": str(encoder.resolve())}
    parts = {"model": "model", "tokenizer": "tokenizer", "store": library.database.store.folder.name}
    shown = f"{len(library.database.store.documents):,} documents of {title}"
    folders.describe(folder, "retrofit", f"{decoder.name} with {shown}", parts | folders.LIBRARY, sizes.window, facts)


def main(arguments: list[str] | None = None) -> None:
    """Run the command."""
    given = parser().parse_args(arguments)
    own = given.attention == "own"
    least = given.least_similarity if own else -1.0
    held_out = Sizes.held_out if given.held_out is None else given.held_out
    lengths = {"held_out": held_out, "held_bytes": HELD_BYTES, "passage_chunks": given.passage_chunks}
    lengths["database_bytes"] = given.database_bytes
    sizes = Sizes(given.chunk_len, given.neighbours, least, given.window, given.window // 2, **lengths)
    rate = RATES["low-rank" if given.rank and own else given.attention] if given.lr is None else given.lr
    how = Fit(given.steps, given.batch, given.windows, rate, given.autocast, given.seed)
    names = ("attention", "rank", "prefix", "text_field", "strict")
    options = {name: getattr(given, name) for name in names}
    options["encoder"] = None if given.encoder == TFIDF else Path(given.encoder)
    options["measures_small"] = given.held_out is not None
    options["layers"] = given.layers and tuple(given.layers)
    try:
        run(given.decoder, given.out, sizes, how, folder_of_texts=given.texts, **options)
    except (FileNotFoundError, ImportError, RuntimeError, ValueError) as error:
        sys.exit(f"retro-model retrofit: {error}")
