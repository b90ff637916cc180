"use strict";
(() => {
  const all = (selector, root = document) => [...root.querySelectorAll(selector)];
  const tip = document.getElementById("tip");
  const search = document.getElementById("search");

  // Tips: hovering, or the arrow keys while a chart has the focus.
  let current = null;
  const show = (mark) => {
    current = mark;
    tip.textContent = mark.dataset.tip;
    tip.hidden = false;
    const at = mark.getBoundingClientRect(), size = tip.getBoundingClientRect();
    const left = at.left + at.width / 2 - size.width / 2;
    const above = at.top - size.height - 8;
    tip.style.left = Math.max(8, Math.min(left, innerWidth - size.width - 8)) + "px";
    tip.style.top = (above > 8 ? above : Math.min(at.bottom + 8, innerHeight - size.height - 8)) + "px";
  };
  const hide = () => { tip.hidden = true; };
  const find = (name) => {
    search.value = name;
    filter();
    document.getElementById("table").scrollIntoView();
  };
  for (const chart of all(".chart")) {
    const marks = all("[data-tip]", chart);
    let at = -1;
    const select = (i) => {
      marks.forEach((mark) => mark.classList.remove("on"));
      at = i;
      if (at < 0) { hide(); return; }
      marks[at].classList.add("on");
      show(marks[at]);
    };
    chart.addEventListener("pointerover", (event) => {
      const mark = event.target.closest("[data-tip]");
      if (mark) show(mark); else hide();
    });
    chart.addEventListener("pointerleave", hide);
    chart.addEventListener("blur", () => select(-1));
    chart.addEventListener("click", (event) => {
      const mark = event.target.closest("[data-name]");
      if (mark && chart.classList.contains("treemap")) find(mark.dataset.name);
    });
    chart.addEventListener("keydown", (event) => {
      const n = marks.length, steps = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 };
      if (!n || event.altKey || event.ctrlKey || event.metaKey) return;
      if (event.key in steps) select(at < 0 && steps[event.key] < 0 ? n - 1 : (at + steps[event.key] + n) % n);
      else if (event.key === "Home") select(0);
      else if (event.key === "End") select(n - 1);
      else if (event.key === "Escape") select(-1);
      else if (event.key === "Enter" && at >= 0 && marks[at].dataset.name) { find(marks[at].dataset.name); search.focus(); }
      else return;
      event.preventDefault();
    });
  }
  addEventListener("scroll", () => {
    if (tip.hidden) return;
    if (current.classList.contains("on")) show(current); else hide(); // a mark chosen by keys keeps its tip
  }, { passive: true });

  // The table: search by words, sort by any column.
  const table = document.getElementById("parameters"), body = table.tBodies[0], rows = [...body.rows];
  const shown = document.getElementById("shown");
  const filter = () => {
    const words = search.value.toLowerCase().split(/\s+/).filter(Boolean);
    let count = 0;
    for (const row of rows) {
      row.hidden = !words.every((word) => row.dataset.find.includes(word));
      count += !row.hidden;
    }
    shown.value = count === rows.length ? `${rows.length} parameters` : `${count} of ${rows.length} parameters`;
  };
  search.addEventListener("input", filter);
  const value = (row, i) => {
    const cell = row.cells[i];
    if (!("v" in cell.dataset)) return cell.textContent;
    return cell.dataset.v === "" ? null : Number(cell.dataset.v);
  };
  const compare = (a, b) => (typeof a === "string" ? a.localeCompare(b, "en", { numeric: true }) : a - b);
  for (const button of all("th button", table)) {
    button.addEventListener("click", () => {
      const head = button.closest("th"), i = head.cellIndex, before = head.getAttribute("aria-sort");
      const up = before ? before === "descending" : value(rows[0], i) === null || typeof value(rows[0], i) === "string";
      all("th", table.tHead).forEach((th) => th.removeAttribute("aria-sort"));
      head.setAttribute("aria-sort", up ? "ascending" : "descending");
      rows.sort((one, two) => {
        const a = value(one, i), b = value(two, i);
        if (a === null || b === null) return (a === null) - (b === null); // what is not there comes last
        return (up ? 1 : -1) * compare(a, b) || one.dataset.i - two.dataset.i;
      });
      body.append(...rows);
    });
  }
  document.getElementById("csv").addEventListener("click", () => {
    const quote = (text) => `"${text.replaceAll('"', '""')}"`;
    const head = [...table.tHead.rows[0].cells].map((cell) => quote(cell.textContent.trim()));
    const lines = rows.filter((row) => !row.hidden).map((row) => [...row.cells].map((cell) => cell.dataset.v ?? quote(cell.textContent)));
    const link = document.createElement("a");
    link.href = URL.createObjectURL(new Blob([[head, ...lines].map((line) => line.join(",")).join("\n") + "\n"], { type: "text/csv" }));
    link.download = "fisher.csv";
    link.click();
    URL.revokeObjectURL(link.href);
  });
  filter();

  // Light and dark: the system's choice until the reader makes one.
  document.getElementById("theme").addEventListener("click", () => {
    const root = document.documentElement, dark = matchMedia("(prefers-color-scheme: dark)").matches;
    const now = root.dataset.theme ?? (dark ? "dark" : "light");
    root.dataset.theme = now === "dark" ? "light" : "dark";
  });
})();
