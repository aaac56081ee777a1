// Neighbours as cards, with the source of the chosen word marked, and the line between word and source.

import { $, bits, make, visible } from "./dom.js";
import { reveal } from "./text.js";

/** Draws the cards of the chosen word's chunk; forget(card) is called from their buttons. */
export function drawCards(state, say, forget) {
  const { reading, chosen } = state;
  const m = reading.chunk_len;
  const chunk = Math.floor(chosen / m);
  const cards = (state.retrieval && chunk > 0 && reading.cards[chunk - 1]) || [];
  const before = chunk > 0 ? reading.texts.slice((chunk - 1) * m, chunk * m).join("").trim() : "";
  $("question").replaceChildren(...(cards.length ? say.question(make("q", {}, short(before))) : [say.none]));
  const runs = runsOf(reading, chunk);
  $("cards").replaceChildren(...cards.map((card, j) => drawCard(card, j, runs, reading.sources[chosen], state, forget)));
  $("gain").replaceChildren(...gainOf(state, cards));
}

function short(text) {
  const line = text.replace(/\s+/g, " ");
  return line.length > 70 ? `…${line.slice(-70)}` : line;
}

/** The gain of the chosen word as a sentence, over random passages or, without that control, over no retrieval. */
export function gainOf({ reading, chosen }, cards) {
  const gain = reading.gain[chosen];
  const word = make("code", {}, visible(reading.texts[chosen]) || "the beginning");
  if (reading.blank[chosen]) return [word, " is white space: not coloured."];
  const factor = 2 ** Math.abs(gain);
  const times = factor >= 1.25 ? `, ${factor >= 10 ? Math.round(factor) : factor.toFixed(1)} times as likely` : "";
  const source = reading.sources[chosen];
  const where = source && cards[source[0]] ? ` It stands ${cards[source[0]].line ? "in " : ""}${cards[source[0]].name}.` : "";
  const than = reading.controlled ? "random passages" : "none";
  const how = gain >= 0 ? `${bits(gain)} gained over ${than}${times}.` : `${bits(gain)}: less likely than with ${than}.`;
  return [word, ` ${how}${where}`];
}

/** Tokens of the cards that are sources of words of this chunk: card -> set of token numbers. */
function runsOf(reading, chunk) {
  const runs = new Map();
  const m = reading.chunk_len;
  for (let i = chunk * m; i < Math.min((chunk + 1) * m, reading.texts.length); i++) {
    const source = reading.sources[i];
    if (!source) continue;
    if (!runs.has(source[0])) runs.set(source[0], new Set());
    runs.get(source[0]).add(source[1]);
  }
  return runs;
}

function drawCard(card, j, runs, source, state, forget) {
  const here = runs.get(j) ?? new Set();
  const words = card.texts.map((text, t) => {
    const classes = [t < card.found ? "found-part" : "next-part", here.has(t) ? "shared" : ""];
    const blank = !text.trim();
    if (!blank && source && source[0] === j && t >= source[2] && t < source[3]) classes.push("run");
    if (source && source[0] === j && t === source[1]) classes.push("hit");
    return make("span", { className: classes.filter(Boolean).join(" ") }, text);
  });
  const title = make("h3", {}, make("span", { className: "file" }, card.name), make("span", { className: "dim" }, card.line ? `line ${card.line}` : ""));
  const score = `${Math.round(card.score * 100)}% alike`;
  const label = { "aria-label": `Forget ${card.name}` };
  const tools = [
    make("span", { className: "score", title: "similarity of the passage and the text before" }, score),
    make("button", { type: "button", className: "quiet", onclick: () => forget(card), attributes: label }, "forget this document"),
  ];
  const classes = `card${source && source[0] === j ? " lit" : ""}`;
  return make("article", { className: classes }, title, make("pre", {}, ...words), make("footer", {}, ...tools));
}

/** Draws the line from the chosen word to its source, if both are visible side by side. */
export function drawLink(state) {
  const path = $("link").firstElementChild;
  const word = $("text").children[state.chosen];
  const hit = document.querySelector("#cards .hit");
  path.setAttribute("d", "");
  if (!word || !hit || matchMedia("(max-width: 60rem)").matches) return;
  const from = word.getBoundingClientRect();
  const to = hit.getBoundingClientRect();
  const box = $("text").getBoundingClientRect();
  if (from.bottom < box.top || from.top > box.bottom || to.top > innerHeight) return;
  const [x1, y1, x2, y2] = [from.right, from.top + from.height / 2, to.left, to.top + to.height / 2];
  const bend = Math.max(40, (x2 - x1) / 2);
  path.setAttribute("d", `M${x1},${y1} C${x1 + bend},${y1} ${x2 - bend},${y2} ${x2},${y2}`);
}
