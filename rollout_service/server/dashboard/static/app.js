// The frame around the pages: where one is, whether the data is live, the key, the colors, and the keys.
import {keyRequest, useKey} from "./lib/api.js";
import {useKeys} from "./lib/keys.js";
import {connection, overview, problem, useOverview} from "./lib/live.js";
import {go, href, useRoute} from "./lib/router.js";
import {Badge, Dialog, Problem, Visible} from "./lib/widgets.js";
import {html, render, useEffect, useErrorBoundary, useSignal, useState} from "./lib/ui.js";
import {FRAME_KEYS, FrameButtons, Help, Logo, Skip} from "./parts/frame.js";

// The pages by the first part of their path; a second part has a page of its own if it is listed.
const PAGES = {
  "": () => import("./pages/overview.js"),
  rollouts: () => import("./pages/rollouts.js"),
  "rollouts/*": () => import("./pages/rollout.js"),
  compare: () => import("./pages/compare.js"),
  runs: () => import("./pages/runs.js"),
  "runs/*": () => import("./pages/run.js"),
  sessions: () => import("./pages/sessions.js"),
  "sessions/*": () => import("./pages/session.js"),
  engines: () => import("./pages/engines.js"),
  nodes: () => import("./pages/nodes.js"),
  hangs: () => import("./pages/hangs.js"),
};
const NAVIGATION = [
  ["", "Overview", "o"], ["rollouts", "Rollouts", "r"], ["runs", "Runs", "u"], ["sessions", "Sessions", "s"],
  ["engines", "Engines", "e"], ["nodes", "Nodes", "n"], ["hangs", "Hangs", "h"],
];

const loaderOf = ({parts}) => PAGES[parts.length > 1 ? `${parts[0]}/*` : parts[0] ?? ""] ?? PAGES[parts[0]];

function Content({route}) {
  const loader = loaderOf(route);
  const [page, setPage] = useState(null);
  const [broken, forget] = useErrorBoundary((error) => console.error(error));
  useEffect(() => {
    let current = true;
    forget();
    loader?.().then(
      ({Page}) => current && setPage({Page, loader}),
      (error) => current && setPage({error, loader}),
    );
    return () => (current = false);
  }, [loader, route.path]);
  if (!loader) return html`<p class="empty">There is no page ${route.path}. <a href="#/">Overview</a></p>`;
  if (broken) return html`<${Problem} error=${broken} />`;
  if (page?.loader !== loader) return html`<p class="empty">Loading</p>`;
  return page.error ? html`<${Problem} error=${page.error} />` : html`<${page.Page} route=${route} />`;
}

function Navigation({route}) {
  const now = useOverview();
  const stuck = now?.findings.filter((finding) => finding.verdict === "stuck").length ?? 0;
  return html`<nav aria-label="Pages"><ul>
    ${NAVIGATION.map(([path, label, key]) => html`<li key=${path}>
      <a href=${href(`/${path}`)} aria-current=${(route.parts[0] ?? "") === path ? "page" : undefined} title=${`g ${key}`}>
        ${label}${path === "hangs" && stuck ? html` <span class="count bad">${stuck}</span>` : null}
      </a></li>`)}
  </ul></nav>`;
}

function Status() {
  const now = useSignal(overview);
  const state = useSignal(connection);
  return html`<div class="status">
    <span class=${`dot ${state}`} role="status">${state === "live" ? "Live" : state === "lost" ? "Not connected" : "Connecting"}</span>
    ${now ? html`<span class="dim" title="The node that answers">${now.node}</span><span class="dim">${now.version}</span>` : null}
    <${FrameButtons} />
  </div>`;
}

function Banner() {
  const now = useSignal(overview);
  const state = useSignal(connection);
  const error = useSignal(problem);
  if (error) return html`<div class="banner bad"><${Problem} error=${error} /></div>`;
  if (state === "lost") return html`<div class="banner warn" role="alert">
    The connection to the service is lost; trying again. What you see is from ${now ? new Date(now.at).toLocaleTimeString() : "before"}.</div>`;
  const stuck = now?.findings.filter((finding) => finding.verdict === "stuck") ?? [];
  if (!stuck.length) return null;
  return html`<div class="banner bad" role="alert"><${Badge} state="stuck" /> <${Visible} text=${stuck[0].message} />
    ${stuck.length > 1 ? ` And ${stuck.length - 1} more.` : ""} <a href="#/hangs">What hangs</a></div>`;
}

function KeyForm() {
  const asked = useSignal(keyRequest);
  const [value, setValue] = useState("");
  if (!asked) return null;
  const use = (event) => {
    event.preventDefault();
    if (value.trim()) useKey(value.trim());
    setValue("");
  };
  return html`<${Dialog} title="This service needs a key" class="key-form">
    <form onSubmit=${use}>
      <p>${asked.wrong ? html`<strong class="bad-text">The key is wrong.</strong> ` : ""}Any role will do to look; what a key
        may not do is disabled. It is kept in this tab until you close it.</p>
      <label for="key">Key</label>
      <input id="key" type="password" autocomplete="off" spellcheck="false" required autofocus value=${value}
        onInput=${(event) => setValue(event.currentTarget.value)} />
      <div class="buttons"><button type="submit" class="primary">Use it</button></div>
    </form>
  <//>`;
}

function App() {
  const route = useRoute();
  useKeys({
    ...Object.fromEntries(NAVIGATION.map(([path, label, key]) => [`g ${key}`, {help: label, run: () => go(`/${path}`)}])),
    ...FRAME_KEYS,
  });
  useEffect(() => {
    const name = NAVIGATION.find(([path]) => path === (route.parts[0] ?? ""))?.[1] ?? "";
    document.title = [route.parts[1], name, "Rollout service"].filter(Boolean).join(" \u00b7 ");
  }, [route.path]);
  return html`<${Skip} />
    <div class="side"><a class="brand" href="#/"><${Logo} />Rollout service</a><${Navigation} route=${route} /><${Status} /></div>
    <main id="content" tabindex="-1"><${Banner} /><${Content} route=${route} /></main>
    <${KeyForm} /><${Help} />`;
}

render(html`<${App} />`, document.getElementById("app"));
