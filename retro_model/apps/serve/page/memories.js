// Memory Mosaics: the votes of each memory at the chosen word, and the places it recalled.

import { $, make, visible } from "./dom.js";
import { gainOf } from "./cards.js";

/** Draws a tile a memory, a row a block; show(h) marks the places of memory h in the text. */
export function drawMemories(state, say, show) {
  const { reading, chosen } = state;
  const { heads, votes, vocabulary, right } = reading.memories;
  $("gain").replaceChildren(...gainOf(state, []));
  const knew = right.filter((memory) => memory[chosen] > 0.5).length;
  const said = knew ? `${knew} of ${heads.length} memories recalled it with more than half of their weight.` : say.none;
  $("question").replaceChildren(state.retrieval ? said : "The memories are off.");
  const width = Math.max(...heads.map((head) => head.head));
  const tiles = heads.map((head, h) => {
    const top = votes[h][chosen] ?? [];
    const rows = top.map(([token, weight]) => {
      const hit = vocabulary[token] === reading.texts[chosen];
      const bar = make("i");
      bar.style.width = `${Math.round(weight * 100)}%`;
      return make("li", { className: hit ? "hit" : "" }, bar, make("code", {}, visible(vocabulary[token])));
    });
    const name = `memory ${head.block}.${head.head}`;
    const facts = { title: `${name}: decay ${head.decay}, skill ${head.skill}`, onpointerenter: () => show(h), onfocus: () => show(h), onclick: () => show(h) };
    const classes = right[h][chosen] > 0.5 ? "tile right" : "tile";
    return make("button", { type: "button", className: classes, ...facts }, make("span", { className: "dim" }, name), make("ol", {}, ...rows));
  });
  const grid = make("div", { className: "tiles" }, ...(state.retrieval ? tiles : []));
  grid.style.setProperty("--columns", width);
  $("cards").replaceChildren(grid);
}

/** The places that memory h recalled before the chosen word; h null: the heaviest of all memories. */
export function placesOf({ reading, chosen, retrieval }, h = null) {
  if (!retrieval) return [];
  const { places } = reading.memories;
  const some = h === null ? places : [places[h]];
  return [...new Set(some.flatMap((memory) => (memory[chosen] ?? []).filter(([, w]) => h !== null || w > 0.3).map(([i]) => i)))];
}
