// The frame around the page of one rollout in a file of its own.
import {get} from "./api.js";
import {time} from "../lib/format.js";
import {useKeys} from "../lib/keys.js";
import {useRoute} from "../lib/router.js";
import {html, render} from "../lib/ui.js";
import {FRAME_KEYS, FrameButtons, Help, Logo, Skip} from "../parts/frame.js";
import {Page} from "../pages/rollout.js";

function App({about}) {
  const {query} = useRoute();
  useKeys(FRAME_KEYS);
  return html`<${Skip} />
    <div class="side"><span class="brand"><${Logo} />Rollout service</span>
      <div class="status"><span>A rollout as it was saved</span><span class="dim" title=${about.saved_at}>${time(about.saved_at)}</span><span class="dim">${about.version}</span><${FrameButtons} /></div></div>
    <main id="content" tabindex="-1"><${Page} route=${{parts: ["rollouts", about.rollout_id], query}} /></main>
    <${Help} />`;
}

get("about").then((about) => render(html`<${App} about=${about} />`, document.getElementById("app")));
