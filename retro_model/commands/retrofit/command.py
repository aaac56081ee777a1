"""Give a decoder a library: build the database, train the added parameters, score with a control, save the folder.

The command runs no code of the decoder's folder, fetches nothing, and leaves its weights as they are. A stopped run
continues when the command is called again. The result is for `retro-reader ask` and `serve`.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import sys
import time
from pathlib import Path

import torch

from retro_model import evaluation
from retro_model.base.progress import counting
from retro_model.evaluation.outcome import LEAST_DOCUMENTS
from retro_model.folders import folder as folders
from retro_model.retrofit import OwnAttention

from .. import options as parsers
from ..options import STEPS, Sizes
from . import texts
from .copying import fit_copying
from .fitting import fit
from .prefix import choose
from .prepared import PreparedLibrary, check_positive, decoder_folder, lengths, prepare, read_decoder, show_line, stream

HELD_BYTES = 600  # characters per held-out document, because scoring them three times takes as long as the training
CONTROL = "the control's neighbours"
NAMED = 5  # held-out documents in a sentence


def run(
    decoder: Path | None,
    folder: Path,
    sizes: Sizes,
    *,
    steps: int = STEPS,
    seed: int = 0,
    prefix: bool = False,
    copying: bool = False,
    folder_of_texts: Path | None = None,
    text_field: str = "text",
    strict: bool = False,
    measures_small: bool = True,
    encoder: Path | None = None,
    show=show_line,
) -> str:
    """Run all stages into `folder` and return the verdict.

    decoder: see `decoder_folder`. prefix: whether to choose a shared prefix, see `prefix.choose`. copying: whether to
    fit copying, see `copying.fit_copying`. text_field, strict: see `texts.load`.
    measures_small: hold documents out of a folder with few documents too. Without held-out documents nothing is
    trained or scored. encoder: folder of the encoder that finds passages for questions; None: words alone.
    Raises: FileNotFoundError, ImportError, RuntimeError, ValueError naming the fault.
    """
    check_positive(sizes)
    texts.check_results_folder(folder, folder_of_texts)
    decoder = decoder_folder(decoder, show)  # before the slow imports, because it says what is missing
    from retro_model.integrations.huggingface import RetrofitForCausalLM

    began, seconds = time.perf_counter(), {}

    def done(stage: str) -> None:
        seconds[stage] = round(time.perf_counter() - began, 1)

    title, documents = texts.load(folder_of_texts, text_field=text_field, strict=strict, show=show)
    show(f"{title}: {len(documents):,} documents")
    if sizes.held_out and not measures_small and texts.is_small(documents):
        sizes = dataclasses.replace(sizes, held_out=0)
        show(
            "too few documents to measure a gain: none is held out, and nothing is trained (--held-out N changes that)"
        )
    rest, held = texts.divide(documents, sizes.held_out, sizes.held_bytes, sizes.database_bytes, show)
    library = prepare(folder, decoder, rest, held, sizes, show)
    model = read_decoder(decoder)
    torch.manual_seed(seed)
    options = {"neighbours": "own", **lengths(sizes)}
    if prefix:
        show("choosing a shared prefix on documents of the library")
        chosen = choose(model, library.database.store, window=sizes.window, seed=seed)
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
    steps = 0 if _too_far(library, sizes, show) else steps
    show(f"training: {steps} steps")
    batches = functools.partial(stream, library, sizes, seed)
    settings = dataclasses.asdict(sizes) | {"seed": seed, "prefix": list(options.get("prefix", ()))}
    with whole.model.keeping():
        training = fit(whole.model, batches, steps, settings, folder / "training", show)
    if copying:
        copier = RetrofitForCausalLM.from_decoder(model, **options, copying=True)
        fitted = fit_copying(copier.model, whole.model.added_state_dict(), library, sizes, seed)
        show(f"  {fitted.said()}")
        training["copying"] = fitted._asdict()
        whole = copier if fitted.kept else whole
    whole.save_pretrained(folder / "model")
    done("trained")
    show(f"scoring {len(library.held_out.documents)} held-out documents: off, on, on with {CONTROL}")
    off, on, random = score(whole.model, library, sizes, seed)
    said = evaluation.gain_of_retrieval(on, random, library.held_out, CONTROL)
    describe(folder, decoder, title, library, sizes, said, encoder)
    costs = {name: evaluation.bits_per_byte(s) for name, s in {"off": off, "on": on, "random": random}.items()}
    record = {
        "bits_per_byte": costs,
        "on_minus_random": evaluation.bootstrap(on, random, library.held_out),
        "on_minus_off": evaluation.bootstrap(on, off, library.held_out),
        "verdict": said,
        "training": training,
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
    show(f"To see and change the retrieved passages: retro-reader serve {folder}")
    show("seconds since the start: " + ", ".join(f"{stage} {passed:.0f}" for stage, passed in seconds.items()))
    return said


def _too_far(library: PreparedLibrary, sizes: Sizes, show) -> bool:
    """Return whether own attention would read no passage, and say so."""
    nearest = float(library.similarity(sizes).max(initial=-1.0))
    if nearest < sizes.least_similarity:
        show(
            f"no passage is similar enough to be read: the best has {nearest:.2f}, the limit is "
            f"{sizes.least_similarity}; nothing is trained; lower the limit: "
            f"--least-similarity {max(0.0, round(nearest - 0.1, 1))}"
        )
    return nearest < sizes.least_similarity


def library_in_words(library: PreparedLibrary) -> str:
    """Say how many documents are read, and which were held out."""
    reads, held = len(library.database.store.documents), [entry.name for entry in library.held_out.documents]
    said = f"Reads {reads:,} document{'s' * (reads != 1)}"
    if not held:
        return f"{said}; none was held out."
    named = ", ".join(held[:NAMED]) + (f" and {len(held) - NAMED} more" if len(held) > NAMED else "")
    return f"{said}; {len(held)} {'was' if len(held) == 1 else 'were'} kept for the test: {named}."


def score(model: OwnAttention, library: PreparedLibrary, sizes: Sizes, seed: int) -> tuple[evaluation.Scores, ...]:
    """Score the held-out documents: off, on, and on with the control's neighbours."""
    near = library.similar(sizes)
    random = evaluation.exchanged_neighbours(near, library.held_out, library.database, seed)
    given = {"off": (), "on": (near, library.database), CONTROL: (random, library.database)}
    scores, windows = [], {"window": sizes.window, "stride": sizes.stride}
    with model.keeping():  # the control has the same neighbours
        for name, args in given.items():
            with counting(f"scoring, {name}") as report:
                scores.append(evaluation.score(model, library.held_out, *args, **windows, report=report))
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
    given = parsers.retrofit().parse_args(arguments)
    names = ("steps", "seed", "prefix", "copying", "text_field", "strict", "encoder")
    options = {name: getattr(given, name) for name in names}
    try:
        sizes = parsers.sizes_of(given, held_bytes=HELD_BYTES, stride=given.window // 2)
        measures_small = given.held_out is not None
        run(given.decoder, given.out, sizes, folder_of_texts=given.texts, measures_small=measures_small, **options)
    except (FileNotFoundError, ImportError, RuntimeError, ValueError) as error:
        sys.exit(f"retro-model retrofit: {error}")
