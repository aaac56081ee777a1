"""Our models in lm_eval: tasks on small local files, against scores and samples made without it."""

import json
import re
from functools import partialmethod
from pathlib import Path

import pytest
import torch

from retro_model import Retro, RetroConfig, evaluation, generate
from retro_model.commands.__main__ import main
from retro_model.commands.lm_eval import hand_over
from retro_model.commands.options import Sizes
from retro_model.commands.retrofit import command as retrofit
from retro_model.data.database import ChunkDatabase
from retro_model.data.embed import HashedTfidf
from retro_model.data.store import build_store
from retro_model.data.tokens import BOS, Tokenizer
from retro_model.evaluation import question_answering as qa
from tests.model.folders import made as folders
from tests.refusals import refused

lm_eval = pytest.importorskip("lm_eval", reason="needs lm_eval, the extra `harness`")

import yaml  # noqa: E402
from lm_eval.tasks import TaskManager  # noqa: E402

from retro_model.integrations import lm_eval as integration  # noqa: E402
from retro_model.integrations.lm_eval import RetroLM, passages_of  # noqa: E402

GUIDE = (Path(__file__).parents[2] / "docs" / "evaluate.md").read_text()
ARTICLES = yaml.safe_load(re.search(r"```yaml\n(.*?)```", GUIDE, re.DOTALL)[1])
LAST_WORDS = ARTICLES | {
    "task": "words",
    "output_type": "loglikelihood",
    "doc_to_text": "{{text.rpartition(' ')[0]}}",
    "doc_to_target": "{{' ' + text.rpartition(' ')[2]}}",
    "target_delimiter": "",
    "metric_list": [{"metric": "acc"}],
}
PROMPT = "question: {question} \n answer:"
QUESTIONS = ARTICLES | {
    "task": "questions",
    "output_type": "generate_until",
    "doc_to_text": PROMPT.format(question="{{question}}"),
    "doc_to_target": "{{answer}}",
    "generation_kwargs": {"until": ["\n"], "max_gen_toks": 6, "do_sample": False},
    "metric_list": [{"metric": "exact_match", "ignore_case": True}],
}

TEXTS = [
    "the cat sat on the mat and the dog sat on the cat",
    "a dog is a cat, or so the mat said to the dog on the mat",
]
M = 8


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("harness")
    tokenizer = Tokenizer.train(TEXTS, 280)
    store = build_store(
        folder / "store", [(str(i), "", t) for i, t in enumerate(TEXTS)], tokenizer, chunk_len=M, bos=True
    )
    database = ChunkDatabase.build(folder / "keys", store, HashedTfidf(16).fit(store))
    torch.manual_seed(0)
    config = RetroConfig.small(
        tokenizer.vocab_size, 32, 64, num_heads=2, num_layers=2, chunk_len=M, encoder_d_ff=32, max_len=128
    )
    model = Retro(config).eval()

    def retrieve(chunks):
        return database.values(database.search(chunks, k=2))

    return folder, tokenizer, store, model, retrieve


def lines(folder, name, rows):
    path = folder / f"{name}.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def on(task, path):
    """Return a task on the rows of a file."""
    return task | {"dataset_kwargs": {"data_files": {"test": str(path)}}}


def run(lm, task):
    manager = TaskManager(include_defaults=False)  # reading the thousands of others takes long
    results = lm_eval.simple_evaluate(lm, tasks=[task], task_manager=manager, bootstrap_iters=0, log_samples=True)
    return results["results"][task["task"]], results["samples"][task["task"]]


def test_the_guides_articles_get_our_own_score(made, tmp_path):
    """Rolling likelihoods in windows of 3 chunks equal `evaluation.score`, with and without retrieval."""
    folder, tokenizer, _, model, retrieve = made
    task = on(ARTICLES, lines(tmp_path, "wikitext", [{"text": t * 2} for t in TEXTS]))
    new = build_store(
        tmp_path / "new", [(f"new {i}", "", t * 2) for i, t in enumerate(TEXTS)], tokenizer, chunk_len=M, bos=True
    )
    database = ChunkDatabase.build(folder / "keys", made[2], HashedTfidf(16).fit(made[2]))
    ids = database.search(new.chunks(range(len(new))), 2, lengths=new.lengths)
    for options, neighbours in (({"retrieve": retrieve}, (ids, database)), ({}, ())):
        lm = RetroLM(model, tokenizer, window=3 * M, stride=M, **options)
        results, samples = run(lm, task)
        want = evaluation.score(model, new, *neighbours, window=3 * M, stride=M)
        total = sum(sample["bits_per_byte"][0] for sample in samples)
        assert total == pytest.approx(-want.nats.sum(), rel=1e-4)
        assert results["bits_per_byte,none"] == pytest.approx(evaluation.bits_per_byte(want), rel=1e-4)


def test_last_words(made, tmp_path):
    _, tokenizer, _, model, retrieve = made
    lm = RetroLM(model, tokenizer, retrieve=retrieve)
    rows = [{"text": f"{TEXTS[0]} {word}"} for word in ("mat", "dog", "cat")]
    results, samples = run(lm, on(LAST_WORDS, lines(tmp_path, "words", rows)))
    context = tokenizer.encode(TEXTS[0]).tolist()
    words = [tokenizer.encode(row["text"]).tolist()[len(context) :] for row in rows]
    want = evaluation.score_suffixes(model, [[BOS, *context]] * 3, words, retrieve=retrieve)
    assert [s["resps"][0][0][0] for s in samples] == pytest.approx([-w.nats for w in want], rel=1e-5)
    assert results["acc,none"] == pytest.approx(sum(w.greedy for w in want) / 3)


def test_questions_are_answered_from_their_passages(made, tmp_path):
    _, tokenizer, _, model, _ = made
    passages = [{"title": "Cats", "text": TEXTS[0]}, {"title": "Dogs", "text": TEXTS[1]}]
    rows = [
        {"question": "who sat on the mat?", "answer": "?", "passages": passages},
        {"question": "who?", "answer": "x", "passages": []},
    ]
    prompts = [
        qa.aligned_prompt([BOS, *tokenizer.encode(PROMPT.format(question=r["question"])).tolist()], M) for r in rows
    ]
    neighbours = qa.passage_neighbours(passages_of(rows[0]), tokenizer.encode, 2 * M, 4)
    answers = []
    for prompt, retrieve in zip(prompts, (qa.same_for_every_chunk(*neighbours), None)):
        text = tokenizer.decode(generate(model, [prompt], 6, retrieve=retrieve)[0][len(prompt) :])
        answers.append(text.split("\n")[0])
    rows[0]["answer"] = answers[0].upper()
    task = on(QUESTIONS, lines(tmp_path, "questions", rows))
    results, samples = run(RetroLM(model, tokenizer, passages=passages_of, num_passages=4), task)
    assert [s["resps"][0][0] for s in sorted(samples, key=lambda s: s["doc_id"])] == answers
    assert results["exact_match,none"] == 0.5


class Request:
    """A request of the harness without a document."""

    def __init__(self, *args):
        self.args, self.doc = args, None


def test_options_of_generation_are_the_harnesss(made, monkeypatch):
    """Every name for the number of tokens counts; a temperature alone samples; others are refused by name."""
    _, tokenizer, _, model, _ = made
    calls = []

    def remembered(_, prompts, count, **options):
        calls.append((count, options["temperature"], options["top_p"]))
        return [torch.tensor([*prompts[0], *tokenizer.encode("cat\nmat")])]

    monkeypatch.setattr(integration, "generate", remembered)
    lm = RetroLM(model, tokenizer)
    for options in (
        {"max_new_tokens": 5, "until": "\n"},
        {"max_tokens": 6, "temperature": 0.5, "until": ["\n", "x"]},
        {"max_gen_toks": 7, "do_sample": False, "temperature": 0.5, "until": ["\n"]},
        {"max_gen_toks": 8, "do_sample": True, "top_p": 0.9, "temperature": 0.7, "until": ["\n"]},
    ):
        assert lm.generate_until([Request("the", options)]) == ["cat"]
    assert calls == [(5, 0.0, 1.0), (6, 0.5, 1.0), (7, 0.0, 1.0), (8, 0.7, 0.9)]
    with pytest.raises(ValueError, match=r"generation_kwargs: expected until, .*; got num_beams too"):
        lm.generate_until([Request("the", {"max_gen_toks": 5, "num_beams": 4})])


def test_a_text_ends_at_its_token(made, monkeypatch):
    _, tokenizer, _, model, _ = made
    lm = RetroLM(model, tokenizer)
    assert lm.stop_token == BOS
    options = {"max_gen_toks": 12}
    whole = generate(model, [[BOS, *tokenizer.encode("the cat")]], 12)[0][-12:].tolist()
    lm.stop_token = whole[3]
    first = whole.index(whole[3])
    assert lm.generate_until([Request("the cat", options)]) == [tokenizer.decode(whole[:first])]


def test_a_token_may_span_context_and_continuation(made):
    """The continuation then begins with that token; contexts of spaces and empty continuations are served."""
    _, tokenizer, _, model, retrieve = made
    lm = RetroLM(model, tokenizer, retrieve=retrieve)
    found = []
    for context, continuation in (("the ca", "t sat"), ("  ", "cat"), (" ", "cat"), ("the dog", ""), ("the", " cat")):
        before, after = lm._encode_pair(context, continuation)
        assert [*before, *after] == lm.tok_encode(context + continuation)
        found.append(len(before))
        [(nats, greedy)] = lm.loglikelihood([Request(context, continuation)])
        if continuation:
            [want] = evaluation.score_suffixes(model, [[BOS, *before]], [after], retrieve=retrieve)
            assert (nats, greedy) == (pytest.approx(-want.nats, rel=1e-5), want.greedy)
        else:
            assert (nats, greedy) == (0.0, True)
    spanned, spaces, space, _, plain = found
    assert spanned < len(lm.tok_encode("the ca")) and spaces == space == 0 and plain == len(lm.tok_encode("the"))


def test_refuses(made):
    _, tokenizer, _, model, _ = made
    with pytest.raises(ValueError, match=r"window: expected a positive multiple of the chunk length \(8\); got 12"):
        RetroLM(model, tokenizer, window=12)
    refused(r"stride: expected less than window \(16\)", RetroLM, model, tokenizer, window=16, stride=16)
    refused("window: expected at most max_len=", RetroLM, model, tokenizer, window=8 * model.config.max_len)


def test_the_command_scores_a_model_folder(tmp_path, monkeypatch, capsys):
    """`--model retro` on lm_eval's command line gives the numbers of the same model in Python."""
    (tmp_path / "model").mkdir()
    folder = folders.retro(tmp_path / "model")
    texts = [text for _, _, text in folders.held_out()]
    made = {
        "articles": on(ARTICLES, lines(tmp_path, "articles", [{"text": text[:300]} for text in texts])),
        "words": on(LAST_WORDS, lines(tmp_path, "words", [{"text": "The captain lost the rope near the harbour."}])),
    }
    for name, task in made.items():
        (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump(task))
    monkeypatch.setattr(TaskManager, "__init__", partialmethod(TaskManager.__init__, include_defaults=False))
    arguments = ["--model_args", f"folder={folder},neighbours=1", "--include_path", str(tmp_path), "--tasks", *made]
    main(["lm-eval", *arguments, "--batch_size", "2", "--output_path", str(tmp_path / "out")])
    [path] = (tmp_path / "out").rglob("results*.json")
    found = json.loads(path.read_text())["results"]
    lm = RetroLM.from_folder(str(folder), neighbours=1)
    assert (lm.window, lm.stride) == (128, 64)
    for name, task in made.items():
        want, _ = run(lm, task)
        metrics = [key for key in want if key.endswith(",none") and "stderr" not in key]
        assert metrics and all(found[name][key] == pytest.approx(want[key]) for key in metrics)
    off, _ = run(RetroLM.from_folder(str(folder), neighbours=0), made["articles"])
    assert off["bits_per_byte,none"] > found["articles"]["bits_per_byte,none"]
    control, _ = run(RetroLM.from_folder(str(folder), neighbours=1, random=True), made["articles"])
    assert control["bits_per_byte,none"] > found["articles"]["bits_per_byte,none"]
    assert "words" in capsys.readouterr().out


def test_what_the_command_hands_over():
    given = ["run", "--tasks", "wikitext", "piqa", "--limit", "3"]
    assert hand_over(given) == [*given, "--model", "retro"]
    for same in (["--tasks", "wikitext", "--model", "hf"], ["ls", "tasks"]):
        assert hand_over(same) == same


def test_arguments_of_a_folder_are_checked(tmp_path):
    folder = str(folders.retro(tmp_path))
    refused("neighbours: expected a whole number from 0; got -1", RetroLM.from_folder, folder, neighbours=-1)
    refused("batch_size: expected a number; got 'auto'", RetroLM.from_folder, folder, batch_size="auto")


def test_a_decoder_with_a_library_by_its_own_attention(tmp_path):
    """Last words and answers with neighbours, without, with random ones, and with passages."""
    pytest.importorskip("transformers")
    decoder, texts = tmp_path / "decoder", tmp_path / "texts"
    for folder, fill in ((decoder, folders.decoder), (texts, folders.text_files)):
        folder.mkdir()
        fill(folder)
    sizes = Sizes(chunk_len=M, window=32, stride=16, dim=64, held_out=2, held_bytes=100)
    folder = tmp_path / "out"
    retrofit.run(decoder, folder, sizes, steps=0, folder_of_texts=texts)
    words = on(LAST_WORDS, lines(tmp_path, "words", [{"text": "The captain lost the rope near the old harbour town."}]))
    found = {}
    for name, options in {"on": {}, "off": {"neighbours": 0}, "random": {"random": True}}.items():
        [sample] = run(RetroLM.from_folder(str(folder), **options), words)[1]
        found[name] = sample["resps"][0][0][0]  # log-likelihood of the last word
    assert len(set(found.values())) == 3, found
    rows = [{"question": "who?", "answer": "x", "passages": [{"title": "Rope", "text": TEXTS[0]}]}]
    questions = on(QUESTIONS, lines(tmp_path, "questions", rows))
    results, samples = run(RetroLM.from_folder(str(folder), passages=True), questions)
    assert results["exact_match,none"] == 0 and isinstance(samples[0]["resps"][0][0], str)
