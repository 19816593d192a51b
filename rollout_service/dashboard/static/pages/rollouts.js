// The rollouts, newest first.
import {ago} from "../lib/format.js";
import {useLive} from "../lib/live.js";
import {go, href, segment} from "../lib/router.js";
import {html} from "../lib/ui.js";
import {VirtualRows} from "../lib/rows.js";
import {Badge, Card, Empty, Problem} from "../lib/widgets.js";

export function Page({route}) {
  const {data, error} = useLive(`v1/summaries?${new URLSearchParams(route.query)}`);
  const rows = data?.rows ?? [];
  const open = (index) => go(`/rollouts/${segment(rows[index].rollout_id)}`);
  return html`<h1>Rollouts</h1><${Problem} error=${error} />
    ${data && !rows.length ? html`<${Empty}>No rollout matches.<//>` : null}
    <${Card} label="Rollouts"><${VirtualRows} count=${rows.length} rowHeight=${30} height="70vh" label="Rollouts" onOpen=${open}
      render=${(index) => html`<a class="mono" href=${href(`/rollouts/${segment(rows[index].rollout_id)}`)}>${rows[index].rollout_id}</a>
        ${" "}<${Badge} state=${rows[index].state} /> ${rows[index].environment}
        <span class="dim">${ago(rows[index].created_at)}</span>`} /><//>`;
}
