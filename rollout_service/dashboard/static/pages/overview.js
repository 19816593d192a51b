// The service at a glance.
import {count, seconds, share} from "../lib/format.js";
import {useOverview} from "../lib/live.js";
import {href} from "../lib/router.js";
import {html} from "../lib/ui.js";
import {Badge, Bar, Card, Empty} from "../lib/widgets.js";

export function Page() {
  const now = useOverview();
  if (!now) return html`<${Empty}>Waiting for the service<//>`;
  return html`<h1>Overview</h1><div class="stack">
    <${Card} title="Stages"><table><thead><tr><th scope="col">Stage</th><th scope="col">Working</th><th scope="col">Waiting</th>
      <th scope="col">Oldest</th></tr></thead><tbody>${now.stages.map((stage) => html`<tr key=${stage.stage}>
        <th scope="row"><${Badge} state=${stage.stage} /></th>
        <td>${stage.working} of ${stage.workers} <${Bar} value=${stage.working} max=${stage.workers} tone=${stage.stage} /></td>
        <td>${stage.waiting} of ${stage.places}</td><td>${seconds(stage.oldest_seconds)}</td></tr>`)}</tbody></table><//>
    <${Card} title="Rollouts"><p>${now.finished_per_second.toFixed(2)} a second; ${share(now.success_share)} completed.</p>
      <p class="actions">${Object.entries(now.counts).map(([state, number]) => html`<a key=${state} href=${href("/rollouts", {state})}>
        <${Badge} state=${state}>${state} ${count(number)}<//></a>`)}</p><//>
  </div>`;
}
