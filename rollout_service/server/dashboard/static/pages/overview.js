// The service at a glance: what flows, what fails, and on what it runs.
import {ago, count, number, seconds, share} from "../lib/format.js";
import {recent, useOverview} from "../lib/live.js";
import {href, segment} from "../lib/router.js";
import {html} from "../lib/ui.js";
import {Badge, Bar, Card, Empty, Visible} from "../lib/widgets.js";
import {plural} from "../lib/words.js";
import {Pipeline} from "../parts/pipeline.js";
import {Pressure, Sandboxes} from "../parts/host.js";
import {Spark} from "../parts/spark.js";

const SHOWN = 6;

export function Page() {
  const now = useOverview();
  if (!now) return html`<h1>Overview</h1><${Empty}>Waiting for the service<//>`;
  return html`<h1>Overview</h1><div class="stack">
    <${Notices} now=${now} />
    <${Figures} now=${now} />
    <${Card} title="Pipeline" actions=${html`<span class="dim">at ${now.node}</span>`}><${Pipeline} now=${now} /><${Limit} limit=${now.bottleneck} more=${now.next_node} /><//>
    <div class="grid">
      <div class="span-7"><${Failures} now=${now} /></div>
      <div class="span-5"><${Outcomes} now=${now} /></div>
      <div class="span-7"><${Engines} now=${now} /></div>
      <div class="span-5"><${Hosts} now=${now} /></div>
      <div class="span-12"><${Runs} now=${now} /></div>
    </div>
  </div>`;
}

function Notices({now}) {
  const notes = [...now.reasons.map((text) => ["bad", text]), ...now.warnings.map((text) => ["warn", text])];
  return notes.map(([tone, text]) => html`<div class=${`notice ${tone}`} key=${text} role="status">
    <strong>${tone === "bad" ? "Takes no work:" : "Warning:"}</strong> <${Visible} text=${text} /></div>`);
}

// What limits the throughput; it has its place even when nothing does, so that the page does not jump.
const Limit = ({limit, more}) => html`<p class="limit">${limit ? html`<strong>Bottleneck: ${limit.kind}.</strong> <${Visible} text=${limit.message} />
  ${" "}<span class="dim"><${Visible} text=${limit.hint} /></span> ` : null}${more ? html`<span class=${more.rollouts ? "" : "dim"}><${Visible} text=${more.message} /></span>` : "\u00a0"}</p>`;

function Figures({now}) {
  const {counts} = now;
  const active = ["init", "rollout", "evaluate"].reduce((sum, state) => sum + (counts[state] ?? 0), 0);
  const tokens = now.backends.reduce((sum, one) => sum + one.tokens_per_second, 0);
  const inUse = now.nodes.reduce((sum, node) => sum + node.in_use, 0);
  return html`<dl class="figures">
    <${Figure} name="Rollouts a second" value=${number(now.finished_per_second)}
      extra=${html`<${Spark} values=${recent((one) => one.finished_per_second)} />`} />
    <${Figure} name="Success" value=${share(now.success_share)} tone=${now.success_share === null ? "" : now.success_share < 0.8 ? "bad" : ""}
      extra="last 5 min" />
    <${Figure} name="Under way" value=${count(active)} extra=${`${count(counts.queued ?? 0)} queued`} />
    <${Figure} name="Tokens a second" value=${count(Math.round(tokens))}
      extra=${html`<${Spark} values=${recent((one) => one.backends.reduce((sum, each) => sum + each.tokens_per_second, 0))} />`} />
    <${Figure} name="Sandboxes in use" value=${count(inUse)} extra=${plural(now.nodes.length, "node")} />
    <${Figure} name="Completed" value=${count(counts.completed ?? 0)} extra=${`${count(counts.failed ?? 0)} failed`} />
  </dl>`;
}

const Figure = ({name, value, extra, tone = ""}) => html`<div><dt>${name}</dt><dd class=${`value ${tone && `${tone}-text`}`}>${value}</dd>
  <dd class="dim extra">${extra}</dd></div>`;

function Failures({now}) {
  return html`<${Card} title="Failures by cause" actions=${html`<a href=${href("/rollouts", {state: "failed"})}>All failed</a>`}>
    ${now.errors.length ? html`<ul class="failures">${now.errors.slice(0, SHOWN).map((group) => html`<li key=${group.code + group.stage + group.environment}>
      <span class="count bad">${count(group.count)}</span>
      <div><a class="mono" href=${href("/rollouts", {error: group.code})}>${group.code}</a>
        <span class="dim"> ${[group.environment, group.stage].filter(Boolean).join(", ")} · ${ago(group.last_at)}</span>
        <p><${Visible} text=${group.message} />${group.rollouts.length ? html` <a href=${href(`/rollouts/${segment(group.rollouts[0])}`)}
          aria-label=${`Newest rollout with ${group.code}`}>newest</a>` : null}</p>
        ${group.hint ? html`<p class="hint"><${Visible} text=${group.hint} /></p>` : null}</div></li>`)}</ul>`
      : html`<${Empty}>None of late.<//>`}<//>`;
}

function Outcomes({now}) {
  const rows = Object.entries(now.outcomes).sort((a, b) => (b[0] === "completed") - (a[0] === "completed") || b[1] - a[1]);
  const total = rows.reduce((sum, [, many]) => sum + many, 0);
  return html`<${Card} title="Ended in the last 5 minutes" actions=${html`<span class="dim">${count(total)}</span>`}>
    ${total ? html`<table class="tight"><tbody>${rows.slice(0, 8).map(([name, many]) => html`<tr key=${name}>
      <th scope="row" class=${TONES[name] ? "" : "mono"}>${name}</th>
      <td class="wide"><${Bar} value=${many} max=${total} tone=${TONES[name] ?? "bad"} label=${share(many / total)} /></td>
      <td class="number">${count(many)}</td><td class="number dim">${share(many / total)}</td></tr>`)}</tbody></table>`
      : html`<${Empty}>Nothing ended.<//>`}<//>`;
}

const TONES = {completed: "good", cancelled: "queued"};

function Engines({now}) {
  return html`<${Card} title="Engines" actions=${html`${now.paused_pools.map((pool) => html`<${Badge} state="paused" key=${pool}>${pool} is paused<//>`)}
      <a href="#/engines">All</a>`}>
    ${now.backends.length ? html`<table><thead><tr><th scope="col">Engine</th><th scope="col">State</th><th scope="col" class="number">In flight</th>
      <th scope="col" class="number">Tokens/s</th><th scope="col" class="number">Median</th><th scope="col">Cached</th><th scope="col" class="number">Version</th></tr></thead>
      <tbody>${now.backends.slice(0, SHOWN).map((one) => html`<tr key=${one.backend.backend_id}>
        <th scope="row" class="mono ellipsis">${one.backend.url.replace(/^https?:\/\//, "").replace(/\/$/, "")}</th><td><${Badge} state=${one.backend.state} /></td>
        <td class="number">${count(one.backend.in_flight)}</td><td class="number">${count(Math.round(one.tokens_per_second))}</td>
        <td class="number">${seconds(one.p50_seconds)}</td><td class="nowrap"><${Cached} value=${one.cached_share} /></td>
        <td class="number">${one.backend.weight_version}</td></tr>`)}</tbody></table>`
      : html`<${Empty}>No engine is registered; rollouts wait until one is.<//>`}<//>`;
}

const Cached = ({value}) => (value === null ? "–" : html`<span class="with-bar"><${Bar} value=${value} tone="evaluate" label=${`${share(value)} cached`} /> ${share(value)}</span>`);

function Hosts({now}) {
  return html`<${Card} title="Sandboxes" actions=${html`<a href="#/nodes">Nodes</a>`}><div class="stack">
    ${now.nodes.slice(0, SHOWN).map((node) => html`<div key=${node.node} class="host">
      <div class="host-name"><span class="ellipsis">${node.node}</span>${node.state === "ready" ? null : html`<${Badge} state=${node.state} />`}
        <span class="dim">${node.in_use} of ${node.target} in use, ${node.warm} warm</span></div>
      <${Sandboxes} node=${node} /><${Pressure} node=${node} brief />
      ${node.holds.map((hold) => html`<p class="warn-text" key=${hold.resource}>Holds back: <${Visible} text=${hold.reason} /></p>`)}
    </div>`)}</div><//>`;
}

function Runs({now}) {
  return html`<${Card} title="Runs" actions=${html`<a href="#/runs">All</a>`}>
    ${now.runs.length ? html`<table><thead><tr><th scope="col">Run</th><th scope="col">State</th><th scope="col">Accepted</th><th scope="col" class="number">Ready</th>
      <th scope="col" class="number">Open</th><th scope="col" class="number">Trained on</th><th scope="col" class="number">Version</th>
      <th scope="col" class="number">Staleness</th><th scope="col">Dropped</th></tr></thead><tbody>${now.runs.map((run) => html`<tr key=${run.run_id}>
        <th scope="row"><a class="mono" href=${href(`/runs/${segment(run.run_id)}`)}>${run.run_id}</a></th>
        <td><${Badge} state=${run.state} />${run.problem ? html` <span class="bad-text"><${Visible} text=${run.problem} /></span>` : null}</td>
        <td class="nowrap"><span class="with-bar"><${Bar} value=${run.acceptance_rate} label=${`${share(run.acceptance_rate)} accepted`} /> ${share(run.acceptance_rate)}</span></td>
        <td class="number">${count(run.ready_groups)}</td><td class="number">${count(run.open_groups)}</td>
        <td class="number">${count(run.acknowledged_groups)}</td><td class="number">${run.version}</td><td class="number">${number(run.staleness, 1)}</td>
        <td class="dim">${Object.entries(run.dropped).map(([why, many]) => `${why.replaceAll("_", " ")} ${count(many)}`).join(", ") || "–"}</td></tr>`)}</tbody></table>`
      : html`<${Empty}>No run is in progress.<//>`}<//>`;
}
