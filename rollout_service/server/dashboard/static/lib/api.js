// Asks the API. Addresses are relative to the document, so the page works below any prefix. The key is kept for this tab
// alone, and is sent in a header of our own, since portals in front of the service may use `Authorization` themselves.
import {ApiError} from "./errors.js";
import {signal} from "./ui.js";

const KEY = "rollout-key";
const RETRY_AFTER = [500, 1000, 2000, 5000];
const GRACE_WHEN_HIDDEN = 5000;
const KEEP_DOWNLOADED = 60_000; // a browser may begin to write the file later

// Whether the answers are those of a file; its own module, which stands in for this one, says true.
export const isSaved = false;

// How many tokens are asked for at once; the first range is short, so that something shows early.
export const TOKENS_AT_ONCE = {first: 3_000, next: 20_000};

// null while requests are answered; else {wrong}, and whether the key that was sent is a wrong one.
export const keyRequest = signal(null);
let key = sessionStorage.getItem(KEY) || "";
let waiting = [];

export const hasKey = () => key !== "";

// Use this key from now on; requests that waited for one are sent again.
export function useKey(value) {
  key = value;
  if (value) sessionStorage.setItem(KEY, value);
  else sessionStorage.removeItem(KEY);
  keyRequest.value = null;
  for (const go of waiting.splice(0)) go();
}

export const url = (path) => new URL(path.replace(/^\//, ""), document.baseURI).href;

// `age` is how many seconds old the answer may be: one that the service made for others then costs it nothing.
export const get = async (path, {signal: aborted, age = 0} = {}) =>
  read(await request("GET", path, {aborted, headers: age ? {"Cache-Control": `max-age=${age}`} : {}}));

export async function send(method, path, body, {signal: aborted} = {}) {
  return read(await request(method, path, {body, aborted}));
}

// Save an answer as a file.
export async function download(path, name) {
  const answer = await request("GET", path, {headers: {Accept: "*/*"}});
  const link = document.createElement("a");
  link.href = URL.createObjectURL(await answer.blob());
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), KEEP_DOWNLOADED);
}

async function read(response) {
  if (response.status === 204) return null;
  const type = response.headers.get("content-type") || "";
  return type.includes("json") ? response.json() : response.text();
}

// Send a request, and again with the next key as long as the answer is that it needs one.
async function request(method, path, {body, aborted, headers = {}} = {}) {
  for (;;) {
    const sent = key;
    const all = {Accept: "application/json", ...headers};
    if (sent) all["X-Rollout-Key"] = sent;
    if (body !== undefined) all["Content-Type"] = "application/json";
    const response = await fetch(url(path), {
      method,
      headers: all,
      body: body === undefined ? undefined : JSON.stringify(body),
      signal: aborted,
      cache: "no-store",
    });
    if (response.status === 401) await nextKey(sent, aborted);
    else if (response.ok) return response;
    else throw await failure(response);
  }
}

function nextKey(sent, aborted) {
  if (key !== sent) return Promise.resolve();
  keyRequest.value = {wrong: sent !== ""};
  return new Promise((resolve, reject) => {
    waiting.push(resolve);
    aborted?.addEventListener("abort", () => reject(aborted.reason), {once: true});
  });
}

async function failure(response) {
  let said = {};
  try {
    said = await response.json();
  } catch {
    // a proxy's own page
  }
  const detail = said.detail || said.title || `the answer is ${response.status} ${response.statusText}`;
  return new ApiError(response.status, said.code || `http_${response.status}`, String(detail), said.hint || "");
}

// Read server-sent events until `signal` aborts: `onEvent({event, data, id})` for each, `onState("live" | "lost")` when
// the connection comes and goes. It is made again after a failure, and not kept while the tab is hidden, since a browser
// has few connections for each server. An answer that no repetition can change is thrown.
export async function stream(path, {onEvent, onState = () => {}, signal: ended, lastEventId, idleSeconds = 40}) {
  const position = {id: lastEventId};
  let failures = 0;
  while (!ended?.aborted) {
    await untilVisible(ended);
    const connection = new AbortController();
    const stop = () => connection.abort();
    ended?.addEventListener("abort", stop);
    const forget = abortWhenHidden(connection);
    try {
      await readEvents(path, position, connection, idleSeconds, (event) => {
        failures = 0;
        onState("live");
        onEvent(event);
      });
    } catch (error) {
      if (error instanceof ApiError && error.status < 500 && error.status !== 429) throw error;
    } finally {
      forget();
      connection.abort();
      ended?.removeEventListener("abort", stop);
    }
    if (ended?.aborted || document.hidden) continue;
    if (failures > 0) onState("lost");
    await pause(failures === 0 ? 100 : RETRY_AFTER[Math.min(failures, RETRY_AFTER.length) - 1], ended);
    failures += 1;
  }
}

async function readEvents(path, position, connection, idleSeconds, onEvent) {
  const headers = {Accept: "text/event-stream"};
  if (position.id !== undefined) headers["Last-Event-ID"] = String(position.id);
  const response = await request("GET", path, {aborted: connection.signal, headers});
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let buffered = "";
  for (;;) {
    const timer = setTimeout(() => connection.abort(), idleSeconds * 1000);
    const {done, value} = await reader.read().finally(() => clearTimeout(timer));
    if (done) return;
    buffered += value;
    const blocks = buffered.split("\n\n");
    buffered = blocks.pop();
    for (const block of blocks) {
      const event = parseEvent(block, position);
      if (event) onEvent(event);
    }
  }
}

// Return the event of a block of lines; one without data only moves the position.
function parseEvent(block, position) {
  const data = [];
  let event = "message";
  for (const line of block.split("\n")) {
    const [, name, value] = /^([a-z]*):? ?(.*)$/s.exec(line.replace(/\r$/, "")) || [];
    if (name === "data") data.push(value);
    else if (name === "event") event = value;
    else if (name === "id") position.id = value;
  }
  return data.length ? {event, data: data.join("\n"), id: position.id} : null;
}

function abortWhenHidden(connection) {
  let timer = 0;
  const look = () => {
    clearTimeout(timer);
    if (document.hidden) timer = setTimeout(() => connection.abort(), GRACE_WHEN_HIDDEN);
  };
  document.addEventListener("visibilitychange", look);
  look();
  return () => {
    clearTimeout(timer);
    document.removeEventListener("visibilitychange", look);
  };
}

function untilVisible(ended) {
  if (!document.hidden) return Promise.resolve();
  return new Promise((resolve) => {
    const look = () => {
      if (document.hidden && !ended?.aborted) return;
      document.removeEventListener("visibilitychange", look);
      ended?.removeEventListener("abort", look);
      resolve();
    };
    document.addEventListener("visibilitychange", look);
    ended?.addEventListener("abort", look);
  });
}

function pause(milliseconds, ended) {
  return new Promise((resolve) => {
    const timer = setTimeout(resolve, milliseconds);
    ended?.addEventListener("abort", () => (clearTimeout(timer), resolve()), {once: true});
  });
}
