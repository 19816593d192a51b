// What is live: the newest overview, which all parts of the page share, and events. Both come by streams.
import {get, hasKey, keyRequest, stream} from "./api.js";
import {computed, effect, signal, useEffect, useRef, useSignal, useState} from "./ui.js";

// The newest overview, or null before the first; `connection` is "connecting", "live" or "lost"; `problem` is the error
// of a service that has no overview for us.
export const overview = signal(null);
export const connection = signal("connecting");
export const problem = signal(null);
export const role = signal("admin");
const lastEvent = computed(() => overview.value?.last_event ?? 0);
const REMEMBERED = 120;
let past = [];
let started = false;

// Return a figure of each of the last overviews, oldest first.
export const recent = (figure) => past.map(figure);

// Return the newest overview, or null as long as there is none.
export function useOverview() {
  start();
  return useSignal(overview);
}

function start() {
  if (started) return;
  started = true;
  run();
}

async function run() {
  let asked = null;
  effect(() => {
    if (keyRequest.value === null && asked !== hasKey()) {
      asked = hasKey();
      learnRole();
    }
  });
  try {
    await stream("v1/overview/stream", {
      idleSeconds: 10,
      onState: (state) => (connection.value = state),
      onEvent: ({data}) => {
        problem.value = null;
        overview.value = JSON.parse(data);
        past = [...past.slice(1 - REMEMBERED), overview.value];
      },
    });
  } catch (error) {
    problem.value = error;
    connection.value = "lost";
  }
}

// The stream is the same for all its readers, so what the key allows is asked for.
export async function learnRole() {
  try {
    const answer = await get("v1/overview");
    role.value = answer.role;
    overview.value ??= answer;
  } catch {
    // the stream reports what is wrong
  }
}

const ROLES = ["read", "submit", "admin"];

// Return whether the key in use allows what needs a role.
export const useMay = (needed) => ROLES.indexOf(useSignal(role)) >= ROLES.indexOf(needed);

const streams = new Map();

// Call `callback` with each event of some kinds and one subject, or of all; those who ask for the same share a stream.
export function useEvents({kind, subject} = {}, callback) {
  const latest = useRef(callback);
  latest.current = callback;
  useEffect(() => {
    const query = new URLSearchParams();
    for (const one of [kind ?? []].flat()) query.append("kind", one);
    if (subject) query.set("subject", subject);
    const path = query.size ? `v1/events?${query}` : "v1/events";
    return listen(path, (event) => latest.current(event));
  }, [String(kind ?? ""), subject]);
}

function listen(path, callback) {
  let shared = streams.get(path);
  if (!shared) {
    shared = {listeners: new Set(), end: new AbortController()};
    streams.set(path, shared);
    const tell = ({data}) => {
      const event = JSON.parse(data);
      for (const listener of shared.listeners) listener(event);
    };
    stream(path, {onEvent: tell, signal: shared.end.signal}).catch(() => streams.delete(path));
  }
  shared.listeners.add(callback);
  return () => {
    shared.listeners.delete(callback);
    if (shared.listeners.size) return;
    shared.end.abort();
    streams.delete(path);
  };
}

const REFRESH_EVERY = 2000;
// How old an answer may be that is asked for again.
export const AGE = REFRESH_EVERY / 1000;

// Says when there is something new to ask for. An answer may be as old as the question before, so what had happened by then
// is all that it is sure to have: after the last event, one asks twice.
class News {
  #had = lastEvent.peek();
  #known = lastEvent.peek();

  get due() {
    return lastEvent.peek() !== this.#had;
  }

  // Note that one asks now.
  asked() {
    this.#had = this.#known;
    this.#known = lastEvent.peek();
  }
}

// Call `ask` when something happened in the service: at most every two seconds, one call after the other, and only while the
// tab is visible and `isFree` says so. What no event tells of is asked `every` so many seconds as well. Return a function that
// ends this.
export function whenNew(ask, {isFree = () => true, every = Infinity} = {}) {
  const news = new News();
  let busy = false, asked = Date.now();
  const timer = setInterval(async () => {
    const due = news.due || Date.now() - asked >= every * 1000;
    if (document.hidden || busy || !isFree() || !due) return;
    news.asked();
    asked = Date.now();
    busy = true;
    await ask();
    busy = false;
  }, REFRESH_EVERY);
  return () => clearInterval(timer);
}

// Return {data, error, loading, reload} of a path, asked again when something happened in the service: at most every two
// seconds, and only while the tab is visible. `path` may be null, for nothing. What no event tells of is asked `every` so
// many seconds as well.
export function useLive(path, {once = false, every = Infinity} = {}) {
  const [state, setState] = useState({data: null, error: null, loading: true});
  const [round, setRound] = useState(0);
  const shown = useRef(null);
  useEffect(() => {
    if (path === null) return undefined;
    const end = new AbortController();
    if (shown.current !== path) setState({data: null, error: null, loading: true});
    shown.current = path;
    const news = new News();
    let timer = 0, busy = false, asked = 0;
    const ask = async (age) => {
      busy = true;
      asked = Date.now();
      try {
        const data = await get(path, {signal: end.signal, age});
        if (!end.signal.aborted) setState({data, error: null, loading: false});
      } catch (error) {
        if (!end.signal.aborted) setState((old) => ({...old, error, loading: false}));
      }
      busy = false;
      if (!once && !end.signal.aborted) timer = setTimeout(again, REFRESH_EVERY);
    };
    const again = () => {
      if (busy || end.signal.aborted) return;
      const due = news.due || Date.now() - asked >= every * 1000;
      if (due && !document.hidden) {
        news.asked();
        ask(AGE);
      } else timer = setTimeout(again, 500);
    };
    ask(0);
    return () => (end.abort(), clearTimeout(timer));
  }, [path, round, once, every]);
  return {...state, reload: () => setRound((count) => count + 1)};
}
