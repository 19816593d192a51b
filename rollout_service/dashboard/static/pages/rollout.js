// One rollout.
import {useLive} from "../lib/live.js";
import {html} from "../lib/ui.js";
import {Badge, Card, Problem, Visible} from "../lib/widgets.js";

export function Page({route}) {
  const id = route.parts[1];
  const {data, error} = useLive(`v1/rollouts/${encodeURIComponent(id)}?trajectory=false`);
  return html`<h1 class="mono">${id}</h1><${Problem} error=${error} />
    ${data ? html`<${Card} title=${data.task.environment} actions=${html`<${Badge} state=${data.state} />`}>
      <pre><${Visible} text=${JSON.stringify(data, null, 2)} /></pre><//>` : null}`;
}
