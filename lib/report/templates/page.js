"use strict";
// Sort a table by the column whose heading is clicked; the page is complete without this script.
for (const table of document.querySelectorAll("table.sortable")) {
  const body = table.tBodies[0];
  if (body.rows.length < 2) continue;
  const heads = [...table.tHead.rows[0].cells];
  heads.forEach((head, column) => {
    const button = document.createElement("button");
    button.type = "button";
    button.append(...head.childNodes);
    head.append(button);
    button.addEventListener("click", () => {
      const up = head.getAttribute("aria-sort") !== "ascending";
      heads.forEach((other) => other.removeAttribute("aria-sort"));
      head.setAttribute("aria-sort", up ? "ascending" : "descending");
      const key = (row) => {
        const cell = row.cells[column];
        return "v" in cell.dataset ? Number(cell.dataset.v) : cell.textContent.trim();
      };
      const missing = (value) => value === "";
      const rows = [...body.rows].sort((a, b) => {
        const [x, y] = [key(a), key(b)];
        if (missing(x) || missing(y)) return missing(x) - missing(y);
        const order = typeof x === "number" && typeof y === "number"
          ? x - y : String(x).localeCompare(String(y), "en", { numeric: true });
        return up ? order : -order;
      });
      body.append(...rows);
    });
  });
}
// The runs of a number, where a pointer rests on it; a tap opens them without this script.
for (const button of document.querySelectorAll("button.source")) {
  button.addEventListener("pointerenter", () => {
    button.title = document.getElementById(button.getAttribute("popovertarget")).innerText;
  });
}
// A closed part would be missing on paper.
addEventListener("beforeprint", () => {
  for (const part of document.querySelectorAll("details")) part.open = true;
});
