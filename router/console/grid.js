// A list of any length in as many elements as are visible. Arrow keys move, Enter opens a row.

const HEIGHT = 28;
let numGrids = 0;

export class Grid {
  // columns: [{ name, className, fill(cell, item) }]; get(i): an item, or undefined while unknown.
  constructor(element, label, columns, get, open) {
    Object.assign(this, { columns, get, open, total: 0, active: -1, rows: [], id: `grid${numGrids++}` });
    element.setAttribute("role", "grid");
    element.setAttribute("aria-label", label);
    this.element = element;
    const names = row("names");
    names.setAttribute("aria-rowindex", "1");
    for (const column of columns) names.append(cell("columnheader", column.className, column.name));
    this.body = document.createElement("div");
    this.body.className = "body";
    this.body.tabIndex = 0;
    this.body.setAttribute("role", "rowgroup");
    this.body.setAttribute("aria-label", `${label}: arrow keys move, Enter opens`);
    this.space = document.createElement("div");
    this.body.append(this.space);
    element.append(names, this.body);
    this.body.addEventListener("scroll", () => this.draw());
    this.body.addEventListener("keydown", (event) => this.#key(event));
    this.body.addEventListener("click", (event) => {
      const found = event.target.closest(".row");
      if (!found) return;
      this.active = Number(found.dataset.index);
      this.draw();
      this.#open();
    });
  }

  // The range of indices that are visible.
  visible() {
    const first = Math.max(0, Math.floor(this.body.scrollTop / HEIGHT));
    return [first, Math.min(this.total, first + Math.ceil(this.body.clientHeight / HEIGHT) + 1)];
  }

  setTotal(total) {
    if (total === this.total) return;
    this.total = total;
    this.active = Math.min(this.active, total - 1);
    this.space.style.height = `${total * HEIGHT}px`;
    this.element.setAttribute("aria-rowcount", String(total + 1));
  }

  draw() {
    const [first, last] = this.visible();
    while (this.rows.length < last - first) {
      const made = row("");
      made.append(...this.columns.map((column) => cell("gridcell", column.className, "")));
      this.rows.push(made);
      this.body.append(made);
    }
    for (let n = 0; n < this.rows.length; n++) {
      const made = this.rows[n], i = first + n;
      made.hidden = i >= last;
      if (made.hidden) continue;
      made.id = `${this.id}-${i}`;
      made.dataset.index = String(i);
      made.style.transform = `translateY(${i * HEIGHT}px)`;
      made.classList.toggle("active", i === this.active);
      made.setAttribute("aria-selected", String(i === this.active));
      made.setAttribute("aria-rowindex", String(i + 2));
      const item = this.get(i);
      this.columns.forEach((column, at) => {
        if (item) column.fill(made.children[at], item, i);
        else made.children[at].textContent = at ? "" : "…";
      });
    }
    if (this.active >= first && this.active < last) this.body.setAttribute("aria-activedescendant", `${this.id}-${this.active}`);
    else this.body.removeAttribute("aria-activedescendant");
  }

  #key(event) {
    const page = Math.max(1, Math.floor(this.body.clientHeight / HEIGHT) - 1);
    const by = { ArrowDown: 1, ArrowUp: -1, PageDown: page, PageUp: -page, Home: -this.total, End: this.total }[event.key];
    if (event.key === "Enter" && this.active >= 0) this.#open();
    else if (by !== undefined && this.total) {
      this.active = Math.max(0, Math.min(this.total - 1, this.active + by));
      const top = this.active * HEIGHT;
      if (top < this.body.scrollTop) this.body.scrollTop = top;
      else if (top + HEIGHT > this.body.scrollTop + this.body.clientHeight) this.body.scrollTop = top + HEIGHT - this.body.clientHeight;
      this.draw();
    } else return;
    event.preventDefault();
  }

  #open() {
    const item = this.get(this.active);
    if (item) this.open(item);
  }
}

function row(className) {
  const made = document.createElement("div");
  made.className = `row ${className}`.trim();
  made.setAttribute("role", "row");
  return made;
}

function cell(role, className, text) {
  const made = document.createElement("div");
  made.setAttribute("role", role);
  made.className = className ?? "";
  made.textContent = text;
  return made;
}
