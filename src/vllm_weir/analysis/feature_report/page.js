// Sorts the index, and the features below in the same order.
const table = document.querySelector("#index");
const body = table.tBodies[0];
const main = document.querySelector("#features");
const sort = (button) => {
  const head = button.closest("th");
  const descending = head.getAttribute("aria-sort") !== "descending" && button.dataset.by !== "feature"
    || head.getAttribute("aria-sort") === "ascending";
  for (const other of table.querySelectorAll("th[aria-sort]")) other.removeAttribute("aria-sort");
  head.setAttribute("aria-sort", descending ? "descending" : "ascending");
  const value = (row) => Number(row.dataset[button.dataset.by]);
  const rows = [...body.rows].sort((a, b) => (descending ? value(b) - value(a) : value(a) - value(b)));
  for (const row of rows) {
    body.append(row);
    main.append(document.getElementById(`feature-${row.dataset.feature}`));
  }
};
for (const button of table.querySelectorAll("th button")) button.addEventListener("click", () => sort(button));
