// The text as coloured words, and how mouse, touch and keyboard choose one.

import { $, make } from "./dom.js";

const STEPS = [0.3, 0.8, 1.6, 3.0, 5.0]; // least bits of each shade

/** The class of a word's shade: h1 to h5 if retrieval helped, o1 to o5 if it hurt. */
export function shade(gain) {
  const level = STEPS.filter((step) => Math.abs(gain) >= step).length;
  return level ? `${gain > 0 ? "h" : "o"}${level}` : "";
}

/** Draws a reading as one element a word. */
export function draw(reading) {
  const from = reading.prompt_tokens ?? 0;
  const words = reading.texts.map((text, i) => {
    const gain = reading.gain[i];
    const classes = ["t", reading.blank[i] ? "" : shade(gain), from && i >= from ? "written" : ""];
    return make("span", { className: classes.filter(Boolean).join(" "), data: { i } }, text);
  });
  $("text").replaceChildren(...words);
}

/** The word with the largest gain, with a source if any word has one. */
export function best(reading) {
  const worth = reading.texts.map((text, i) => {
    if (reading.blank[i]) return -Infinity;
    const gain = reading.gain[i] * Math.min(1, text.trim().length / 5); // a longer word says more than a bracket
    return reading.sources[i] ? gain : gain - 100;
  });
  return worth.indexOf(Math.max(...worth));
}

/** Calls choose(i, pinned) when a word is pointed at, clicked, or reached by the keyboard. */
export function listen(state, choose) {
  const box = $("text");
  const at = (event) => {
    const word = event.target.closest?.(".t");
    return word && box.contains(word) ? Number(word.dataset.i) : null;
  };
  box.addEventListener("pointerover", (event) => {
    const i = at(event);
    if (i !== null && !state.pinned && event.pointerType !== "touch") choose(i, false);
  });
  box.addEventListener("click", (event) => {
    const i = at(event);
    if (i !== null) choose(i, !(state.pinned && state.chosen === i));
  });
  box.addEventListener("keydown", (event) => {
    const step = move(state, event.key);
    if (event.key === "Escape") choose(state.chosen, false);
    else if (event.key === "Enter") choose(state.chosen, !state.pinned);
    else if (step !== null) choose(step, false, true);
    else return;
    event.preventDefault();
  });
}

/** The word that a key leads to from the chosen one, past blank words; null for other keys. */
function move(state, key) {
  const { reading, chosen } = state;
  const last = reading.texts.length - 1;
  const m = reading.chunk_len;
  const [start, step] = {
    ArrowRight: [chosen + 1, 1], ArrowLeft: [chosen - 1, -1], ArrowDown: [(Math.floor(chosen / m) + 1) * m, 1],
    ArrowUp: [(Math.floor(chosen / m) - 1) * m, 1], Home: [0, 1], End: [last, -1],
  }[key] ?? [null, 0];
  if (start === null) return null;
  let i = Math.min(last, Math.max(0, start));
  while (i + step >= 0 && i + step <= last && reading.blank[i]) i += step;
  return i;
}

/** Marks the chosen word and its chunk. */
export function mark(state) {
  const box = $("text");
  for (const word of box.querySelectorAll(".chosen, .chunk")) word.classList.remove("chosen", "chunk");
  const m = state.reading.chunk_len;
  const chunk = Math.floor(state.chosen / m);
  for (let i = chunk * m; i < (chunk + 1) * m; i++) {
    if (!state.reading.blank[i]) box.children[i]?.classList.add("chunk");
  }
  box.children[state.chosen]?.classList.add("chosen");
}

/** Scrolls the text's box, not the page, until a word is visible. */
export function reveal(i) {
  const box = $("text");
  const word = box.children[i]?.getBoundingClientRect();
  const frame = box.getBoundingClientRect();
  if (!word || (word.top >= frame.top && word.bottom <= frame.bottom)) return;
  box.scrollTop += word.top - frame.top - frame.height / 3;
}
