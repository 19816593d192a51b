// Loads the tokens of a trajectory from the front, in ranges, and tells of each range that came.

import {get, TOKENS_AT_ONCE} from "../api.js";
import {SegmentTokens} from "./columns.js";

const nodeQuery = (node) => (node === null || node === undefined ? "" : `&node=${node}`);

// The segments of a trajectory without their tokens.
export function outlineOf(id, node, signal) {
  const query = node === null || node === undefined ? "" : `?node=${node}`;
  return get(`v1/rollouts/${encodeURIComponent(id)}/outline${query}`, {signal});
}

export class TokenSource {
  // `outline` is that of the outline route.
  constructor(id, outline, node = null) {
    this.id = id;
    this.node = node;
    this.outline = outline;
    this.segments = outline.segments.map((segment) => new SegmentTokens(segment));
    this.total = this.segments.reduce((sum, segment) => sum + segment.total, 0);
  }

  get loaded() {
    return this.segments.reduce((sum, segment) => sum + segment.loaded, 0);
  }

  // Loads everything; `onRange` is called after each range. The next range is on its way while one is taken in.
  async load(onRange, signal) {
    const wanted = this.#ranges();
    let next = wanted.length ? this.#fetch(wanted[0], signal) : null;
    for (let k = 0; k < wanted.length; k += 1) {
      const range = await next;
      next = k + 1 < wanted.length ? this.#fetch(wanted[k + 1], signal) : null;
      next?.catch(() => {}); // it is awaited in the next round, unless this one throws
      if (signal?.aborted) return;
      wanted[k].segment.add(range);
      onRange();
    }
  }

  #ranges() {
    const wanted = [];
    for (const segment of this.segments) {
      let start = segment.loaded;
      while (start < segment.total) {
        const count = Math.min(wanted.length === 0 ? TOKENS_AT_ONCE.first : TOKENS_AT_ONCE.next, segment.total - start);
        wanted.push({segment, start, count});
        start += count;
      }
    }
    return wanted;
  }

  #fetch({segment, start, count}, signal) {
    const id = encodeURIComponent(this.id);
    const query = `segment=${segment.index}&start=${start}&count=${count}${nodeQuery(this.node)}`;
    return get(`v1/rollouts/${id}/tokens?${query}`, {signal});
  }
}
