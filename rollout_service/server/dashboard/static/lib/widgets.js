// The parts that pages share.
import {send} from "./api.js";
import {useMay} from "./live.js";
import {html, useEffect, useRef, useState} from "./ui.js";
import {visible} from "./text.js";

export function Card({title, actions, children, class: kind = "", label}) {
  return html`<section class=${`card ${kind}`} aria-label=${label ?? title}>
    ${title || actions ? html`<header><h2>${title}</h2><div class="actions">${actions}</div></header>` : null}
    ${children}
  </section>`;
}

// A bar for `value` of `max`; `label` is what a screen reader says.
export function Bar({value, max = 1, tone = "", label}) {
  const part = max > 0 ? Math.min(1, Math.max(0, value / max)) : 0;
  return html`<span class="bar" role="img" aria-label=${label ?? `${Math.round(part * 100)} %`}>
    <span class=${`bar-fill ${tone}`} style=${{width: `${part * 100}%`}}></span>
  </span>`;
}

const TONES = {
  completed: "good", ready: "good", running: "good", acknowledged: "good", live: "good", alive: "good",
  failed: "bad", dead: "bad", stuck: "bad", dropped: "bad",
  cancelled: "dim", ended: "dim", draining: "warn", paused: "warn", slow: "warn", held: "warn", canceling: "warn",
  queued: "queued", init: "init", rollout: "rollout", evaluate: "evaluate", open: "rollout", batched: "evaluate",
};

export const Badge = ({state, children}) =>
  html`<span class=${`badge ${TONES[state] ?? "dim"}`}>${children ?? String(state).replaceAll("_", " ")}</span>`;

export const Empty = ({children}) => html`<p class="empty">${children}</p>`;

export function Problem({error}) {
  if (!error) return null;
  return html`<div class="problem" role="alert">
    <strong>${error.code ?? error.name}</strong> <span><${Visible} text=${error.detail ?? error.message} /></span>
    ${error.hint ? html` <span class="dim">${error.hint}</span>` : null}
  </div>`;
}

// Text of others; characters that cannot be seen are marks.
export function Visible({text}) {
  return visible(String(text ?? "")).map((part) =>
    typeof part === "string"
      ? part
      : html`<span class="mark" title=${`U+${part.code.toString(16).toUpperCase().padStart(4, "0")}`}>${part.mark}</span>`);
}

// A dialog over the page. `onClose` is called for Esc too.
export function Dialog({title, onClose, children, class: kind = ""}) {
  const element = useRef(null);
  useEffect(() => {
    element.current.showModal();
  }, []);
  return html`<dialog ref=${element} class=${kind} aria-label=${title}
      onCancel=${(event) => (event.preventDefault(), onClose?.())}>
    <h2>${title}</h2>${children}
  </dialog>`;
}

// Ask before something is done: `onConfirm` may be asynchronous, and its error is shown.
export function Confirm({title, action = "OK", danger = false, onConfirm, onClose, children}) {
  const [state, setState] = useState({busy: false, error: null});
  const confirm = async (event) => {
    event.preventDefault();
    setState({busy: true, error: null});
    try {
      await onConfirm();
      onClose();
    } catch (error) {
      setState({busy: false, error});
    }
  };
  return html`<${Dialog} title=${title} onClose=${onClose}>
    <form onSubmit=${confirm}>
      <div class="dialog-text">${children}</div>
      <${Problem} error=${state.error} />
      <div class="buttons">
        <button type="button" onClick=${onClose}>Back</button>
        <button type="submit" class=${danger ? "danger" : "primary"} disabled=${state.busy}>${action}</button>
      </div>
    </form>
  <//>`;
}

// A button that asks first. It is disabled, and says why, if the key in use does not allow what it does. The page may draw
// another action in this place while the question is open: it stays as it was, so that a click confirms what was asked.
export function Action({label, needs = "admin", title, danger, confirm, run, disabled, children}) {
  const [open, setOpen] = useState(false);
  const asked = useRef(null);
  const may = useMay(needs);
  const reason = may ? undefined : `Your key may not do this: it needs the role ${needs}`;
  const question = {title: confirm ?? `${label}?`, action: label, danger, onConfirm: run, children};
  if (!open || asked.current.action === label) asked.current = question;
  return html`<button type="button" class=${danger ? "danger" : ""} disabled=${!may || disabled}
      title=${reason ?? title} onClick=${() => setOpen(true)}>${label}</button>
    ${open ? html`<${Confirm} ...${asked.current} onClose=${() => setOpen(false)} />` : null}`;
}

// Return a function for `Action.run` that sends a request.
export const sends = (method, path, body) => () => send(method, path, body);

// Tabs: `tabs` is [[id, label]]; the arrow keys move between them. The caller draws what `current` says.
export function Tabs({tabs, current, onChange, label}) {
  const list = useRef(null);
  const step = (event) => {
    const by = {ArrowRight: 1, ArrowLeft: -1}[event.key];
    if (!by) return;
    const index = tabs.findIndex(([id]) => id === current);
    const next = (index + by + tabs.length) % tabs.length;
    onChange(tabs[next][0]);
    list.current.children[next].focus();
    event.preventDefault();
  };
  return html`<div class="tabs" role="tablist" aria-label=${label} ref=${list} onKeyDown=${step}>
    ${tabs.map(([id, text]) => html`<button type="button" role="tab" key=${id} aria-selected=${id === current ? "true" : "false"}
      tabindex=${id === current ? 0 : -1} onClick=${() => onChange(id)}>${text}</button>`)}
  </div>`;
}

// A button that copies a text, where the browser allows it.
export function Copy({text, label = "Copy"}) {
  const [done, setDone] = useState(false);
  const copy = async () => {
    try {
      await navigator.clipboard.writeText(text);
      setDone(true);
      setTimeout(() => setDone(false), 1500);
    } catch {
      // without HTTPS a browser may refuse; the text can still be selected
    }
  };
  return html`<button type="button" class="quiet" onClick=${copy} title=${`Copy ${text}`}>${done ? "Copied" : label}</button>`;
}
