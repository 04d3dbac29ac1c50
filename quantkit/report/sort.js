// Long tables get a filter box and sortable headings. Without scripts the page is complete.
for (const table of document.querySelectorAll("table.long")) {
  const body = table.tBodies[0], rows = [...body.rows];
  const label = document.createElement("label"), input = document.createElement("input");
  label.className = "filter";
  input.type = "search";
  label.append("Show rows that contain ", input);
  table.parentElement.before(label);
  input.oninput = () => {
    const wanted = input.value.toLowerCase();
    for (const row of rows) row.hidden = !row.textContent.toLowerCase().includes(wanted);
  };
  [...table.tHead.rows[0].cells].forEach((head, column) => {
    const button = document.createElement("button");
    button.type = "button";
    button.append(...head.childNodes);
    head.append(button);
    const key = (row) => row.cells[column].dataset.sort ?? row.cells[column].textContent.trim();
    button.onclick = () => {
      const up = head.getAttribute("aria-sort") !== "ascending";
      for (const other of head.parentElement.cells) other.removeAttribute("aria-sort");
      head.setAttribute("aria-sort", up ? "ascending" : "descending");
      const order = (a, b) => key(a).localeCompare(key(b), undefined, { numeric: true });
      const byNumber = (a, b) => Number(key(a)) - Number(key(b));
      const numeric = rows.some((row) => row.cells[column].dataset.sort !== undefined);
      rows.sort((a, b) => (up ? 1 : -1) * (numeric ? byNumber(a, b) : order(a, b)));
      body.append(...rows);
    };
  });
}
