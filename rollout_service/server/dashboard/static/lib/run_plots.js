// How a run went over time, as plots.
import {count, number, share} from "./format.js";
import {useLive} from "./live.js";
import {Plot} from "./plot.js";
import {segment} from "./router.js";
import {html, useMemo} from "./ui.js";
import {Card, Empty, Problem} from "./widgets.js";

const POINTS = 200;
const STAGES = [
  ["queued", "--queued"], ["init", "--init"], ["engine", "--rollout"], ["tool", "--warn"], ["rollout", "--accent"], ["evaluate", "--evaluate"],
];

export function History({runId}) {
  const {data, error} = useLive(`v1/runs/${segment(runId)}/history?points=${POINTS}`);
  return html`<${Card} title="Over time"><${Problem} error=${error} />
    ${data && !data.at.length ? html`<${Empty}>No group has closed yet.<//>` : null}
    ${data?.at.length ? html`<${Plots} history=${data} />` : null}<//>`;
}

const offset = (values, by, sign) => values.map((value, index) => (value === null || by[index] === null ? null : value + sign * by[index]));

function Plots({history}) {
  const plots = useMemo(() => {
    const {reward_mean: mean, reward_std: std} = history;
    return {
      reward: [{label: "mean", values: mean, color: "--accent", low: offset(mean, std, -1), high: offset(mean, std, 1)},
        {label: "spread", values: std, color: "--dim"}],
      shares: [{label: "accepted", values: history.acceptance, color: "--good"}, {label: "failed", values: history.failed, color: "--bad"}],
      staleness: [{label: "versions", values: history.staleness, color: "--evaluate"}],
      turns: [{label: "turns", values: history.turns, color: "--rollout"}],
      tokens: [{label: "sampled tokens", values: history.tokens, color: "--init"}],
      stages: STAGES.filter(([stage]) => history.stage_shares[stage]).map(([stage, color]) => ({label: stage, values: history.stage_shares[stage], color})),
    };
  }, [history]);
  const at = history.at;
  return html`<div class="plots">
    <${Plot} title="Reward" note="mean of the groups, with the spread within them" at=${at} series=${plots.reward} format=${(value) => number(value, 3)} />
    <${Plot} title="Accepted groups, failed rollouts" at=${at} series=${plots.shares} format=${share} range=${[0, 1]} />
    <${Plot} title="Staleness" note="versions behind when a group closed" at=${at} series=${plots.staleness} format=${(value) => number(value, 1)} range=${[0, null]} />
    <${Plot} title="Turns" note="mean of a rollout" at=${at} series=${plots.turns} format=${(value) => number(value, 1)} range=${[0, null]} />
    <${Plot} title="Tokens" note="mean of a rollout" at=${at} series=${plots.tokens} format=${(value) => count(Math.round(value))} range=${[0, null]} />
    ${plots.stages.length ? html`<${Plot} title="Where the time goes" note="share of the rollouts' time" at=${at} series=${plots.stages} format=${share}
      range=${[0, 1]} stacked />` : null}
  </div>`;
}
