// What is stuck, slow or held back.
import {seconds} from "../lib/format.js";
import {useOverview} from "../lib/live.js";
import {href, segment} from "../lib/router.js";
import {html} from "../lib/ui.js";
import {Badge, Card, Empty, Visible} from "../lib/widgets.js";

export function Page() {
  const now = useOverview();
  if (!now) return html`<${Empty}>Waiting for the service<//>`;
  return html`<h1>Hangs</h1>${now.findings.length ? null : html`<${Empty}>Nothing takes longer than its history says.<//>`}
    <div class="stack">${now.findings.map((finding) => html`<${Card} key=${finding.finding_id}
      title=${html`<${Badge} state=${finding.verdict} /> <${Visible} text=${finding.message} />`} label=${finding.message}>
      <p>For ${seconds(finding.seconds)}; ${finding.count} rollouts. <${Visible} text=${finding.hint} /></p>
      <p>${finding.rollouts.map((id) => html`<a key=${id} class="mono" href=${href(`/rollouts/${segment(id)}`)}>${id}</a> `)}</p><//>`)}</div>`;
}
