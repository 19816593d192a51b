// The runs.
import {share} from "../lib/format.js";
import {useLive} from "../lib/live.js";
import {href, segment} from "../lib/router.js";
import {html} from "../lib/ui.js";
import {Badge, Card, Empty, Problem} from "../lib/widgets.js";

export function Page() {
  const {data, error} = useLive("v1/runs");
  return html`<h1>Runs</h1><${Problem} error=${error} />
    ${data && !data.runs.length ? html`<${Empty}>There is no run.<//>` : null}
    ${data?.runs.length ? html`<${Card} label="Runs"><table><thead><tr><th scope="col">Run</th><th scope="col">State</th><th scope="col">Accepted</th>
      <th scope="col">Version</th></tr></thead><tbody>${data.runs.toReversed().map((run) => html`<tr key=${run.run_id}>
        <th scope="row"><a class="mono" href=${href(`/runs/${segment(run.run_id)}`)}>${run.run_id}</a></th>
        <td><${Badge} state=${run.state} /></td><td>${share(run.acceptance_rate)}</td><td>${run.version}</td></tr>`)}</tbody></table><//>` : null}`;
}
