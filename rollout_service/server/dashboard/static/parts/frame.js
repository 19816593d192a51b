// The parts of a frame that do not depend on what is in it: the logo, the buttons and keys for help and colors, and the
// link to the content.
import {helpOpen, knownKeys} from "../lib/keys.js";
import {toggleTheme} from "../lib/theme.js";
import {Dialog} from "../lib/widgets.js";
import {html, useSignal} from "../lib/ui.js";

export const Logo = () => html`<svg viewBox="0 0 16 16" width="18" height="18" aria-hidden="true"><rect width="16" height="16" rx="4" class="logo-back" />
  <path class="logo-line" d="M4 11V5h4.2a2 2 0 0 1 .4 4L11.5 12M4 8.9h4" /></svg>`;

export const FRAME_KEYS = {
  "?": {help: "These keys", run: () => void (helpOpen.value = true)},
  t: {help: "Light or dark", run: () => void toggleTheme()},
  "/": {help: "Search", run: () => {
    const field = document.querySelector("[data-search]");
    return field ? void field.focus() : false;
  }},
};

export const FrameButtons = () => html`<span class="status-buttons">
  <button type="button" class="quiet" onClick=${toggleTheme} title="Light or dark (t)">Theme</button>
  <button type="button" class="quiet" onClick=${() => (helpOpen.value = true)} title="Keys (?)">Keys</button>
</span>`;

export function Help() {
  const open = useSignal(helpOpen);
  if (!open) return null;
  const close = () => (helpOpen.value = false);
  return html`<${Dialog} title="Keys" onClose=${close}>
    <dl class="keys">${knownKeys().map(([key, help]) => html`<div key=${key}>
      <dt>${key.split(" ").map((one) => html`<kbd>${one}</kbd> `)}</dt><dd>${help}</dd></div>`)}</dl>
    <div class="buttons"><button type="button" class="primary" autofocus onClick=${close}>Close</button></div>
  <//>`;
}

export const Skip = () => html`<a class="skip" href="#content" onClick=${(event) => {
  event.preventDefault();
  document.getElementById("content").focus();
}}>To the content</a>`;
