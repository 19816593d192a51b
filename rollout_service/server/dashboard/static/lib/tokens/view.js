// Tokens as a component: the lines, the strip above them, and what is known of the token that is pointed at.

import {html, useEffect, useRef, useState} from "../ui.js";
import {drawStrip, placeAt, shareOf} from "./strip.js";
import {LINE_BREAK, bytesOf, tokenParts} from "./shown.js";
import {TokenPane} from "./pane.js";

// Loads a source and counts the ranges that came, so that what depends on the tokens is made anew.
export function useLoaded(source) {
  const [loaded, setLoaded] = useState(0);
  const [problem, setProblem] = useState(null);
  useEffect(() => {
    setLoaded(0);
    setProblem(null);
    if (!source) return undefined;
    const stop = new AbortController();
    source.load(() => setLoaded(source.loaded), stop.signal).catch((error) => {
      if (!stop.signal.aborted) setProblem(error);
    });
    return () => stop.abort();
  }, [source]);
  return {loaded, problem};
}

// The lines. `pane` is a ref that gets the TokenPane; `onScroll` is told of each scrolling.
export function TokenLines({source, loaded, way = "mask", folded = false, hits, marks, differs, here, onHere, pane, onScroll, label}) {
  const scroller = useRef(null);
  const own = useRef(null);
  const picked = useRef(onHere);
  picked.current = onHere;
  useEffect(() => {
    const made = new TokenPane(scroller.current, source, (place) => picked.current?.(place));
    own.current = made;
    if (pane) pane.current = made;
    return () => {
      made.close();
      own.current = null;
      if (pane) pane.current = null;
    };
  }, [source]);
  useEffect(() => own.current?.extend(), [source, loaded]);
  useEffect(() => own.current?.setWay(way), [source, way]);
  useEffect(() => own.current?.setFolded(folded), [source, folded]);
  useEffect(() => own.current?.setHits(hits ?? []), [source, hits]);
  useEffect(() => own.current?.setMarks(marks ?? new Map()), [source, marks]);
  useEffect(() => own.current?.setDiffers(differs ?? null), [source, differs]);
  useEffect(() => own.current?.setHere(here ?? null, false), [source, here]);
  return html`<div class="token-lines" ref=${scroller} tabindex="0" role="region" aria-label=${label ?? "Tokens"}
    onScroll=${onScroll} data-way=${way}></div>`;
}

// The strip; a click, or the arrow keys, go to that part of the trajectory. `show` is a ref that gets a function which
// marks what is in sight, as shares: it is called in each frame of a scroll, and draws nothing anew.
export function Strip({source, loaded, show, onGo}) {
  const box = useRef(null);
  const canvas = useRef(null);
  const view = useRef([0, 0]);
  useEffect(() => {
    const strip = box.current; // a frame of a scroll may show once more when it has left the document
    const sight = strip.lastElementChild;
    show.current = (from, to) => {
      view.current = [from, to];
      sight.style.left = `${100 * from}%`;
      sight.style.width = `${100 * Math.max(0.002, to - from)}%`;
      strip.setAttribute("aria-valuenow", String(Math.round(100 * from)));
    };
    return () => (show.current = null);
  }, []);
  useEffect(() => {
    const element = canvas.current; // the observer may tell once more when it has left the document
    const draw = () => drawStrip(element, source);
    draw();
    const observer = new ResizeObserver(draw);
    observer.observe(element);
    const themes = new MutationObserver(draw);
    themes.observe(document.documentElement, {attributeFilter: ["data-theme"]});
    return () => (observer.disconnect(), themes.disconnect());
  }, [source, loaded]);
  const go = (share) => {
    const place = placeAt(source, share);
    if (place) onGo(place);
  };
  const onKey = (event) => {
    const way = {ArrowLeft: -0.02, ArrowRight: 0.02, PageUp: -0.1, PageDown: 0.1}[event.key];
    if (way === undefined) return;
    event.preventDefault();
    go(view.current[0] + way);
  };
  const onClick = (event) => {
    const {left, width} = box.current.getBoundingClientRect();
    go((event.clientX - left) / width);
  };
  return html`<div class="token-strip" ref=${box} role="slider" tabindex="0" aria-label="Position in the trajectory"
    aria-valuemin="0" aria-valuemax="100" aria-valuenow="0" title="The least likely token at each place; click to go there"
    onKeyDown=${onKey} onClick=${onClick}><canvas ref=${canvas}></canvas><div class="strip-sight"></div></div>`;
}

// The part of the strip that a pane shows.
export function inSight(pane) {
  const {rows, viewport, source} = pane;
  const share = (index) => {
    const row = rows.row(Math.max(0, Math.min(rows.count - 1, index)));
    return shareOf(source, {segment: row.segment, token: row.first});
  };
  return rows.count ? [share(viewport.first), share(viewport.first + viewport.visible)] : [0, 1];
}

const number = (value, digits = 4) => (Number.isNaN(value) ? "–" : value.toFixed(digits));

// Return a text with marks; with `breaks`, lines break after the mark of a line break.
export const shownText = (text, breaks = false) => tokenParts(text).flatMap((part) => {
  if (!part.mark) return [part.text];
  const mark = html`<span class="mark">${part.text}</span>`;
  return breaks && part.text === LINE_BREAK ? [mark, "\n"] : [mark];
});

// What is known of one token.
export function TokenFacts({source, place, mark}) {
  if (!place) return html`<p class="token-facts dim" aria-live="polite">Point at a token, or move with the arrow keys.</p>`;
  const tokens = source.segments[place.segment];
  const i = place.token;
  const turn = tokens.outline.turns.find((range) => range.turn === tokens.turns[i]);
  const facts = [
    ["token", `${i.toLocaleString("en")} of ${tokens.total.toLocaleString("en")}`],
    ["id", String(tokens.ids[i])],
    ["text", tokens.hasText ? html`<bdi class="fact-text">${shownText(tokens.textOf(i).slice(0, 200))}</bdi>` : "not known"],
    ["bytes", tokens.hasText ? bytesOf(tokens, i) : "–"],
    ["mask", tokens.mask[i] ? "1, sampled" : "0, read"],
  ];
  if (tokens.mask[i]) {
    facts.push(["log-probability", `${number(tokens.logprobs[i])} (${(100 * Math.exp(tokens.logprobs[i])).toPrecision(3)} %)`]);
    if (tokens.hasEntropy) facts.push(["entropy", `${number(tokens.entropy[i], 3)} nats`]);
    facts.push(["weights", `version ${tokens.versions[i]}`], ["turn", String(tokens.turns[i])]);
  }
  facts.push(["segment", String(tokens.index)]);
  if (turn?.masked_because) facts.push(["masked because", turn.masked_because.replaceAll("_", " ")]);
  if (mark) facts.push(["judged", mark.label]);
  return html`<dl class="token-facts" aria-live="polite">
    ${facts.map(([name, value]) => html`<div key=${name}><dt>${name}</dt><dd>${value}</dd></div>`)}</dl>`;
}

// The keys and the colours that they stand for.
export function Legend({entries}) {
  return html`<ul class="token-legend" aria-label="Legend">
    ${entries.map(({name, label}) => html`<li key=${label}><span class=${`t ${name} ${name === "sampled" ? "m" : ""}`}>abc</span> ${label}</li>`)}
  </ul>`;
}
