// Small helpers. Text from documents only ever becomes text nodes: nothing here parses HTML.

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

/** Asks the server; raises an Error with its words where it refuses. */
export async function ask(name, what) {
  const options = what === undefined ? {} : {
    method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(what),
  };
  const response = await fetch(`/api/${name}`, options);
  const found = await response.json().catch(() => ({ error: `the server answered ${response.status}` }));
  if (!response.ok) throw new Error(found.error ?? `the server answered ${response.status}`);
  return found;
}

export const bits = (value) => `${value >= 0 ? "+" : "−"}${Math.abs(value).toFixed(1)} bits`;

/** Spaces and line ends that can be seen. */
export const visible = (text) => text.replaceAll("\n", "↵").replaceAll("\t", "⇥").replaceAll(" ", "␣");
