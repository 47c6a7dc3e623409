"use strict";
/* Sorting and filtering of tables. Without this script the page shows everything, in its own order. */
(() => {
  const words = new Intl.Collator("en", { numeric: true, sensitivity: "base" });

  const valueOf = (row, place, isNumber) => {
    const cell = row.cells[place];
    if (!isNumber) return cell.textContent.trim();
    return cell.dataset.number === "" ? null : Number(cell.dataset.number);
  };

  const compare = (one, other, isNumber) => isNumber ? one - other : words.compare(one, other);

  function sort(table, header, place) {
    const isNumber = header.classList.contains("number");
    const rising = header.getAttribute("aria-sort") !== "ascending";
    for (const other of table.tHead.rows[0].cells) other.removeAttribute("aria-sort");
    header.setAttribute("aria-sort", rising ? "ascending" : "descending");
    const body = table.tBodies[0];
    const rows = [...body.rows].map((row, index) => ({ row, index, value: valueOf(row, place, isNumber) }));
    rows.sort((one, other) => {
      if (one.value === null || other.value === null) return (one.value === null) - (other.value === null);
      return (rising ? 1 : -1) * compare(one.value, other.value, isNumber) || one.index - other.index;
    });
    body.append(...rows.map((each) => each.row));
  }

  function makeSortable(table) {
    [...table.tHead.rows[0].cells].forEach((header, place) => {
      const button = document.createElement("button");
      button.type = "button";
      button.textContent = header.textContent;
      button.addEventListener("click", () => sort(table, header, place));
      header.replaceChildren(button);
    });
  }

  function makeFilterable(box, table) {
    const filters = box.querySelector(".filters");
    if (!filters) return;
    const search = filters.querySelector("[data-search]");
    const selects = [...filters.querySelectorAll("select")];
    const titles = [...table.tHead.rows[0].cells].map((cell) => cell.dataset.title);
    const count = filters.querySelector(".count");
    const update = () => {
      const sought = search.value.trim().toLowerCase().split(/\s+/);
      let shown = 0;
      for (const row of table.tBodies[0].rows) {
        const text = [...row.cells].map((cell) => cell.textContent).join(" ").toLowerCase();
        const fits = sought.every((word) => text.includes(word)) && selects.every((select) =>
          select.selectedIndex === 0 || row.cells[titles.indexOf(select.dataset.column)].textContent === select.value);
        row.hidden = !fits;
        shown += fits;
      }
      count.textContent = `${shown} of ${table.tBodies[0].rows.length} rows`;
    };
    search.addEventListener("input", update);
    for (const select of selects) select.addEventListener("change", update);
    filters.hidden = false;
    update();
  }

  for (const box of document.querySelectorAll("[data-table]")) {
    const table = box.querySelector("table");
    makeSortable(table);
    makeFilterable(box, table);
  }

  let opened = [];
  addEventListener("beforeprint", () => {
    opened = [...document.querySelectorAll("details:not([open])")];
    for (const each of opened) each.open = true;
  });
  addEventListener("afterprint", () => {
    for (const each of opened) each.open = false;
  });
})();
