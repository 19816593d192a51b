// The engines of all pools.
import {count, seconds, share} from "../lib/format.js";
import {useOverview} from "../lib/live.js";
import {html} from "../lib/ui.js";
import {Badge, Card, Empty, Visible} from "../lib/widgets.js";

export function Page() {
  const now = useOverview();
  if (!now) return html`<${Empty}>Waiting for the service<//>`;
  if (!now.backends.length) return html`<h1>Engines</h1><${Empty}>No engine is registered.<//>`;
  return html`<h1>Engines</h1><${Card}><table><thead><tr>${["Engine", "Pool", "State", "In flight", "Cached", "Median", "Version"].map(
    (name) => html`<th scope="col" key=${name}>${name}</th>`)}</tr></thead>
    <tbody>${now.backends.map(({backend, ...figures}) => html`<tr key=${backend.backend_id}>
      <th scope="row" class="mono"><${Visible} text=${backend.url} /></th><td>${backend.pool}</td><td><${Badge} state=${backend.state} /></td>
      <td>${count(backend.in_flight)}</td><td>${share(figures.cached_share)}</td><td>${seconds(figures.p50_seconds)}</td>
      <td>${backend.weight_version}</td></tr>`)}</tbody></table><//>`;
}
