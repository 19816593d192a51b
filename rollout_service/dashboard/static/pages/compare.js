// Rollouts side by side.
import {useLive} from "../lib/live.js";
import {html} from "../lib/ui.js";
import {Badge, Card, Empty, Problem, Visible} from "../lib/widgets.js";

export function Page({route}) {
  const ids = (route.query.ids ?? "").split(",").filter(Boolean);
  return html`<h1>Compare</h1>${ids.length ? null : html`<${Empty}>Choose rollouts in the list.<//>`}
    <div class="grid">${ids.map((id) => html`<${One} key=${id} id=${id} />`)}</div>`;
}

function One({id}) {
  const {data, error} = useLive(`v1/rollouts/${encodeURIComponent(id)}?trajectory=false`);
  return html`<div style=${{gridColumn: "span 6"}}><${Card} title=${id} actions=${data && html`<${Badge} state=${data.state} />`}>
    <${Problem} error=${error} />${data ? html`<pre><${Visible} text=${JSON.stringify(data, null, 2)} /></pre>` : null}<//></div>`;
}
