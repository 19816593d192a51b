// The nodes that share the store: their hosts, what holds sandboxes back, and how much they run at once.
import {count, seconds} from "../lib/format.js";
import {send} from "../lib/api.js";
import {useLive, useMay, useOverview} from "../lib/live.js";
import {html, useEffect, useState} from "../lib/ui.js";
import {Action, Badge, Card, Empty, Problem, Visible, sends} from "../lib/widgets.js";
import {plural} from "../lib/words.js";
import {Pressure, Sandboxes} from "../parts/host.js";

export function Page() {
  const now = useOverview();
  if (!now) return html`<h1>Nodes</h1><${Empty}>Waiting for the service<//>`;
  return html`<h1>Nodes</h1><div class="stack">
    ${now.nodes.map((node) => html`<${Node} key=${node.node} node=${node} here=${node.node === now.node} alone=${now.nodes.length === 1} />`)}
    <${Concurrency} node=${now.node} /></div>`;
}

function Node({node, here, alone}) {
  const path = `v1/nodes/${encodeURIComponent(node.node)}`;
  const actions = {
    ready: html`<${Action} label="Drain" confirm=${`Drain ${node.node}?`} run=${sends("POST", `${path}/drain`)}>It ends its
      ${" "}${plural(node.rollouts, "rollout")} and begins no more, until it is resumed or restarted. ${alone ? "It is the only node, so nothing else begins." : ""}<//>`,
    draining: html`<${Action} label="Resume" confirm=${`Resume ${node.node}?`} run=${sends("POST", `${path}/resume`)}>It begins rollouts again.<//>`,
    dead: html`<${Action} label="Remove" danger confirm=${`Remove ${node.node} from the list?`} run=${sends("DELETE", path)}>What it worked on was queued again.<//>`,
  };
  return html`<${Card} label=${node.node} actions=${actions[node.state]}
      title=${html`<span class="node-title">${node.node}</span> <${Badge} state=${node.state} /> ${here ? html`<span class="dim plain">answers this page</span>` : null}`}>
    <div class="node">
      <div><h3>Sandboxes</h3><${Sandboxes} node=${node} />
        <dl class="pairs"><dt>In use</dt><dd>${node.in_use} of ${node.target} at the present pressure</dd>
          <dt>Warm</dt><dd>${node.warm}</dd><dt>Alive</dt><dd>${node.live} of ${node.ceiling} at most</dd>
          <dt>Waiting</dt><dd>${plural(node.waiting, "rollout")}</dd><dt>Provider</dt><dd>${node.provider}</dd>
          <dt>Limits</dt><dd>${node.enforced.join(", ") || "none are enforced"}</dd>
          ${Object.keys(node.breaches).length ? html`<dt>Reached</dt><dd>${pairs(node.breaches)}</dd>` : null}</dl></div>
      <div><h3>Pressure on the host</h3><${Pressure} node=${node} />
        ${node.holds.length ? html`<ul class="holds" aria-label="What holds sandboxes back">${node.holds.map((hold) => html`<li key=${hold.resource}>
          <${Badge} state="held" /> <${Visible} text=${hold.reason} /></li>`)}</ul>`
          : html`<p class="good-text">Nothing holds sandboxes back.</p>`}</div>
      <div><h3>Work</h3><dl class="pairs"><dt>Rollouts</dt><dd>${node.rollouts} of ${node.places} at once</dd><dt>Ended</dt><dd>${count(node.finished)}</dd>
        <dt>Heartbeat</dt><dd class=${node.silent_seconds > 5 ? "bad-text" : ""}>${seconds(node.silent_seconds)} ago</dd>
        <dt>Address</dt><dd class="mono">${node.address || "–"}</dd><dt>Labels</dt><dd>${node.labels.join(", ") || "–"}</dd>
        <dt>Environments</dt><dd>${node.environments.join(", ") || "–"}</dd>
        ${Object.keys(node.egress.refused).length ? html`<dt>Refused hosts</dt><dd>${pairs(node.egress.refused)}</dd>` : null}</dl></div>
    </div><//>`;
}

const pairs = (numbers) => Object.entries(numbers).map(([name, many]) => `${name} ${count(many)}`).join(", ");

// How much the node that answers runs at once; a change lasts until it restarts.
function Concurrency({node}) {
  const {data, error, reload} = useLive("v1/node", {every: 5});
  const may = useMay("admin");
  const [draft, setDraft] = useState({});
  const [failed, setFailed] = useState(null);
  useEffect(() => setDraft({}), [node]);
  if (!data) return html`<${Problem} error=${error} />`;
  const change = (part, field, value) => setDraft((old) => ({...old, [part]: {...old[part], [field]: Number(value)}}));
  const save = async (event) => {
    event.preventDefault();
    try {
      await send("PATCH", "v1/node", draft);
      setDraft({});
      setFailed(null);
      reload();
    } catch (problem) {
      setFailed(problem);
    }
  };
  const field = (part, name, label, least = 1) => html`<input type="number" min=${least} max="100000" required disabled=${!may} aria-label=${label}
    value=${draft[part]?.[name] ?? data[part][name]} onInput=${(event) => change(part, name, event.currentTarget.value)} />`;
  const changed = Object.keys(draft).length > 0;
  return html`<${Card} title=${`How much ${node} runs at once`}>
    <form onSubmit=${save}><table class="concurrency"><thead><tr><th scope="col">Stage</th><th scope="col">Workers</th><th scope="col">Queue</th><th scope="col" class="number">Working</th></tr></thead>
      <tbody>${["init", "rollout", "evaluate"].map((stage) => html`<tr key=${stage}><th scope="row"><${Badge} state=${stage} /></th>
        <td>${field(stage, "workers", `Workers of ${stage}`)}</td><td>${field(stage, "queue", `Queue of ${stage}`)}</td><td class="number">${data[stage].working}</td></tr>`)}
        <tr><th scope="row"><${Badge} state="sandboxes" /></th><td>${field("sandboxes", "ceiling", "Most sandboxes alive", 2)}</td><td class="dim">at most</td>
          <td class="number">${data.sandboxes.in_use}</td></tr></tbody></table>
      <${Problem} error=${failed ?? error} />
      <div class="buttons"><span class="dim">${may ? "A change lasts until the service restarts; rollout.toml keeps it." : "Your key may not change this: it needs the role admin."}</span>
        <button type="button" disabled=${!changed} onClick=${() => (setDraft({}), setFailed(null))}>Undo</button>
        <button type="submit" class="primary" disabled=${!changed || !may}>Change</button></div></form><//>`;
}
