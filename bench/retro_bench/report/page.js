"use strict";
// Sort by a column, and filter by words.
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
