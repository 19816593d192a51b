// A scrolling list of rows of one height that keeps only the rows in sight in the document, made of plain elements so
// that scrolling builds nothing but the rows that came into sight.

const MARGIN = 12;
const TALLEST = 15_000_000; // browsers draw nothing below some 33 million pixels, others below half of that

export class Viewport {
  // `build(row)` returns the element of a row.
  constructor(scroller, rowHeight, build) {
    this.scroller = scroller;
    this.rowHeight = rowHeight;
    this.build = build;
    this.count = 0;
    this.rows = new Map();
    this.canvas = document.createElement("div");
    this.canvas.className = "viewport-rows";
    scroller.append(this.canvas);
    this.onScroll = () => this.draw();
    scroller.addEventListener("scroll", this.onScroll, {passive: true});
    this.observer = new ResizeObserver(() => this.draw());
    this.observer.observe(scroller);
  }

  close() {
    this.scroller.removeEventListener("scroll", this.onScroll);
    this.observer.disconnect();
    this.canvas.remove();
  }

  setCount(count) {
    if (count === this.count) return;
    this.count = count;
    this.canvas.style.height = `${Math.min(TALLEST, count * this.rowHeight)}px`;
    this.draw();
  }

  // How far the list is drawn above its place, since it would be taller than browsers can scroll.
  get #shift() {
    const whole = this.count * this.rowHeight;
    if (whole <= TALLEST) return 0;
    const seen = this.scroller.clientHeight;
    const share = Math.min(1, this.scroller.scrollTop / Math.max(1, TALLEST - seen));
    return share * (whole - TALLEST);
  }

  get first() {
    return Math.floor((this.scroller.scrollTop + this.#shift) / this.rowHeight);
  }

  get visible() {
    return Math.ceil(this.scroller.clientHeight / this.rowHeight);
  }

  draw() {
    const first = Math.max(0, this.first - MARGIN);
    const end = Math.min(this.count, this.first + this.visible + MARGIN);
    const shift = this.#shift;
    for (const [index, row] of this.rows) {
      if (index < first || index >= end) {
        row.remove();
        this.rows.delete(index);
      }
    }
    const fresh = document.createDocumentFragment();
    for (let index = first; index < end; index += 1) {
      let row = this.rows.get(index);
      if (!row) {
        row = this.build(index);
        this.rows.set(index, row);
        fresh.append(row);
      }
      const top = `${index * this.rowHeight - shift}px`;
      if (row.style.top !== top) row.style.top = top;
    }
    this.canvas.append(fresh);
  }

  // Builds the rows in sight anew, or one of them.
  redraw(index = null) {
    for (const [at, row] of this.rows) {
      if (index === null || at === index) {
        row.remove();
        this.rows.delete(at);
      }
    }
    this.draw();
  }

  // Scrolls until the row is in sight, in the middle if it was not.
  reveal(index) {
    const first = this.first;
    if (index < first + 1 || index >= first + this.visible - 2) this.scrollTo(index - Math.floor(this.visible / 2));
    const row = this.rows.get(index)?.getBoundingClientRect();
    if (row && (row.top < 0 || row.bottom > innerHeight)) this.scroller.scrollIntoView({block: "nearest"});
  }

  scrollTo(index) {
    const whole = this.count * this.rowHeight;
    const seen = this.scroller.clientHeight;
    const wanted = Math.max(0, Math.min(index * this.rowHeight, whole - seen));
    const tall = Math.min(TALLEST, whole);
    this.scroller.scrollTop = whole <= TALLEST ? wanted : (wanted / Math.max(1, whole - seen)) * (tall - seen);
    this.draw();
  }
}
