// The engines by pool: their load, and what may be done to them.
import {count, number, seconds, share} from "../lib/format.js";
import {send} from "../lib/api.js";
import {useOverview} from "../lib/live.js";
import {html, useState} from "../lib/ui.js";
import {Action, Badge, Bar, Card, Empty, Visible, sends} from "../lib/widgets.js";
import {plural} from "../lib/words.js";

const MODES = [
  ["abort", "Requests return the tokens they have, and go on from them later"],
  ["retract", "Requests go back to the engine's queue"],
  ["in_place", "Requests freeze and keep their cache"],
  ["drain", "Requests end first; new ones wait"],
];

export function Page() {
  const now = useOverview();
  if (!now) return html`<h1>Engines</h1><${Empty}>Waiting for the service<//>`;
  const pools = Map.groupBy(now.backends, (one) => one.backend.pool);
  return html`<div class="title"><h1>Engines</h1><${AbortAll} now=${now} /></div>
    ${pools.size ? null : html`<${Empty}>No engine is registered, so rollouts wait. Register one with <code>rollout-service backend add URL</code>.<//>`}
    <div class="stack">${[...pools].map(([pool, engines]) => html`<${Pool} key=${pool} pool=${pool} engines=${engines}
      paused=${now.paused_pools.includes(pool)} />`)}</div>`;
}

function AbortAll({now}) {
  const live = ["queued", "init", "rollout", "evaluate"].reduce((sum, state) => sum + (now.counts[state] ?? 0), 0);
  return html`<${Action} label="Abort all rollouts" danger disabled=${live === 0} confirm=${`Abort ${plural(live, "rollout")}?`}
    run=${sends("POST", "v1/abort", {})}>All rollouts that have not ended are cancelled, in queues too. Runs start new ones unless they
    are paused.<//>`;
}

function Pool({pool, engines, paused}) {
  const [mode, setMode] = useState("abort");
  const sum = (field) => engines.reduce((total, one) => total + one[field], 0);
  const versions = new Set(engines.map((one) => one.backend.weight_version));
  const actions = paused
    ? html`<${Action} label="Resume" confirm=${`Resume the pool ${pool}?`} run=${sends("POST", "v1/resume", {pool})}>
        Requests that wait go on.<//>`
    : html`<${Action} label="Pause" confirm=${`Pause the pool ${pool}?`} run=${sends("POST", "v1/pause", {pool, mode})}>
        <p>Rollouts wait, and go on from their tokens when the pool is resumed. Meanwhile the engines are free for other work.</p>
        <fieldset><legend>What becomes of the requests in flight</legend>${MODES.map(([name, text]) => html`<label key=${name}>
          <input type="radio" name="mode" value=${name} checked=${mode === name} onChange=${() => setMode(name)} /> ${text}
          <span class="mono dim"> ${name}</span></label>`)}</fieldset><//>`;
  return html`<${Card} label=${`Pool ${pool}`} title=${html`Pool <span class="mono">${pool}</span> ${paused ? html`<${Badge} state="paused" />` : null}`} actions=${actions}>
    <p class="dim">${plural(engines.length, "engine")} · ${number(sum("requests_per_second"), 1)} requests/s · ${count(Math.round(sum("tokens_per_second")))} tokens/s
      · ${versions.size === 1 ? `version ${[...versions][0]}` : html`<span class="warn-text">versions ${[...versions].sort((a, b) => a - b).join(", ")}</span>`}</p>
    <div class="cards">${engines.map((one) => html`<${Engine} key=${one.backend.backend_id} ...${one} most=${Math.max(...engines.map((each) => each.backend.in_flight), 1)} />`)}</div>
  <//>`;
}

function Engine({backend, most, ...figures}) {
  const path = `v1/backends/${encodeURIComponent(backend.backend_id)}`;
  const again = {url: backend.url, pool: backend.pool, kind: backend.kind};
  return html`<section class=${`engine ${backend.state}`} aria-label=${backend.url}>
    <header><h3 class="mono ellipsis" title=${backend.backend_id}>${backend.url.replace(/\/$/, "")}</h3><${Badge} state=${backend.state} /></header>
    <dl class="pairs">
      <dt>In flight</dt><dd class="with-value"><${Bar} value=${backend.in_flight} max=${most} tone="rollout" label=${`${backend.in_flight} requests in flight`} /> ${count(backend.in_flight)}</dd>
      <dt>Prefix cache</dt><dd class="with-value"><${Bar} value=${figures.cached_share ?? 0} tone="evaluate" label=${`${share(figures.cached_share)} of prompts cached`} /> ${share(figures.cached_share)}</dd>
      <dt>Tokens a second</dt><dd>${count(Math.round(figures.tokens_per_second))}</dd>
      <dt>Median request</dt><dd>${seconds(figures.p50_seconds)}</dd>
      <dt>Weights</dt><dd>version ${backend.weight_version}</dd>
      <dt>Answered</dt><dd>${count(backend.served)}${backend.failures ? html`, <span class="bad-text">${count(backend.failures)} failed</span>` : ""}</dd>
      <dt>Model</dt><dd class="mono">${backend.model_path}</dd>
      <dt>Kind</dt><dd>${backend.kind}, context ${count(backend.context_length)}</dd>
    </dl>
    ${backend.last_error ? html`<p class="bad-text"><${Visible} text=${backend.last_error} /></p>` : null}
    <div class="actions">${backend.state === "draining"
      ? html`<${Action} label="Put back" confirm="Put the engine back into service?" run=${() => send("POST", "v1/backends", again)}>
          It is checked again, with its own tokenizer and the pool's limit of requests.<//>`
      : html`<${Action} label="Drain" confirm="Drain the engine?" run=${sends("POST", `${path}/drain`)}>It is sent no new requests, and ends those it has.<//>`}
      <${Action} label="Remove" danger confirm="Remove the engine?" run=${sends("DELETE", path)}>Its ${plural(backend.in_flight, "request")} in flight
        go on at other engines of the pool.<//></div>
  </section>`;
}
