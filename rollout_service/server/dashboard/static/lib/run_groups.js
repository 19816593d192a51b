// The groups of a run, the newest first: fetched as one scrolls, and looked at again when something happens.
import {get} from "./api.js";
import {ago, count, number} from "./format.js";
import {AGE, whenNew} from "./live.js";
import {go, href, segment} from "./router.js";
import {VirtualRows} from "./rows.js";
import {html, useEffect, useMemo, useRef, useState} from "./ui.js";
import {Badge, Card, Empty, Problem, Visible} from "./widgets.js";

const PAGE = 100;
const STATES = ["open", "ready", "batched", "acknowledged", "dropped"];

export function Groups({run, state, reason}) {
  const {groups, more, done, error} = useGroups(run.run_id, state, reason);
  const scale = useMemo(() => rewards(groups), [groups]);
  const filter = (query) => go(`/runs/${segment(run.run_id)}`, query, {replace: true});
  const reasons = Object.keys(run.counts.dropped).sort();
  return html`<${Card} title="Groups" class="run-groups" actions=${html`
      <label>State <select value=${state} onChange=${(event) => filter({state: event.currentTarget.value})}>
        <option value="">all</option>${STATES.map((one) => html`<option key=${one} value=${one}>${one}</option>`)}</select></label>
      ${state === "dropped" ? html`<label>Reason <select value=${reason} onChange=${(event) => filter({state, reason: event.currentTarget.value})}>
        <option value="">all</option>${reasons.map((one) => html`<option key=${one} value=${one}>${one}</option>`)}</select></label>` : null}`}>
    <${Problem} error=${error} />
    <div class="group-row group-head" aria-hidden="true"><span class="number">Group</span><span>State</span><span>Rewards of the samples</span>
      <span class="number">Mean</span><span class="number">Spread</span><span class="number">Batch</span><span>Closed</span><span></span></div>
    ${groups.length ? html`<${VirtualRows} count=${groups.length} rowHeight=${30} height="420px" label="Groups, the newest first"
        onOpen=${(index) => go("/compare", {ids: ids(groups[index])})} onRange=${(_, last) => last > groups.length - PAGE / 2 && more()}
        render=${(index) => html`<${Group} group=${groups[index]} scale=${scale} isTree=${Boolean(run.request.branching)} />`} />` : null}
    ${groups.length || error ? null : !done ? html`<${Empty}>Loading<//>`
      : html`<${Empty}>${reason ? `No group was dropped for ${reason}.` : state ? `No group is ${state}.` : "No group has begun."}<//>`}
  <//>`;
}

const ids = (group) => group.samples.map((sample) => sample.rollout_id).join(",");

function Group({group, scale, isTree}) {
  return html`<div class="group-row">
    <span class="number mono">${group.number}</span>
    <span class="ellipsis"><${Badge} state=${group.state} />${group.reason ? html` <span class="dim"><${Visible} text=${group.reason} /></span>` : null}</span>
    <span class="group-samples">${!group.samples.length ? html`<span class="dim">deleted</span>` : group.samples.map((sample) => html`<${Sample} key=${sample.sample} sample=${sample} scale=${scale} />`)}</span>
    <span class="number mono">${number(group.reward_mean)}</span>
    <span class="number mono">${number(group.reward_std)}</span>
    <span class="number mono">${group.batch ?? ""}</span>
    <span class="dim nowrap">${group.closed_at ? ago(group.closed_at) : ""}</span>
    <span>${group.samples.length > 1 ? html`<a href=${href("/compare", {ids: ids(group)})} aria-label=${`Compare group ${group.number}`}>compare</a>` : null}
      ${isTree && group.samples.length ? html`<a href=${href(`/rollouts/${segment(group.samples[0].rollout_id)}`, {tab: "branches"})} aria-label=${`Tree of group ${group.number}`}>tree</a>` : null}</span>
  </div>`;
}

const MARKS = {failed: "\u00d7", cancelled: "\u2013"};

// A sample is a little column as high as its reward, among those that are shown.
function Sample({sample, scale}) {
  const said = sample.reward ?? null;
  const outcome = said !== null ? `reward ${number(said, 3)}` : sample.error_code ?? sample.state;
  const label = `Sample ${sample.sample}: ${sample.state}, ${outcome}${sample.tokens === null || sample.tokens === undefined ? "" : `, ${count(sample.tokens)} tokens`}`;
  const high = said === null ? 0 : 0.12 + 0.88 * ((said - scale.low) / (scale.high - scale.low || 1));
  return html`<a class=${`sample ${said === null ? sample.state : "scored"}`} href=${href(`/rollouts/${segment(sample.rollout_id)}`)} title=${label} aria-label=${label}>
    ${said === null ? MARKS[sample.state] ?? "\u00b7" : html`<span style=${{height: `${high * 100}%`}}></span>`}</a>`;
}

// Return the lowest and the highest reward of some groups; 0 and 1 are always within.
function rewards(groups) {
  let low = 0, high = 1;
  for (const {samples} of groups) {
    for (const {reward} of samples) {
      if (reward === null || reward === undefined) continue;
      low = Math.min(low, reward);
      high = Math.max(high, reward);
    }
  }
  return {low, high};
}

const NOTHING = {groups: new Map(), cursor: null, done: false, error: null};

// Return {groups, more, done, error}; `more` fetches the next page.
function useGroups(runId, state, reason) {
  const key = `${runId} ${state} ${reason}`;
  const [held, setHeld] = useState({key, ...NOTHING});
  const busy = useRef(false);
  const current = held.key === key ? held : {key, ...NOTHING};
  const latest = useRef(current);
  latest.current = current;

  const fetchPage = async (cursor, aborted, age = 0) => {
    const query = new URLSearchParams({limit: PAGE, order: "newest"});
    if (state) query.set("state", state);
    if (reason) query.set("reason", reason);
    if (cursor) query.set("cursor", cursor);
    busy.current = true;
    try {
      const page = await get(`v1/runs/${segment(runId)}/groups?${query}`, {signal: aborted, age});
      if (aborted?.aborted) return;
      const old = latest.current;
      // The first page again: what it has is newer, and what is no longer in it, though it would be, has changed its state.
      const whole = !cursor && !page.next_cursor;
      const groups = new Map(whole ? [] : old.groups);
      if (!cursor && page.groups.length) {
        const last = page.groups.at(-1).number;
        for (const known of groups.keys()) if (known >= last) groups.delete(known);
      }
      for (const group of page.groups) groups.set(group.number, group);
      const again = !cursor && !whole && old.groups.size > 0;
      setHeld({key, groups, error: null, cursor: again ? old.cursor : page.next_cursor ?? null, done: again ? old.done : !page.next_cursor});
    } catch (error) {
      if (!aborted?.aborted) setHeld({...latest.current, error});
    } finally {
      busy.current = false;
    }
  };

  const more = () => {
    if (!busy.current && !current.done && current.cursor) fetchPage(current.cursor);
  };

  useEffect(() => {
    const end = new AbortController();
    fetchPage(null, end.signal);
    const stop = whenNew(() => fetchPage(null, end.signal, AGE), {isFree: () => !busy.current});
    return () => (end.abort(), stop());
  }, [key]);
  // A page may be short, or even empty, although more groups match.
  useEffect(() => {
    if (current.cursor && current.groups.size < PAGE / 2) more();
  }, [current.cursor]);

  const groups = useMemo(() => [...current.groups.values()].sort((a, b) => b.number - a.number), [current.groups]);
  return {...current, groups, more};
}
