// All rollouts, newest first, of any number: filters are the service's and stand in the address, so a view can be sent to
// others. New rows appear above without moving what is being read.
import {count, seconds, ago, number} from "../lib/format.js";
import {useKeys} from "../lib/keys.js";
import {useSummaries} from "../lib/lists/summaries.js";
import {useOverview} from "../lib/live.js";
import {go, href, parse, segment} from "../lib/router.js";
import {VirtualRows} from "../lib/rows.js";
import {Badge, Problem} from "../lib/widgets.js";
import {html, useEffect, useLayoutEffect, useRef, useState} from "../lib/ui.js";

const ROW = 30;
const STATES = ["queued", "init", "rollout", "evaluate", "completed", "failed", "cancelled"];
const AGES = {"15m": 900, "1h": 3600, "6h": 21_600, "1d": 86_400, "7d": 604_800};
const FIELDS = ["state", "run", "group", "environment", "error", "reward_min", "reward_max", "since", "until", "text"];

// How often the time of an age moves on: each time is another question, whose answers tabs do not share.
const STEP_SECONDS = 10;

// Return what the service is asked for: the filters of the address, with an age such as "1h" as a time.
function asked(filters) {
  const now = Math.floor(Date.now() / 1000 / STEP_SECONDS) * STEP_SECONDS;
  const query = {order: "newest"};
  for (const name of FIELDS) if (filters[name]) query[name] = filters[name];
  if (AGES[query.since]) query.since = new Date((now - AGES[query.since]) * 1000).toISOString();
  return query;
}

function StateChips({filters, change}) {
  const counts = useOverview()?.counts;
  const total = counts ? Object.values(counts).reduce((sum, value) => sum + value, 0) : null;
  const chip = (state, label, value) => html`<button type="button" key=${label} class="state-chip" aria-pressed=${(filters.state ?? "") === state ? "true" : "false"}
    onClick=${() => change({state})}>${state ? html`<${Badge} state=${state} />` : label} <span class="number">${value === null ? "" : count(value)}</span></button>`;
  return html`<div class="state-chips" role="group" aria-label="State">
    ${chip("", "all", total)}${STATES.map((state) => chip(state, state, counts?.[state] ?? (counts ? 0 : null)))}</div>`;
}

// A field that changes the address once typing paused.
function Field({name, label, filters, change, type = "text", width = 9, ...rest}) {
  const [value, setValue] = useState(filters[name] ?? "");
  useEffect(() => setValue(filters[name] ?? ""), [filters[name]]);
  useEffect(() => {
    if (value === (filters[name] ?? "")) return undefined;
    const timer = setTimeout(() => change({[name]: value}), 300);
    return () => clearTimeout(timer);
  }, [value]);
  return html`<label class="filter">${label}<input type=${type} name=${name} value=${value} style=${{width: `${width}em`}} autocomplete="off" spellcheck="false"
    onInput=${(event) => setValue(event.currentTarget.value.trim())} ...${rest} /></label>`;
}

function Filters({filters, change}) {
  const active = FIELDS.some((name) => filters[name]);
  return html`<form class="filters" onSubmit=${(event) => event.preventDefault()} aria-label="Filters">
    <${Field} name="text" label="Id" width=${16} filters=${filters} change=${change} type="search" data-search="" placeholder="/" />
    <${Field} name="run" label="Run" filters=${filters} change=${change} />
    <${Field} name="group" label="Group" width=${5} filters=${filters} change=${change} inputmode="numeric" pattern="[0-9]*" />
    <${Field} name="environment" label="Environment" filters=${filters} change=${change} />
    <${Field} name="error" label="Error" filters=${filters} change=${change} />
    <${Field} name="reward_min" label="Reward ≥" width=${5} type="number" step="any" filters=${filters} change=${change} />
    <${Field} name="reward_max" label="≤" width=${5} type="number" step="any" filters=${filters} change=${change} />
    <label class="filter">Created<select name="since" value=${filters.since ?? ""} onChange=${(event) => change({since: event.currentTarget.value})}>
      <option value="">any time</option>
      ${Object.keys(AGES).map((age) => html`<option key=${age} value=${age}>last ${age}</option>`)}
      ${filters.since && !AGES[filters.since] ? html`<option value=${filters.since}>${filters.since}</option>` : null}
    </select></label>
    ${active ? html`<button type="button" class="quiet" onClick=${() => change(Object.fromEntries(FIELDS.map((name) => [name, ""])))}>Clear</button>` : null}
  </form>`;
}

function Row({row, now, picked, onPick}) {
  const id = row.rollout_id;
  return html`<div class="summary-row summary-columns">
    <span><input type="checkbox" aria-label=${`Compare ${id}`} checked=${picked} onChange=${() => onPick(id)} /></span>
    <span><${Badge} state=${row.state} /></span>
    <span class="ellipsis" title=${id}><a class="mono" href=${href(`/rollouts/${segment(id)}`)}>${id}</a>${row.branch_of
      ? html` <span class="dim" title=${`A branch of ${row.branch_of.rollout_id}`}>from turn ${row.branch_of.turn}</span>` : ""}</span>
    <span class="ellipsis" title=${row.environment}>${row.environment}</span>
    <span class="ellipsis">${row.run_id ? html`<a href=${href(`/runs/${segment(row.run_id)}`)}>${row.run_id}</a>${row.group === null ? "" : ` / ${row.group}`}` : html`<span class="dim">–</span>`}</span>
    <span class="number strong">${number(row.reward, 3)}</span>
    <span class="ellipsis">${row.error_code ? html`<span class="bad-text">${row.error_code}</span>` : row.stop_reason?.replaceAll("_", " ") ?? ""}${row.attempt > 1 ? html` <span class="dim">attempt ${row.attempt}</span>` : ""}</span>
    <span class="number">${count(row.turns)}</span>
    <span class="number">${count(row.tokens)}</span>
    <span class="number">${seconds(row.seconds)}</span>
    <span class="number dim" title=${row.created_at}>${ago(row.created_at, now)}</span>
  </div>`;
}

const HEADS = ["", "State", "Id", "Environment", "Run / group", "Reward", "End", "Turns", "Tokens", "Time", "Created"];
const NUMBERS = new Set(["Reward", "Turns", "Tokens", "Time", "Created"]);

// Keep what is being read where it is when rows come or go above it; at the top, new rows are shown at once.
function useAnchor(box, rows) {
  const before = useRef({first: null, index: 0});
  useLayoutEffect(() => {
    const scroller = box.current?.querySelector(".rows");
    if (!scroller) return;
    const {first, index} = before.current;
    if (first !== null && index > 0) {
      const now = rows.findIndex((row) => row.rollout_id === first);
      if (now >= 0 && now !== index) scroller.scrollTop += (now - index) * ROW;
    }
    const top = Math.floor(scroller.scrollTop / ROW);
    before.current = {first: rows[top]?.rollout_id ?? null, index: top};
  });
  return () => {
    const top = Math.floor((box.current?.querySelector(".rows")?.scrollTop ?? 0) / ROW);
    before.current = {first: rows[top]?.rollout_id ?? null, index: top};
  };
}

export function Page({route}) {
  const filters = route.query;
  // From the address as it is now: two fields may have changed since the last drawing.
  const change = (values) => go("/rollouts", {...parse(location.hash).query, ...values}, {replace: true});
  const shown = useRef(0);
  const box = useRef(null);
  const {list, rows} = useSummaries(filters, asked, shown, AGES[filters.since] ? STEP_SECONDS : undefined);
  const [chosen, setChosen] = useState(null);
  const [picked, setPicked] = useState([]);
  const anchor = useAnchor(box, rows);
  const index = chosen === null ? -1 : rows.findIndex((row) => row.rollout_id === chosen);
  const pick = (id) => setPicked((old) => (old.includes(id) ? old.filter((one) => one !== id) : [...old, id].slice(-2)));
  const open = (row) => go(`/rollouts/${segment(rows[row].rollout_id)}`);
  const compare = () => go("/compare", {ids: picked.join(",")});
  useKeys({
    x: {help: "Choose the row for a comparison", run: () => (index < 0 ? false : void pick(chosen))},
    c: {help: "Compare the two chosen rows", run: () => (picked.length < 2 ? false : void compare())},
  });
  const now = Date.now();
  const onRange = (first, last) => {
    shown.current = first;
    anchor();
    if (last + 40 > rows.length) list.more();
  };
  return html`<div class="rollouts-page">
    <h1>Rollouts</h1>
    <${StateChips} filters=${filters} change=${change} />
    <${Filters} filters=${filters} change=${change} />
    <div class="list-head"><span class="dim" role="status">${rows.length ? `${count(rows.length)}${list.complete ? "" : " loaded"}${list.matching !== null && list.matching !== undefined ? ` of ${count(list.matching)}` : ""}` : ""}</span>
      <span class="spacer"></span>
      ${picked.length ? html`<span class="dim mono ellipsis">${picked.join("  ↔  ")}</span><button type="button" class="quiet" onClick=${() => setPicked([])}>Forget</button>` : html`<span class="dim">Tick two rows to compare them.</span>`}
      <button type="button" disabled=${picked.length < 2} onClick=${compare}>Compare</button></div>
    <${Problem} error=${list.error} />
    <div class="summary-table card" ref=${box}>
      <div class="summary-columns summary-head" aria-hidden="true">${HEADS.map((head) => html`<span key=${head} class=${NUMBERS.has(head) ? "number" : ""}>${head}</span>`)}</div>
      ${rows.length ? null : html`<p class="empty">${list.pages.length ? "No rollout matches." : list.error ? "" : "Loading"}</p>`}
      <${VirtualRows} count=${rows.length} rowHeight=${ROW} label="Rollouts" selected=${index} onSelect=${(row) => setChosen(rows[row]?.rollout_id ?? null)} onOpen=${open} onRange=${onRange}
        render=${(row) => html`<${Row} row=${rows[row]} now=${now} picked=${picked.includes(rows[row].rollout_id)} onPick=${pick} />`} />
    </div>
  </div>`;
}
