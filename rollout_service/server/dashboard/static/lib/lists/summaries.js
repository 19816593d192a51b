// Rollouts as a list that grows as it is scrolled, newest first, and stays current: the newest page and the page in sight
// are asked for again when something happened. What is loaded stays in its order; rows that no longer match go.
import {get} from "../api.js";
import {AGE, whenNew} from "../live.js";
import {useEffect, useMemo, useRef, useState} from "../ui.js";

const PAGE = 200;

const at = (row) => Date.parse(row.created_at);

// Return `old` with the rows of a page that was asked for again: `fresh` replaces what it covers. `whole` says that
// nothing comes after it.
export function merge(old, fresh, whole) {
  if (whole || !fresh.length) return fresh;
  const known = new Set(fresh.map((row) => row.rollout_id));
  const last = at(fresh[fresh.length - 1]);
  return [...fresh, ...old.filter((row) => !known.has(row.rollout_id) && at(row) <= last)];
}

// Return the rows of all pages, each rollout once.
export function flat(pages) {
  const seen = new Set();
  return pages.flatMap((page) => page.rows).filter((row) => !seen.has(row.rollout_id) && seen.add(row.rollout_id));
}

export class SummaryList {
  // `asked` returns the query of a request that is made now.
  constructor(asked, changed) {
    this.asked = asked;
    this.changed = changed;
    this.pages = [];
    this.matching = null;
    this.error = null;
    this.loading = false;
    this.end = new AbortController();
  }

  close() {
    this.end.abort();
  }

  get complete() {
    return this.pages.length > 0 && this.pages[this.pages.length - 1].next === null;
  }

  async #ask(cursor, age = 0) {
    const query = new URLSearchParams({...this.asked(), limit: String(PAGE)});
    if (cursor) query.set("cursor", cursor);
    return get(`v1/summaries?${query}`, {signal: this.end.signal, age});
  }

  async #guarded(work) {
    try {
      await work();
      this.error = null;
    } catch (error) {
      this.error = error;
    }
    if (!this.end.signal.aborted) this.changed();
  }

  // Load the next page, unless one is on its way.
  async more() {
    if (this.loading || this.complete || this.end.signal.aborted) return;
    this.loading = true;
    await this.#guarded(async () => {
      const cursor = this.pages.length ? this.pages[this.pages.length - 1].next : null;
      const page = await this.#ask(cursor);
      if (!cursor) this.matching = page.matching;
      this.pages.push({cursor, rows: page.rows, next: page.next_cursor});
    });
    this.loading = false;
  }

  // Ask for the newest page again, and for the one that row `shown` is in.
  async refresh(shown) {
    if (!this.pages.length) return this.more();
    return this.#guarded(async () => {
      await this.#again(0);
      const other = this.#pageOf(shown);
      if (other > 0) await this.#again(other);
    });
  }

  #pageOf(row) {
    let before = 0;
    for (let page = 0; page < this.pages.length; page += 1) {
      before += this.pages[page].rows.length;
      if (row < before) return page;
    }
    return this.pages.length - 1;
  }

  async #again(index) {
    const page = this.pages[index];
    const fresh = await this.#ask(page.cursor, AGE);
    if (index === 0) this.matching = fresh.matching;
    const known = new Set(page.rows.map((row) => row.rollout_id));
    const gap = index === 0 && fresh.next_cursor !== null && !fresh.rows.some((row) => known.has(row.rollout_id));
    if (gap) {
      this.pages = [{cursor: null, rows: fresh.rows, next: fresh.next_cursor}];
      return;
    }
    page.rows = merge(page.rows, fresh.rows, fresh.next_cursor === null);
    if (fresh.next_cursor === null) this.pages.length = index + 1;
    if (index === this.pages.length - 1 && page.rows.length === fresh.rows.length) page.next = fresh.next_cursor;
  }
}

// Return {list, rows} for filters, of which `asked` makes a query; `shown` is a ref to the first row in sight. What matches
// may change by time alone: the list is asked for again `every` so many seconds.
export function useSummaries(filters, asked, shown, every) {
  const key = JSON.stringify(filters);
  const [, redraw] = useState(0);
  const latest = useRef(null);
  const list = useMemo(() => {
    latest.current?.close();
    latest.current = new SummaryList(() => asked(filters), () => redraw((count) => count + 1));
    return latest.current;
  }, [key]);
  useEffect(() => {
    list.more();
    const stop = whenNew(() => list.refresh(shown.current), {every});
    return () => (stop(), list.close());
  }, [list]);
  return {list, rows: flat(list.pages)};
}
