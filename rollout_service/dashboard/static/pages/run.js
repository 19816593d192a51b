// One run.
import {useLive} from "../lib/live.js";
import {html} from "../lib/ui.js";
import {Badge, Card, Problem, Visible} from "../lib/widgets.js";

export function Page({route}) {
  const id = route.parts[1];
  const {data, error} = useLive(`v1/runs/${encodeURIComponent(id)}`);
  return html`<h1 class="mono">${id}</h1><${Problem} error=${error} />
    ${data ? html`<${Card} title="Run" actions=${html`<${Badge} state=${data.state} />`}>
      <pre><${Visible} text=${JSON.stringify(data, null, 2)} /></pre><//>` : null}`;
}
