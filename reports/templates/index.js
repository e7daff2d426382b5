(function () {
  "use strict";
  const root = document.documentElement;
  const body = document.querySelector("#runs tbody");
  const rows = Array.from(body.rows);
  const search = document.getElementById("search");
  const found = document.getElementById("found");

  // A row is shown if it has every word that is searched for.
  function filter() {
    const words = search.value.toLowerCase().split(/\s+/).filter(Boolean);
    let count = 0;
    for (const row of rows) {
      const text = row.textContent.toLowerCase();
      row.hidden = !words.every((word) => text.includes(word));
      if (!row.hidden) count += 1;
    }
    found.textContent = words.length ? count + " of " + rows.length + " shown" : rows.length + " in all";
  }

  function key(row, column) {
    const cell = row.cells[column];
    const number = cell.dataset.number;
    return number === undefined ? cell.textContent.trim().toLowerCase() : Number(number);
  }

  function sort(head) {
    const column = head.cellIndex;
    // Dates and counts begin with the greatest, words with the first.
    const begins = head.classList.contains("number") || head.dataset.newest !== undefined ? "descending" : "ascending";
    const other = begins === "ascending" ? "descending" : "ascending";
    const order = head.getAttribute("aria-sort") === begins ? other : begins;
    for (const each of head.parentNode.cells) each.removeAttribute("aria-sort");
    head.setAttribute("aria-sort", order);
    const sign = order === "ascending" ? 1 : -1;
    rows.sort((a, b) => {
      const one = key(a, column);
      const another = key(b, column);
      return one < another ? -sign : one > another ? sign : 0;
    });
    body.append(...rows);
  }

  document.querySelectorAll("#runs th button").forEach((button) => {
    button.addEventListener("click", () => sort(button.parentNode));
  });
  search.addEventListener("input", filter);

  const button = document.getElementById("theme");
  function name() {
    button.textContent = root.dataset.theme === "dark" ? "light" : "dark";
  }
  button.addEventListener("click", () => {
    root.dataset.theme = root.dataset.theme === "dark" ? "light" : "dark";
    try { localStorage.setItem("report-theme", root.dataset.theme); } catch (error) { /* a page may be barred from storage */ }
    name();
  });
  name();
  filter();
})();
