// A part of a live session: what became of each turn, and what its users and judges said of it.
import {count, number, time} from "../../lib/format.js";
import {href, segment} from "../../lib/router.js";
import {LongText} from "../../lib/texts/view.js";
import {Badge, Empty, Problem, Visible} from "../../lib/widgets.js";
import {html} from "../../lib/ui.js";
import {useAnswer} from "./data.js";

const words = (text) => String(text).replaceAll("_", " ");

export const toneOf = (mark) => (mark.value === null || mark.value === undefined ? "none" : mark.value > 0 ? "plus" : mark.value < 0 ? "minus" : "zero");

// Return what to write beside a turn, by turn id: {label, tone, title}.
export function marksOf(turnMarks) {
  return new Map((turnMarks ?? []).map((mark) => {
    const value = mark.value === null || mark.value === undefined ? "" : `${mark.value > 0 ? "+" : ""}${number(mark.value)}`;
    const masked = mark.masked_because ? `masked: ${words(mark.masked_because)}` : "";
    const title = [mark.usable ? "trained on" : "not trained on", mark.reason && words(mark.reason), mark.source].filter(Boolean).join(", ");
    return [mark.turn, {label: [value, masked].filter(Boolean).join(" ") || (mark.usable ? "trained on" : "not decided"), tone: toneOf(mark), title}];
  }));
}

const votes = (mark) => (mark.votes ? `+${mark.votes.plus} 0:${mark.votes.zero} −${mark.votes.minus}${mark.votes.failed ? ` failed ${mark.votes.failed}` : ""}` : "–");

function Turn({mark, id}) {
  return html`<tr><td><a href=${href(`/rollouts/${segment(id)}`, {tab: "tokens", turn: mark.turn})}>${mark.turn}</a></td><td>${mark.kind}</td>
    <td><span class=${`vote vote-${toneOf(mark)}`}>${mark.value === null || mark.value === undefined ? "–" : number(mark.value)}</span></td>
    <td>${mark.usable ? html`<${Badge} state="completed">trained on<//>` : html`<${Badge} state="cancelled">${mark.masked_because ? words(mark.masked_because) : "not decided"}<//>`}</td>
    <td>${mark.reason ? words(mark.reason) : "–"}</td><td>${mark.source ?? "–"}</td><td class="nowrap">${votes(mark)}</td>
    <td>${mark.next_state ? `${mark.next_state.role}, ${count(mark.next_state.chars)} characters` : "–"}${mark.next_state?.text ? html`<${LongText} text=${mark.next_state.text} label="Next state" />` : null}</td>
    <td>${mark.hint ? html`<${LongText} text=${mark.hint.text} label="Hint" />` : "–"}</td></tr>`;
}

export function Session({rollout}) {
  const {session} = rollout;
  const own = rollout.turn_marks ?? [];
  const asked = useAnswer(session && !own.length ? `v1/sessions/${segment(session.session_id)}` : null);
  const marks = own.length ? own : asked.data?.turns ?? [];
  return html`<section aria-label="Session">
    ${session ? html`<dl class="facts"><div class="fact"><dt>session</dt><dd class="mono"><bdi><${Visible} text=${session.session_id} /></bdi></dd></div><div class="fact"><dt>part</dt><dd>${session.part}</dd></div>
      <div class="fact"><dt>user</dt><dd class="mono">${session.user}</dd></div><div class="fact"><dt>tenant</dt><dd>${session.tenant}</dd></div>
      <div class="fact"><dt>opened</dt><dd>${time(session.opened_at)}</dd></div><div class="fact"><dt>closed</dt><dd>${session.closed_at ? `${time(session.closed_at)}, ${words(session.closed_because ?? "")}` : "open"}</dd></div></dl>` : null}
    <${Problem} error=${asked.error} />
    ${marks.length ? html`<table><thead><tr>${["Turn", "Kind", "Value", "Use", "Reason", "Source", "Votes", "What followed", "Hint"].map((head) => html`<th scope="col" key=${head}>${head}</th>`)}</tr></thead>
      <tbody>${marks.map((mark) => html`<${Turn} key=${mark.turn} mark=${mark} id=${rollout.rollout_id} />`)}</tbody></table>`
      : html`<${Empty}>No turn marks are stored with this part.<//>`}
  </section>`;
}
