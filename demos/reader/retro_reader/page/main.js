// The state of the page, what changes it, and what is drawn from it.

import { Answers } from "./answers.js";
import { drawCards, drawLink } from "./cards.js";
import { $, ask, make, textOf } from "./dom.js";
import { drawChanged, drawDocuments, drawHistory } from "./library.js";
import { best, draw, listen, mark, reveal } from "./text.js";
import { words } from "./words.js";

const state = { about: null, reading: null, chosen: 0, pinned: false, retrieval: true, mode: "read", history: [], before: null, last: null };
let say = null;
let turn = 0; // number of the last request: answers to earlier ones are dropped
let asking = null; // the running request: a later one aborts it, on the server too

async function start() {
  state.about = await ask("about");
  say = words(state.about);
  const { about } = state;
  document.title = about.title;
  $("title").textContent = about.title;
  $("facts").textContent = `${(about.weights / 1e6).toFixed(about.weights < 1e7 ? 2 : 0)} million weights. ${about.facts.summary ?? about.facts.verdict ?? ""}`;
  $("switch-name").textContent = say.switchName;
  $("found-title").textContent = say.looked;
  $("legend-helps").textContent = say.told;
  $("k").value = about.neighbours;
  $("k").max = about.most_neighbours;
  $("on-name").textContent = say.on;
  $("off-name").textContent = say.off;
  $("off-name").title = about.without;
  $("random-name").textContent = say.random ?? "";
  $("limits").textContent = `At most ${kilobytes(about.limits.file)} a file, ${kilobytes(about.limits.added)} in all; nothing on disk changes.`;
  $("prompt-limits").textContent = `At most ${about.limits.text.toLocaleString("en")} characters; the first ${about.window} tokens are read.`;
  $("ask-tab").hidden = !about.asks;
  $("passage").replaceChildren(...about.passages.map(({ id, name, line }) => make("option", { value: id }, `${name}, from line ${line}`)));
  $("passage").value = about.start;
  $("library").hidden = false;
  drawChanged(about.library, remember, forget);
  $("read-tab").hidden = !about.passages.length;
  if (about.passages.length) return refresh({ choose: true });
  busy(null);
  document.querySelector(`input[name=mode][value=${about.asks ? "ask" : "write"}]`).click();
}

const kilobytes = (bytes) => (bytes >= 1 << 20 ? `${bytes / (1 << 20)} MB` : `${bytes / 1024} KB`);

/** Per cent of the bits that retrieval saves, compared with random passages or, without that control, with none. */
const shareOf = ({ on, off, random }) => Math.round(100 * (1 - on / (random ?? off)));

function asked() {
  const text = state.mode === "read" ? { passage: Number($("passage").value) } : { text: $("prompt").value };
  return { ...text, k: Number($("k").value), retrieval: state.retrieval };
}

/** Requests a reading and draws everything. choose: choose the word that gained most. */
async function refresh({ choose = false, write = false, label = null } = {}) {
  const mine = ++turn;
  asking?.abort();
  asking = new AbortController();
  busy(write ? "Writing" : "Reading");
  $("error").hidden = true;
  try {
    const more = write ? { temperature: Number($("temperature").value), new_tokens: 96, seed: Math.floor(Math.random() * 1e6) } : {};
    const what = !write && state.last && state.mode !== "read" ? { ...asked(), text: state.last } : { ...asked(), ...more };
    const found = await ask(write ? "write" : "read", what, { signal: asking.signal, place: (n, seconds) => mine === turn && busy(write ? "Writing" : "Reading", n, seconds) });
    if (mine !== turn) return;
    const before = state.reading?.bits_per_byte?.on;
    if (write) state.last = found.texts.join("");
    else if (state.mode !== "read") found.bits_per_byte = null; // the model's own words: their cost says nothing
    state.reading = found;
    for (const part of ["story-box", "meter", "reading"]) $(part).hidden = false;
    if (label && before !== undefined && found.bits_per_byte) {
      state.history.push({ label, before, after: found.bits_per_byte.on });
      state.before = before;
    } else state.before = null;
    if (choose || state.chosen >= found.texts.length) state.chosen = best(found);
    if (choose) state.pinned = false;
    drawAll(found, write);
    if (choose) reveal(state.chosen);
  } catch (error) {
    if (mine === turn) fail(error);
  } finally {
    if (mine === turn) busy(null);
  }
}

/** Shows the running request and the number of requests before it. verb: null: none is running. */
function busy(verb, place = 0, seconds = 0) {
  document.body.classList.toggle("busy", verb !== null);
  $("busy").hidden = verb === null;
  if (verb) $("busy").textContent = place ? `${place} before you, about ${seconds} s…` : `${verb}…`;
}

function fail(error) {
  $("error").textContent = error.message;
  $("error").hidden = false;
}

function drawAll(found, written) {
  draw(found);
  const passage = state.about.passages.find(({ id }) => id === Number($("passage").value));
  const titles = { read: `${passage?.name}, from line ${passage?.line}`, write: "Your prompt, and its continuation" };
  $("paper-title").textContent = titles[state.mode];
  if (written) {
    $("plain").textContent = found.plain;
    $("plain-title").textContent = `${state.about.without}, it writes`;
  }
  $("plain-box").hidden = state.mode === "read" || !$("plain").textContent;
  drawStory(found.chunk_len);
  drawMeter(found);
  drawDocuments(state, forget);
  drawHistory(state.history);
  drawChosen();
}

function drawStory(m) {
  $("story").replaceChildren(...say.story(m).map(([strong, rest]) => make("li", {}, make("b", {}, strong), ` ${rest}`)));
}

/** Draws the bars, a mark at the cost before the last change, and the outcome in a sentence. */
function drawMeter(found) {
  const costs = found.bits_per_byte;
  $("bars").hidden = !costs;
  if (!costs) {
    $("verdict").replaceChildren("It wrote these words itself, so their cost says nothing. The colours show which of them the library made likelier.");
    return;
  }
  const full = Math.max(...Object.values(costs), state.before ?? 0) || 1;
  $("random-row").hidden = costs.random === undefined;
  for (const [name, value] of Object.entries(costs)) {
    $(`${name}-bar`).style.width = `${(100 * value) / full}%`;
    $(`${name}-value`).textContent = `${value.toFixed(2)} bits per byte`;
  }
  $("before").hidden = state.before === null;
  $("before").style.left = `${(100 * (state.before ?? 0)) / full}%`;
  const share = shareOf(costs);
  const than = costs.random === undefined ? "" : ", compared with random passages";
  const helped = !state.retrieval ? "The switch is off: the model is alone." : share >= 0
    ? `${say.does} saves ${share}% of this text's bits${than}.`
    : `${say.does} costs ${-share}% more bits${than}.`;
  const last = state.before === null ? null : state.history.at(-1);
  const change = last ? last.after - last.before : 0;
  const way = change > 0.0005 ? "the cost rises" : change < -0.0005 ? "the cost falls" : "the cost stays";
  $("verdict").replaceChildren(helped, ...(last ? [" ", make("b", { className: change > 0.0005 ? "rose" : "fell" }, `${last.label}: ${way} from ${last.before.toFixed(2)} to ${last.after.toFixed(2)} bits per byte.`)] : []));
}

function drawChosen(tell = false) {
  mark(state);
  drawCards(state, say, forget);
  requestAnimationFrame(() => drawLink(state));
  if (tell) $("said").textContent = $("gain").textContent;
}

function choose(i, pinned, byKey = false) {
  state.chosen = i;
  state.pinned = pinned;
  document.body.classList.toggle("pinned", pinned);
  if (byKey) reveal(i);
  drawChosen(byKey);
}

async function change(verb, what, label) {
  try {
    busy("Changing the library");
    const { library } = await ask(verb, what, { place: (n, seconds) => busy("Changing the library", n, seconds) });
    state.about.library = library;
    drawChanged(library, remember, forget);
    if (state.mode === "ask" || !state.reading) busy(null);
    else await refresh({ label });
  } catch (error) {
    busy(null);
    fail(error);
  }
}

const forget = (entry) => change("forget", { document: entry.document }, `Forgot ${entry.name}`);
const remember = (entry) => change("remember", { document: entry.document }, `Remembered ${entry.name}`);

async function addFile(file) {
  const most = state.about.limits.file;
  if (file.size > most) return fail(new Error(`${file.name}: expected a file of at most ${kilobytes(most)}; got ${kilobytes(Math.ceil(file.size / 1024) * 1024)}`));
  const text = await textOf(file).catch(fail);
  if (text !== undefined) await change("add", { name: file.name, text }, `Added ${file.name}`);
}

const answers = new Answers({ busy, fail, asked: () => ({ text: $("prompt").value, k: Number($("k").value), retrieval: state.retrieval, least: Number($("least").value) }) });

function setMode(mode) {
  state.mode = mode;
  state.last = null;
  asking?.abort();
  answers.clear();
  $("error").hidden = true;
  for (const part of ["story-box", "meter", "reading"]) $(part).hidden = mode === "ask" || !state.reading;
  for (const part of document.querySelectorAll(".asks")) part.hidden = mode !== "ask";
  $("temperature-field").hidden = mode !== "write"; // answers are greedy
  for (const part of document.querySelectorAll(".reads")) part.hidden = mode !== "read";
  for (const part of document.querySelectorAll(".writes")) part.hidden = mode === "read";
  $("prompt-name").textContent = mode === "ask" ? "Question" : "Prompt";
  $("write-on").textContent = mode === "ask" ? "Ask" : "Write on";
  if (mode === "ask") $("prompt").value = "";
  if (mode === "read") refresh({ choose: true });
  else if (mode === "ask") $("prompt").focus();
  else if (!state.reading) $("prompt").value = "";
  else {
    const words = state.reading.texts.join("");
    $("prompt").value = words.slice(0, Math.min(240, words.length));
  }
}

function connect() {
  listen(state, choose);
  $("passage").addEventListener("change", () => { state.history = []; refresh({ choose: true }); });
  $("k").addEventListener("input", () => { $("k-value").textContent = $("k").value; });
  $("k").addEventListener("change", () => state.mode !== "ask" && state.reading && refresh({ label: `${$("k").value} neighbours` }));
  $("temperature").addEventListener("input", () => { $("temperature-value").textContent = $("temperature").value; });
  $("retrieval").addEventListener("change", () => { state.retrieval = $("retrieval").checked; if (state.mode !== "ask" && state.reading) refresh(); });
  for (const tab of document.querySelectorAll("input[name=mode]")) tab.addEventListener("change", () => setMode(tab.value));
  $("knobs").addEventListener("submit", (event) => {
    event.preventDefault();
    if (state.mode === "ask") answers.ask();
    else if (state.mode !== "read") refresh({ choose: true, write: true });
  });
  $("least").addEventListener("input", () => { $("least-value").textContent = $("least").value; });
  $("prompt").addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || state.mode !== "ask") return;
    event.preventDefault();
    $("knobs").requestSubmit();
  });
  $("reset").addEventListener("click", () => change("reset", {}, "Undid all"));
  $("add-itself").addEventListener("click", () => change("add", { passage: Number($("passage").value) }, "Added this very text"));
  $("file").addEventListener("change", () => { if ($("file").files[0]) addFile($("file").files[0]); $("file").value = ""; });
  const drop = $("drop");
  for (const name of ["dragover", "dragleave", "drop"]) drop.addEventListener(name, (event) => {
    event.preventDefault();
    drop.classList.toggle("over", name === "dragover");
    if (name === "drop" && event.dataTransfer.files[0]) addFile(event.dataTransfer.files[0]);
  });
  $("theme").addEventListener("click", () => {
    const dark = getComputedStyle(document.documentElement).colorScheme.includes("dark");
    document.documentElement.dataset.theme = dark ? "light" : "dark";
  });
  for (const name of ["scroll", "resize"]) addEventListener(name, () => requestAnimationFrame(() => state.reading && drawLink(state)), { passive: true });
  $("text").addEventListener("scroll", () => requestAnimationFrame(() => state.reading && drawLink(state)), { passive: true });
}

connect();
start().catch((error) => {
  busy(null);
  fail(error);
});
