// Documents to forget and to add, and the cost after each change.

import { $, bits, make } from "./dom.js";

/** Draws the documents that helped this text, most bits first, each with a button. */
export function drawDocuments(state, forget) {
  const most = Math.max(1e-9, ...state.reading.documents.map((entry) => entry.saved));
  const rows = state.reading.documents.slice(0, 8).map((entry) => {
    const bar = make("i");
    bar.style.width = `${Math.max(0, (entry.saved / most) * 100)}%`;
    const chunks = `${entry.chunks} chunk${entry.chunks === 1 ? "" : "s"}`;
    return make("li", {},
      make("span", { className: "file" }, entry.name), make("span", { className: "track" }, bar),
      make("span", { className: "dim" }, `${bits(entry.saved)}, ${chunks}`),
      make("button", { type: "button", onclick: () => forget(entry), attributes: { "aria-label": `Forget ${entry.name}` } }, "forget"));
  });
  $("documents").replaceChildren(...(rows.length ? rows : [make("li", { className: "dim" }, "Nothing: the library is off or empty, or no passage is similar enough.")]));
}

/** Draws the forgotten and added documents, each with a button to undo. */
export function drawChanged(library, remember, forget) {
  const entry = (what, verb, call) =>
    make("li", {}, make("span", { className: "file" }, what.name), make("button", { type: "button", className: "quiet", onclick: () => call(what) }, verb));
  $("changed").replaceChildren(
    ...library.forgotten.map((what) => entry(what, "remember", remember)), ...library.added.map((what) => entry(what, "take out", forget)));
  $("reset").hidden = !library.forgotten.length && !library.added.length;
}

/** Draws the changes so far, each with the cost after it. */
export function drawHistory(history) {
  if (!history.length) {
    $("history").replaceChildren(make("li", { className: "dim" }, "Nothing yet. Forget the first document on the left."));
    return;
  }
  $("history").replaceChildren(...history.slice(-6).map(({ label, before, after }) => {
    const change = after - before;
    const way = Math.abs(change) < 0.0005 ? "same" : change > 0 ? "rose" : "fell";
    const amount = way === "same" ? "no change" : `${change > 0 ? "▲ +" : "▼ −"}${Math.abs(change).toFixed(3)}`;
    return make("li", { className: way }, make("span", {}, label), make("b", {}, amount), make("span", { className: "dim" }, `now ${after.toFixed(3)} bits per byte`));
  }));
}
