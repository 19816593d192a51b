// Tokens as lines of some number of columns. A line holds whole tokens, and ends after a token with a line break, so that
// every token is in exactly one line, and the lines so far stay as they are while more tokens arrive.

import {shownWidth} from "./shown.js";

export const COLUMNS = 120;

class Numbers {
  constructor() {
    this.values = new Int32Array(1024);
    this.length = 0;
  }

  push(value) {
    if (this.length === this.values.length) {
      const wider = new Int32Array(this.length * 2);
      wider.set(this.values);
      this.values = wider;
    }
    this.values[this.length] = value;
    this.length += 1;
  }
}

// Columns that one token takes.
export function widthOf(tokens, i) {
  const piece = tokens.pieces.get(i);
  if (piece !== undefined) return piece.length + 2;
  const begin = tokens.begin(i);
  const end = tokens.ends[i];
  if (end - begin === 1) {
    const code = tokens.text.charCodeAt(begin);
    if (code >= 0x20 && code < 0x7f) return 1;
  }
  return shownWidth(tokens.text.slice(begin, end));
}

// The lines of one segment.
export class SegmentLines {
  constructor(tokens, from = 0, columns = COLUMNS) {
    this.columns = columns;
    this.tokens = tokens;
    this.from = from;
    this.starts = new Numbers();
    this.at = from;
    this.width = 0;
    this.fresh = true;
  }

  get count() {
    return this.starts.length;
  }

  // Lays out what was loaded since the last call.
  extend() {
    const {tokens} = this;
    for (; this.at < tokens.loaded; this.at += 1) {
      const width = widthOf(tokens, this.at);
      if (this.fresh || this.width + width > this.columns) {
        this.starts.push(this.at);
        this.width = 0;
        this.fresh = false;
      }
      this.width += width;
      if (this.#breaks(this.at)) this.fresh = true;
    }
  }

  #breaks(i) {
    const {tokens} = this;
    const end = tokens.ends[i];
    if (end === tokens.begin(i) || !tokens.hasText) return false;
    if (end - tokens.begin(i) === 1) return tokens.text.charCodeAt(end - 1) === 10;
    return tokens.textOf(i).includes("\n");
  }

  // The tokens of a line, as [first, end).
  range(line) {
    const {values, length} = this.starts;
    return [values[line], line + 1 < length ? values[line + 1] : Math.max(this.at, values[line])];
  }

  // The line that a token is in.
  lineOf(token) {
    const {values, length} = this.starts;
    let low = 0;
    let high = length - 1;
    while (low < high) {
      const middle = (low + high + 1) >> 1;
      if (values[middle] <= token) low = middle;
      else high = middle - 1;
    }
    return low;
  }
}

// All rows of a trajectory: a bar where each segment begins, then its lines.
export class Rows {
  // With `folded`, what a segment shares with its parent is left out.
  constructor(source, folded, columns = COLUMNS) {
    this.segments = source.segments.map((tokens) => {
      const shared = tokens.outline.shared_prefix ?? 0;
      return new SegmentLines(tokens, folded ? Math.min(shared, tokens.total) : 0, columns);
    });
    this.extend();
  }

  extend() {
    this.offsets = [];
    let at = 0;
    for (const lines of this.segments) {
      lines.extend();
      this.offsets.push(at);
      at += 1 + lines.count;
    }
    this.count = at;
  }

  // What a row is: {segment, bar: true} or {segment, first, end}.
  row(index) {
    let segment = this.offsets.length - 1;
    while (segment > 0 && this.offsets[segment] > index) segment -= 1;
    const line = index - this.offsets[segment] - 1;
    if (line < 0) return {segment, bar: true, first: 0, end: 0};
    const [first, end] = this.segments[segment].range(line);
    return {segment, bar: false, first, end};
  }

  rowOf(segment, token) {
    const lines = this.segments[segment];
    if (token < lines.from || lines.count === 0) return this.offsets[segment];
    return this.offsets[segment] + 1 + lines.lineOf(token);
  }
}
