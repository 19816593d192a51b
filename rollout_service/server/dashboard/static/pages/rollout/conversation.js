// The conversation: who said what, with the tools' calls, results and times. Kinds can be left out, and all of it searched.
import {count, seconds} from "../../lib/format.js";
import {useKeys} from "../../lib/keys.js";
import {href} from "../../lib/router.js";
import {LongText} from "../../lib/texts/view.js";
import {flat, occurrences} from "../../lib/texts/rows.js";
import {Badge, Copy, Visible} from "../../lib/widgets.js";
import {html, useEffect, useMemo, useRef, useState} from "../../lib/ui.js";
import {toolSteps} from "./data.js";

const AT_ONCE = 300;
const KINDS = [["system", "system"], ["user", "user"], ["assistant", "assistant"], ["reasoning", "reasoning"], ["calls", "tool calls"], ["tool", "tool results"]];
const kindOf = (role) => (role === "developer" ? "system" : role);

// Return the arguments of a call as [name, text].
export function argumentsOf(call) {
  return Object.entries(call.arguments ?? {}).map(([name, value]) => [name, typeof value === "string" ? value : JSON.stringify(value, null, 1)]);
}

// Return each message with its turn, the times of its calls, and the texts that are searched: [{field, text}].
export function annotated(messages, turns, steps) {
  const calls = toolSteps(steps);
  const begun = new Map();
  const ended = new Map();
  const next = (seen, id) => {
    const at = seen.get(id) ?? 0;
    seen.set(id, at + 1);
    return calls.get(id)?.[at] ?? null;
  };
  const assistants = messages.filter((message) => message.role === "assistant").length;
  let turn = 0;
  return messages.map((message, index) => {
    const own = message.role === "assistant" && assistants === turns ? turn : null;
    if (message.role === "assistant") turn += 1;
    const tools = message.tool_calls.map((call) => next(begun, call.id));
    const step = message.role === "tool" && message.tool_call_id ? next(ended, message.tool_call_id) : null;
    return {message, index, turn: own, tools, step, texts: textsOf(message)};
  });
}

function textsOf(message) {
  const texts = [];
  if (message.reasoning) texts.push({field: "reasoning", kind: "reasoning", text: message.reasoning});
  if (message.content) texts.push({field: "content", kind: kindOf(message.role), text: message.content});
  message.tool_calls.forEach((call, index) => {
    for (const [name, text] of call.arguments ? argumentsOf(call) : [["raw", call.raw]]) texts.push({field: `call ${index} ${name}`, kind: "calls", text});
  });
  return texts;
}

// Return where a text occurs in what is shown: [{message, field, at}].
export function search(entries, wanted, shown) {
  const found = [];
  if (!wanted) return found;
  for (const entry of entries) {
    for (const {field, kind, text} of entry.texts) {
      if (!shown[kind]) continue;
      for (const at of occurrences(text, wanted, 2000 - found.length)) found.push({message: entry.index, field, at});
    }
  }
  return found;
}

const Time = ({step}) => step ? html`<span class="step-time" title=${`began ${step.started_at}`}>${seconds(step.seconds)}</span>${step.error ? html` <${Badge} state="failed">${step.error}<//>` : null}` : null;

function Call({call, step, index, wanted, focus}) {
  const at = (name) => (focus?.field === `call ${index} ${name}` ? focus.at : null);
  return html`<div class=${`tool-call ${call.error ? "malformed" : ""}`}>
    <div class="call-head"><bdi class="call-name mono"><${Visible} text=${call.name ?? "?"} /></bdi> <bdi class="dim mono"><${Visible} text=${call.id} /></bdi> <${Time} step=${step} />
      ${call.error ? html` <${Badge} state="failed">malformed: ${call.error}<//>` : null}</div>
    ${call.arguments
      ? argumentsOf(call).map(([name, text]) => html`<div class="call-argument" key=${name}><bdi class="dim mono argument-name"><${Visible} text=${name} /></bdi><div class="mono argument-text"><${LongText} text=${text} wanted=${wanted} at=${at(name)} label=${`Argument ${flat(name)}`} /></div></div>`)
      : html`<div class="mono argument-text"><${LongText} text=${call.raw} wanted=${wanted} at=${at("raw")} label="The call as it was sampled" /></div>`}
  </div>`;
}

function Message({entry, shown, wanted, focus, turnStep, mark, tokensLink}) {
  const {message, turn, step, tools} = entry;
  const role = kindOf(message.role);
  const at = (field) => (focus?.field === field ? focus.at : null);
  return html`<article class=${`message role-${role}`} id=${`message-${entry.index}`} data-role=${role} aria-label=${`${message.role}, message ${entry.index + 1}`}>
    <div class="message-side">
      <strong>${message.role}</strong>
      ${message.name ? html`<span class="mono ellipsis"><${Visible} text=${message.name} /></span>` : null}
      ${turn === null ? null : html`<a href=${tokensLink(turn)} title="Its tokens">turn ${turn}</a>`}
      ${turnStep ? html`<span class="dim">${seconds(turnStep.seconds)}</span>${turnStep.detail.version === undefined ? null : html`<span class="dim">weights ${turnStep.detail.version}</span>`}` : null}
      <${Time} step=${step} />
      ${mark ? html`<span class=${`vote vote-${mark.tone}`} title=${mark.title}>${mark.label}</span>` : null}
    </div>
    <div class="message-body">
      ${message.reasoning && shown.reasoning ? html`<div class="reasoning"><${LongText} text=${message.reasoning} wanted=${wanted} at=${at("reasoning")} label="Reasoning" /></div>` : null}
      ${message.content && shown[role] ? html`<div class=${role === "tool" ? "mono tool-result" : ""}><${LongText} text=${message.content} wanted=${wanted} at=${at("content")} label=${`Text of message ${entry.index + 1}`} /></div>` : null}
      ${shown.calls ? message.tool_calls.map((call, index) => html`<${Call} key=${index} call=${call} index=${index} step=${tools[index]} wanted=${wanted} focus=${focus} />`) : null}
    </div>
    <div class="message-end">${message.content ? html`<${Copy} text=${message.content} />` : null}</div>
  </article>`;
}

const isShown = (entry, shown) => entry.texts.some(({kind}) => shown[kind])
  || (entry.message.tool_calls.length > 0 && shown.calls) || (entry.texts.length === 0 && shown[kindOf(entry.message.role)]);

export function Conversation({messages, turns, steps, turnSteps = new Map(), marks = new Map(), tokensLink = () => href("/")}) {
  const [shown, setShown] = useState(Object.fromEntries(KINDS.map(([kind]) => [kind, true])));
  const [wanted, setWanted] = useState("");
  const [current, setCurrent] = useState(-1);
  const [limit, setLimit] = useState(AT_ONCE);
  const list = useRef(null);
  const entries = useMemo(() => annotated(messages, turns, steps), [messages, turns, steps]);
  const found = useMemo(() => search(entries, wanted, shown), [entries, wanted, shown]);
  const kept = entries.filter((entry) => isShown(entry, shown));
  const focus = current >= 0 ? found[current] : null;
  const look = (text, kinds) => {
    setWanted(text);
    setShown(kinds);
    setCurrent(-1);
  };
  // `text` may be newer than what was drawn last, if a person types fast.
  const move = (by, text = wanted) => {
    const places = text === wanted ? found : search(entries, text, shown);
    if (!places.length) return false;
    const from = text !== wanted || current < 0 ? (by > 0 ? -1 : 0) : current;
    const next = (from + by + places.length) % places.length;
    setLimit((old) => Math.max(old, places[next].message + 1));
    return void setCurrent(next);
  };
  useEffect(() => {
    if (focus) list.current?.querySelector(`#message-${focus.message}`)?.scrollIntoView({block: "nearest"});
  }, [focus]);
  useKeys({n: {help: "Next match", run: () => move(1)}, N: {help: "Previous match", run: () => move(-1)}});
  return html`<section class="conversation" aria-label="Conversation">
    <div class="tool-row">
      <span role="group" aria-label="Kinds of messages" class="toggles">${KINDS.map(([kind, label]) => html`<button type="button" key=${kind} aria-pressed=${shown[kind] ? "true" : "false"} onClick=${() => look(wanted, {...shown, [kind]: !shown[kind]})}>${label}</button>`)}</span>
      <span class="spacer"></span>
      <label class="filter">Search<input type="search" data-search="" value=${wanted} placeholder="/" onInput=${(event) => look(event.currentTarget.value, shown)}
        onKeyDown=${(event) => event.key === "Enter" && (event.preventDefault(), move(event.shiftKey ? -1 : 1, event.currentTarget.value))} /></label>
      <span class="dim" role="status">${wanted ? `${current >= 0 ? `${current + 1} of ` : ""}${count(found.length)} found` : `${count(messages.length)} messages`}</span>
      <button type="button" disabled=${!found.length} onClick=${() => move(-1)} aria-label="Previous match">↑</button>
      <button type="button" disabled=${!found.length} onClick=${() => move(1)} aria-label="Next match">↓</button>
    </div>
    <div ref=${list}>${kept.slice(0, limit).map((entry) => html`<${Message} key=${entry.index} entry=${entry} shown=${shown} wanted=${wanted}
      focus=${focus?.message === entry.index ? focus : null} turnStep=${entry.turn === null ? null : turnSteps.get(entry.turn)} mark=${entry.turn === null ? null : marks.get(entry.turn)} tokensLink=${tokensLink} />`)}</div>
    ${kept.length ? null : html`<p class="empty">No message of these kinds.</p>`}
    ${kept.length > limit ? html`<button type="button" onClick=${() => setLimit(limit + AT_ONCE)}>Show ${count(Math.min(AT_ONCE, kept.length - limit))} more of ${count(kept.length - limit)}</button>` : null}
  </section>`;
}
