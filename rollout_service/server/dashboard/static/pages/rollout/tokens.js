// The tokens of a trajectory: all of them, colored by what is asked about them, to search and to walk through.
import {useKeys} from "../../lib/keys.js";
import {Problem} from "../../lib/widgets.js";
import {colorings, legend} from "../../lib/tokens/colors.js";
import {findText, segmentPlaces, step, turnPlaces, unlikelyPlaces} from "../../lib/tokens/find.js";
import {Legend, Strip, TokenFacts, TokenLines, inSight, useLoaded} from "../../lib/tokens/view.js";
import {html, useEffect, useLayoutEffect, useMemo, useRef, useState} from "../../lib/ui.js";

const whole = (value) => value.toLocaleString("en");

// Return the token `by` places from here, within its segment.
function beside(source, here, by) {
  if (!here) return {segment: 0, token: 0};
  const tokens = source.segments[here.segment];
  return {segment: here.segment, token: Math.max(0, Math.min(tokens.loaded - 1, here.token + by))};
}

function Walk({label, keys, places, onStep}) {
  return html`<span class="walk" role="group" aria-label=${label}><button type="button" aria-label=${`Previous ${label}`} disabled=${!places.length} onClick=${() => onStep(places, false)}>‹</button>
    <span>${label} <kbd>${keys}</kbd></span><button type="button" aria-label=${`Next ${label}`} disabled=${!places.length} onClick=${() => onStep(places, true)}>›</button></span>`;
}

const turnOf = (source, here) => here && source.segments[here.segment].turns[here.token];

export function Tokens({source, marks = new Map(), startTurn = null}) {
  const {loaded, problem} = useLoaded(source);
  const [way, setWay] = useState("mask");
  const [folded, setFolded] = useState(false);
  const [wanted, setWanted] = useState("");
  const [here, show] = useState(null);
  const at = useRef(null); // newer than what was drawn last, if keys are pressed fast
  const setHere = (place) => {
    at.current = place;
    show(place);
  };
  const strip = useRef(null);
  const pane = useRef(null);
  const frame = useRef(0);
  const hits = useMemo(() => findText(source, wanted), [source, wanted, loaded]);
  const turns = useMemo(() => turnPlaces(source), [source]);
  const unlikely = useMemo(() => unlikelyPlaces(source), [source, loaded]);
  const segments = useMemo(() => segmentPlaces(source), [source]);
  const look = () => {
    cancelAnimationFrame(frame.current);
    frame.current = requestAnimationFrame(() => pane.current && strip.current?.(...inSight(pane.current)));
  };
  const reveal = (place) => {
    if (!place || !pane.current || place.token >= source.segments[place.segment].loaded) return false;
    pane.current.setHere(place, true);
    return void setHere(place);
  };
  const walk = (places, forward) => reveal(step(places, at.current, forward));
  const started = useRef(false);
  useEffect(() => {
    look();
    if (startTurn === null || started.current) return;
    const place = turns.find(({turn}) => turn === startTurn);
    if (place && reveal(place) !== false) started.current = true;
  }, [source, loaded, folded]);
  useLayoutEffect(() => { // before the next key: an Enter would go on, and then be taken back to the first match
    if (wanted && hits.length) reveal(hits[0]);
  }, [wanted]);
  useKeys({
    n: {help: "Next match", run: () => (wanted ? walk(hits, true) : false)}, N: {help: "Previous match", run: () => (wanted ? walk(hits, false) : false)},
    e: {help: "Next turn", run: () => walk(turns, true)}, E: {help: "Previous turn", run: () => walk(turns, false)},
    s: {help: "Next segment", run: () => walk(segments, true)}, S: {help: "Previous segment", run: () => walk(segments, false)},
    u: {help: "Next unlikely token", run: () => walk(unlikely, true)}, U: {help: "Previous unlikely token", run: () => walk(unlikely, false)},
    ArrowRight: {help: "Next token", run: (event) => (event.target.closest?.(".token-lines") ? reveal(beside(source, at.current, 1)) : false)},
    ArrowLeft: {help: "Previous token", run: (event) => (event.target.closest?.(".token-lines") ? reveal(beside(source, at.current, -1)) : false)},
  });
  return html`<section class="tokens" aria-label="Tokens">
    <div class="tool-row">
      <span class="toggles" role="group" aria-label="Color by">${colorings(source).map(([name, label]) => html`<button type="button" key=${name} aria-pressed=${way === name ? "true" : "false"} onClick=${() => setWay(name)}>${label}</button>`)}</span>
      <${Legend} entries=${legend(way, source)} />
    </div>
    <div class="tool-row">
      <${Walk} label="turn" keys="e" places=${turns} onStep=${walk} />
      ${source.segments.length > 1 ? html`<${Walk} label="segment" keys="s" places=${segments} onStep=${walk} />` : null}
      <${Walk} label="unlikely token" keys="u" places=${unlikely} onStep=${walk} />
      ${source.segments.some((tokens) => tokens.outline.shared_prefix) ? html`<label class="filter"><input type="checkbox" checked=${folded} onChange=${() => setFolded(!folded)} />without shared prefixes</label>` : null}
      <span class="spacer"></span>
      <label class="filter">Search<input type="search" data-search="" value=${wanted} placeholder="/" onInput=${(event) => setWanted(event.currentTarget.value)}
        onKeyDown=${(event) => event.key === "Enter" && (event.preventDefault(), walk(event.currentTarget.value === wanted ? hits : findText(source, event.currentTarget.value), !event.shiftKey))} /></label>
      <span class="dim" role="status">${wanted ? `${whole(hits.length)} found` : loaded < source.total ? `${whole(loaded)} of ${whole(source.total)} tokens` : `${whole(source.total)} tokens`}</span>
      <button type="button" disabled=${!hits.length} onClick=${() => walk(hits, false)} aria-label="Previous match">↑</button>
      <button type="button" disabled=${!hits.length} onClick=${() => walk(hits, true)} aria-label="Next match">↓</button>
    </div>
    <${Problem} error=${problem} />
    ${source.outline.has_text ? null : html`<p class="dim">The tokenizer of this pool is not known to this service, so tokens are shown as ids.</p>`}
    <${Strip} source=${source} loaded=${loaded} show=${strip} onGo=${reveal} />
    <${TokenLines} source=${source} loaded=${loaded} way=${way} folded=${folded} hits=${hits} marks=${marks} here=${here} onHere=${setHere} pane=${pane} onScroll=${look} />
    <${TokenFacts} source=${source} place=${here} mark=${marks.get(turnOf(source, here))} />
  </section>`;
}
