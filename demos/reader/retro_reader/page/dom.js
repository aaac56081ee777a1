// Small helpers. Text from documents becomes text nodes only: nothing here parses HTML.

export const $ = (id) => document.getElementById(id);

/** An element with properties, classes and children; strings become text. */
export function make(tag, options = {}, ...children) {
  const { className, data, attributes, ...properties } = options;
  const element = Object.assign(document.createElement(tag), properties);
  if (className) element.className = className;
  for (const [name, value] of Object.entries(data ?? {})) element.dataset[name] = value;
  for (const [name, value] of Object.entries(attributes ?? {})) element.setAttribute(name, value);
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
}

/** Calls the server; throws an Error with its message if it refuses. place(n, seconds): called while others wait before. text(t): called with the answer so far. */
export async function ask(name, what, { signal, place, text } = {}) {
  if (what === undefined) return found(await fetch(`/api/${name}`, { signal }));
  const ticket = crypto.getRandomValues(new Uint32Array(4)).join("-");
  const options = { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify({ ...what, ticket }), signal };
  let answered = false; // a place that arrives after the answer is out of date
  const asking = setInterval(async () => {
    const queue = await fetch(`/api/queue?ticket=${ticket}`).then((answer) => answer.json()).catch(() => null);
    if (!answered && queue?.place !== null && queue?.place !== undefined) place?.(queue.place, queue.seconds);
    if (!answered && queue?.text) text?.(queue.text);
  }, text ? 250 : 1000);
  try {
    return await found(await fetch(`/api/${name}`, options));
  } finally {
    answered = true;
    clearInterval(asking);
  }
}

async function found(response) {
  const said = await response.json().catch(() => ({ error: `the server answered ${response.status}` }));
  if (!response.ok) throw new Error(said.error ?? `the server answered ${response.status}`);
  return said;
}

/** The text of a file: UTF-8, or the UTF-16 that its byte order mark says. Throws an Error for anything else. */
export async function textOf(file) {
  const bytes = new Uint8Array(await file.arrayBuffer());
  const marks = { "255,254": "utf-16le", "254,255": "utf-16be" };
  try {
    const text = new TextDecoder(marks[bytes.slice(0, 2).join()] ?? "utf-8", { fatal: true }).decode(bytes);
    if (!text.includes("\0") && !text.startsWith("%PDF-")) return text;
  } catch { /* bytes of another encoding */ }
  throw new Error(`${file.name}: expected text in UTF-8; got another encoding or a binary file; convert it first`);
}

export const bits = (value) => `${value >= 0 ? "+" : "−"}${Math.abs(value).toFixed(1)} bits`;

/** The text with visible spaces, tabs and line ends. */
export const visible = (text) => text.replaceAll("\n", "↵").replaceAll("\t", "⇥").replaceAll(" ", "␣");
