"use strict";
// Sort by a column, filter by words, and light up the same measurement in tables and pictures.
const value = (cell) => { const text = cell.dataset.value; const number = parseFloat(text); return text === "" ? null : isNaN(number) ? text : number; };
for (const table of document.querySelectorAll("table.sortable")) {
  const heads = [...table.tHead.rows[0].cells];
  heads.forEach((head, column) => head.querySelector("button").addEventListener("click", () => {
    const down = head.getAttribute("aria-sort") === "ascending";
    heads.forEach((other) => other.removeAttribute("aria-sort"));
    head.setAttribute("aria-sort", down ? "descending" : "ascending");
    const rows = [...table.tBodies[0].rows];
    rows.sort((a, b) => {
      const [x, y] = [value(a.cells[column]), value(b.cells[column])];
      if (x === null || y === null) return (x === null) - (y === null);  // missing values stay last
      return (x < y ? -1 : x > y ? 1 : 0) * (down ? -1 : 1);
    });
    table.tBodies[0].append(...rows);
  }));
}
for (const box of document.querySelectorAll("input[type=search]")) {
  const table = document.getElementById(box.dataset.table), count = document.getElementById(box.dataset.table + "-count");
  box.addEventListener("input", () => {
    const words = box.value.toLowerCase().split(/\s+/).filter(Boolean);
    let shown = 0;
    for (const row of table.tBodies[0].rows) {
      const text = row.textContent.toLowerCase();
      row.hidden = !words.every((word) => word.startsWith("-") ? !text.includes(word.slice(1)) : text.includes(word));
      shown += !row.hidden;
    }
    count.textContent = shown + " of " + table.tBodies[0].rows.length;
  });
}
const light = (id) => {
  for (const svg of document.querySelectorAll("svg")) svg.classList.toggle("dimmed", id !== null && svg.querySelector(`[data-id="${CSS.escape(id)}"]`) !== null);
  for (const part of document.querySelectorAll("[data-id]")) part.classList.toggle("lit", part.dataset.id === id);
};
document.addEventListener("mouseover", (event) => { const part = event.target.closest("[data-id]"); light(part ? part.dataset.id : null); });
document.addEventListener("focusin", (event) => { const part = event.target.closest("tr[data-id]"); light(part ? part.dataset.id : null); });
