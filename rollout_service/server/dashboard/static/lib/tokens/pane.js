// Draws a trajectory's tokens into an element, line by line, and only the lines in sight. Each token is an element of its
// own with isolated direction, so no token moves another one.

import {ROW_HEIGHT} from "./sizes.js";
import {colorClass} from "./colors.js";
import {Rows} from "./layout.js";
import {fillToken} from "./shown.js";
import {Viewport} from "./viewport.js";

const UNLIKELY = -3;

const span = (className, text) => {
  const node = document.createElement("span");
  node.className = className;
  if (text !== undefined) node.textContent = text;
  return node;
};

const GUTTER = 84;
const widths = new Map();

// Return how many columns a line may have, by the width of the element and of its font.
function columnsOf(scroller) {
  const {font} = getComputedStyle(scroller);
  if (!widths.has(font)) {
    const pen = document.createElement("canvas").getContext("2d");
    pen.font = font;
    widths.set(font, pen.measureText("0".repeat(100)).width / 100 || 8);
  }
  const columns = Math.floor((scroller.clientWidth - GUTTER) / widths.get(font));
  return Math.max(40, Math.min(160, columns - 4)); // room for the marks of turns
}

// What the bar says at which a segment begins.
export function segmentTitle(outline, count) {
  const words = [`segment ${outline.index} of ${count}`, outline.fork_reason.replaceAll("_", " ")];
  if (outline.parent !== null && outline.parent !== undefined) {
    words.push(`shares ${outline.shared_prefix.toLocaleString("en")} tokens with segment ${outline.parent}`);
  }
  words.push(`${outline.tokens.toLocaleString("en")} tokens, ${outline.sampled.toLocaleString("en")} sampled`);
  if (outline.role && outline.role !== "main") words.push(outline.role);
  if (!outline.trained) words.push("not trained on");
  return words.join(" · ");
}

export class TokenPane {
  // `onPick({segment, token})` is called when a token is pointed at or chosen.
  constructor(scroller, source, onPick) {
    this.source = source;
    this.way = "mask";
    this.folded = false;
    this.hits = source.segments.map(() => null);
    this.marks = new Map();
    this.here = null;
    this.differs = null;
    this.columns = columnsOf(scroller);
    this.rows = new Rows(source, false, this.columns);
    this.resized = new ResizeObserver(() => {
      // In the next frame, since other lines may change the size that is being reported.
      cancelAnimationFrame(this.fitting);
      this.fitting = requestAnimationFrame(() => this.#fit());
    });
    this.viewport = new Viewport(scroller, ROW_HEIGHT, (row) => this.#build(row));
    this.onPick = onPick;
    this.onPointer = (event) => this.#pick(event);
    scroller.addEventListener("mouseover", this.onPointer);
    scroller.addEventListener("click", this.onPointer);
    this.scroller = scroller;
    this.viewport.setCount(this.rows.count);
    this.resized.observe(scroller);
  }

  // Lay out anew if the width allows other lines; what is at the top stays there.
  #fit() {
    const columns = columnsOf(this.scroller);
    if (columns === this.columns) return;
    this.columns = columns;
    this.#again();
  }

  #again() {
    const top = this.rows.count ? this.rows.row(Math.min(this.viewport.first, this.rows.count - 1)) : null;
    this.rows = new Rows(this.source, this.folded, this.columns);
    this.viewport.setCount(this.rows.count);
    this.viewport.redraw();
    if (top && this.viewport.first > 0) this.viewport.scrollTo(this.rowOf({segment: top.segment, token: top.first}));
  }

  close() {
    this.resized.disconnect();
    cancelAnimationFrame(this.fitting);
    this.scroller.removeEventListener("mouseover", this.onPointer);
    this.scroller.removeEventListener("click", this.onPointer);
    this.viewport.close();
  }

  // More tokens have come.
  extend() {
    const last = this.rows.count - 1;
    this.rows.extend();
    this.viewport.setCount(this.rows.count);
    this.viewport.redraw(last);
    if (this.source.segments.length > 1) this.viewport.redraw();
  }

  setWay(way) {
    this.way = way;
    this.viewport.redraw();
  }

  setFolded(folded) {
    if (folded === this.folded) return;
    this.folded = folded;
    this.#again();
  }

  // Marks tokens: [{segment, token, end}].
  setHits(matches) {
    this.hits = this.source.segments.map(() => null);
    for (const {segment, token, end} of matches) {
      this.hits[segment] ??= new Uint8Array(this.source.segments[segment].total);
      this.hits[segment].fill(1, token, end);
    }
    this.viewport.redraw();
  }

  // What became of turns: a map of turn id to {label, tone}.
  setMarks(marks) {
    this.marks = marks;
    this.viewport.redraw();
  }

  setDiffers(place) {
    this.differs = place;
    this.viewport.redraw();
  }

  rowOf(place) {
    return this.rows.rowOf(place.segment, place.token);
  }

  // Makes a token the current one; with `reveal` it is brought into sight.
  setHere(place, reveal) {
    const before = this.here;
    this.here = place;
    if (reveal && place) this.viewport.reveal(this.rowOf(place));
    if (before) this.#mark(before, false);
    if (place) this.#mark(place, true);
  }

  #mark(place, on) {
    const row = this.viewport.rows.get(this.rowOf(place));
    const node = row?.querySelector(`[data-t="${place.token}"]`);
    if (node && row.dataset.segment === String(place.segment)) node.classList.toggle("here", on);
  }

  #pick(event) {
    const token = event.target.closest?.("[data-t]");
    const row = token?.closest("[data-segment]");
    if (row) this.onPick({segment: Number(row.dataset.segment), token: Number(token.dataset.t)});
  }

  #build(index) {
    const {segment, bar, first, end} = this.rows.row(index);
    const tokens = this.source.segments[segment];
    const row = document.createElement("div");
    row.dataset.segment = String(segment);
    if (bar) {
      row.className = "segment-bar";
      row.append(span("segment-title", segmentTitle(tokens.outline, this.source.segments.length)));
      return row;
    }
    row.className = "token-line";
    const gutter = span("gutter", first.toLocaleString("en"));
    row.append(gutter);
    for (let i = first; i < end; i += 1) row.append(this.#token(tokens, segment, i));
    return row;
  }

  #token(tokens, segment, i) {
    const node = span(this.#className(tokens, segment, i));
    node.dataset.t = String(i);
    if (tokens.turns[i] >= 0 && (i === 0 || tokens.turns[i - 1] !== tokens.turns[i])) this.#beginTurn(node, tokens.turns[i]);
    // Only what is no plain ASCII can move its neighbors, and isolating every token costs a third of a frame.
    if (!fillToken(node, tokens, i)) node.classList.add("other");
    return node;
  }

  #beginTurn(node, turn) {
    node.classList.add("turn-start");
    const mark = this.marks.get(turn);
    node.dataset.turn = mark ? `${turn} ${mark.label}` : String(turn);
    if (mark) node.classList.add(`vote-${mark.tone}`);
  }

  #className(tokens, segment, i) {
    let name = `t ${colorClass(this.way, tokens, i)}`;
    if (tokens.mask[i]) {
      name += " m";
      if (tokens.logprobs[i] <= UNLIKELY) name += " unlikely";
    }
    if (i < (tokens.outline.shared_prefix ?? 0)) name += " shared";
    if (this.hits[segment]?.[i]) name += " hit";
    const {here, differs} = this;
    if (here && here.segment === segment && here.token === i) name += " here";
    if (differs && differs.segment === segment && differs.token === i) name += " differs";
    return name;
  }
}
