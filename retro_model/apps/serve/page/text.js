// The text as coloured words, and moving through it by mouse, touch and keyboard.

import { $, make } from "./dom.js";

const STEPS = [0.3, 0.8, 1.6, 3.0, 5.0]; // bits from which a word has the next shade

/** The class of a word's shade: h1 to h5 where retrieval helped, o1 to o5 where it hurt. */
export function shade(gain) {
  const level = STEPS.filter((step) => Math.abs(gain) >= step).length;
  return level ? `${gain > 0 ? "h" : "o"}${level}` : "";
}

/** Draws a reading; words without text (the beginning of a document) are left out of the way. */
export function draw(reading) {
  const from = reading.prompt_tokens ?? 0;
  const words = reading.texts.map((text, i) => {
    const gain = reading.gain[i];
    const classes = ["t", reading.blank[i] ? "" : shade(gain), from && i >= from ? "written" : ""];
    return make("span", { className: classes.filter(Boolean).join(" "), data: { i } }, text);
  });
  $("text").replaceChildren(...words);
}

/** The word in which most was gained, to begin with; one with a source where there is any. */
export function best(reading) {
  const worth = reading.texts.map((text, i) => {
    if (reading.blank[i]) return -Infinity;
    const gain = reading.gain[i] * Math.min(1, text.trim().length / 5); // a longer word says more than a bracket
    return reading.sources[i] || reading.memories ? gain : gain - 100;
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

/** Where a key leads from the chosen word; null for keys that lead nowhere. Blank words are passed over. */
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

/** Marks the chosen word and its chunk; what was recalled in the text itself is marked too. */
export function mark(state, places = []) {
  const box = $("text");
  for (const word of box.querySelectorAll(".chosen, .chunk, .recalled")) word.classList.remove("chosen", "chunk", "recalled");
  const m = state.reading.chunk_len;
  const chunk = Math.floor(state.chosen / m);
  if (!state.reading.memories) for (let i = chunk * m; i < (chunk + 1) * m; i++) {
    if (!state.reading.blank[i]) box.children[i]?.classList.add("chunk");
  }
  box.children[state.chosen]?.classList.add("chosen");
  for (const i of places) box.children[i]?.classList.add("recalled");
}

/** Brings a word into view inside the text's own box; the page itself stays where it is. */
export function reveal(i) {
  const box = $("text");
  const word = box.children[i]?.getBoundingClientRect();
  const frame = box.getBoundingClientRect();
  if (!word || (word.top >= frame.top && word.bottom <= frame.bottom)) return;
  box.scrollTop += word.top - frame.top - frame.height / 3;
}
