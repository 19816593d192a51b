// The tokens of a segment as typed columns, one entry a token. They fill from the front, range by range, so whatever
// is below `loaded` is there, and a token costs some 20 bytes however long the trajectory is.

export const NOT_KNOWN = NaN;

// Writes runs of (value, count) into a column.
export function spread(runs, column, start) {
  let at = start;
  for (const [value, count] of runs) {
    column.fill(value, at, at + count);
    at += count;
  }
  return at - start;
}

export class SegmentTokens {
  constructor(outline) {
    const total = outline.tokens;
    this.outline = outline;
    this.index = outline.index;
    this.total = total;
    this.loaded = 0;
    this.text = "";
    this.hasText = true;
    this.hasEntropy = false;
    this.ids = new Int32Array(total);
    this.ends = new Uint32Array(total);
    this.mask = new Uint8Array(total);
    this.versions = new Float64Array(total).fill(-1);
    this.turns = new Int32Array(total).fill(-1);
    this.logprobs = new Float32Array(total).fill(NOT_KNOWN);
    this.entropy = new Float32Array(total).fill(NOT_KNOWN);
    this.pieces = new Map();
  }

  // Takes the answer of the tokens route; it has to begin where the last one ended.
  add(range) {
    if (range.start !== this.loaded) throw new Error(`a range begins at ${range.start}, not at ${this.loaded}`);
    const start = range.start;
    this.ids.set(range.ids, start);
    spread(range.mask, this.mask, start);
    spread(range.versions, this.versions, start);
    spread(range.turns, this.turns, start);
    this.#numbers(range.logprobs, this.logprobs, start);
    if (range.entropy) {
      this.hasEntropy = true;
      this.#numbers(range.entropy, this.entropy, start);
    }
    this.#text(range, start);
    this.loaded = start + range.count;
  }

  #numbers(values, column, start) {
    for (let i = 0; i < values.length; i += 1) if (values[i] !== null) column[start + i] = values[i];
  }

  #text(range, start) {
    const before = this.text.length;
    if (range.text === null || range.text === undefined) {
      this.hasText = false;
      this.text += range.ids.join(" ") + (range.ids.length ? " " : "");
      let end = before;
      range.ids.forEach((id, i) => {
        end += String(id).length + 1;
        this.ends[start + i] = end;
      });
      return;
    }
    this.text += range.text;
    for (let i = 0; i < range.count; i += 1) this.ends[start + i] = before + range.ends[i];
    for (const at of range.partial ?? []) this.pieces.set(start + at, range.pieces[at]);
  }

  // Where the token begins in `text`.
  begin(i) {
    return i === 0 ? 0 : this.ends[i - 1];
  }

  // The token's text; that of a part of a character is empty, except for the last part.
  textOf(i) {
    return this.text.slice(this.begin(i), this.ends[i]);
  }

  // The first token that ends after this position of `text`.
  tokenAt(position) {
    let low = 0;
    let high = this.loaded;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (this.ends[middle] > position) high = middle;
      else low = middle + 1;
    }
    return low;
  }
}
