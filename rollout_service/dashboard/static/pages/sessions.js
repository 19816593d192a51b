// The live sessions.
import {ago} from "../lib/format.js";
import {useLive} from "../lib/live.js";
import {html} from "../lib/ui.js";
import {Badge, Card, Empty, Problem} from "../lib/widgets.js";

export function Page() {
  const {data, error} = useLive("v1/sessions");
  return html`<h1>Sessions</h1><${Problem} error=${error} />
    ${data && !data.sessions.length ? html`<${Empty}>There is no live session.<//>` : null}
    ${data?.sessions.length ? html`<${Card} label="Sessions"><table><thead><tr><th scope="col">Session</th><th scope="col">State</th><th scope="col">Used</th></tr></thead>
      <tbody>${data.sessions.map((session) => html`<tr key=${session.session_id}><th scope="row" class="mono">${session.session_id}</th>
        <td><${Badge} state=${session.state} /></td><td>${ago(session.used_at)}</td></tr>`)}</tbody></table><//>` : null}`;
}
