// Questions: the passages that resemble one are shown at once, then the answer while it is written.

import { $, ask, make } from "./dom.js";

export class Answers {
  /** busy, fail: of the page; asked(): the question and its options. */
  constructor({ busy, fail, asked }) {
    Object.assign(this, { busy, fail, asked, running: null });
    $("cancel").addEventListener("click", () => this.running?.abort());
  }

  clear() {
    this.running?.abort();
    $("notes").hidden = $("answer-title").hidden = $("cancel").hidden = true;
    for (const name of ["why", "answer", "answer-how"]) $(name).textContent = "";
    $("notes-cards").replaceChildren();
  }

  async ask() {
    const what = this.asked();
    this.clear();
    const mine = (this.running = new AbortController());
    const here = () => this.running === mine && !mine.signal.aborted;
    const place = (verb) => (n, seconds) => here() && this.busy(verb, n, seconds);
    $("error").hidden = true;
    $("cancel").hidden = false;
    this.busy("Searching");
    try {
      const found = await ask("find", what, { signal: mine.signal, place: place("Searching") });
      drawPassages(found, what.retrieval);
      $("answer-title").hidden = false;
      this.busy("Writing");
      const text = (written) => { if (here()) $("answer").textContent = written; };
      const { answer } = await ask("answer", { ...what, new_tokens: 64 }, { signal: mine.signal, place: place("Writing"), text });
      $("answer").textContent = answer;
      $("answer-how").textContent = found.read ? `Written with ${found.read} of these passages in the prompt.` : "Written by the decoder alone.";
    } catch (error) {
      if (here()) this.fail(error);
      else if (this.running === mine) $("answer-how").textContent = "Cancelled.";
    } finally {
      if (this.running === mine) {
        this.busy(null);
        $("cancel").hidden = true;
      }
    }
  }
}

/** Draws the passages that were found, or the reason why none is read. */
function drawPassages({ cards, best, limit, read }, retrieval) {
  $("notes").hidden = false;
  $("notes-title").textContent = read ? "Your notes say" : "No passage is read";
  $("why").textContent = read ? "" : !retrieval ? "The library is off." : cards.length
    ? `Best match ${best.toFixed(2)}, limit ${limit.toFixed(2)}: lower "Least match" to read it.`
    : "No passage of the library shares a word with the question.";
  $("notes-cards").replaceChildren(...(read || !retrieval ? (retrieval ? cards : []) : cards.slice(0, 1)).map((card, j) => {
    const title = make("h3", {}, make("span", { className: "file" }, card.name), make("span", { className: "dim" }, `line ${card.line}, match ${card.score.toFixed(2)}`));
    return make("article", { className: j < read ? "card lit" : "card" }, title, make("pre", {}, card.texts.join("")));
  }));
}
