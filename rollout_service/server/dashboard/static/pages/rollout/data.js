// What the page of a rollout reads, and how often.
import {get} from "../../lib/api.js";
import {segment} from "../../lib/router.js";
import {useEffect, useState} from "../../lib/ui.js";

const EVERY = 1500;
export const ENDED = new Set(["completed", "failed", "cancelled"]);

export const pathOf = (id, rest = "") => `v1/rollouts/${segment(id)}${rest}`;

// Return {data, error, loading} of a path, or nothing for null. As long as `live`, it is asked for again and again while
// the tab is visible.
export function useAnswer(path, live = false) {
  const [state, setState] = useState({path: null, data: null, error: null});
  useEffect(() => {
    if (path === null) return undefined;
    const end = new AbortController();
    let timer = 0;
    const ask = async () => {
      if (!document.hidden) {
        try {
          const data = await get(path, {signal: end.signal});
          if (!end.signal.aborted) setState({path, data, error: null});
        } catch (error) {
          if (!end.signal.aborted) setState((old) => ({path, data: old.path === path ? old.data : null, error}));
        }
      }
      if (live && !end.signal.aborted) timer = setTimeout(ask, EVERY);
    };
    ask();
    return () => (end.abort(), clearTimeout(timer));
  }, [path, live]);
  if (path === null || state.path !== path) return {data: null, error: null, loading: path !== null};
  return {...state, loading: false};
}

// Return the row of a rollout in lists, which has its run and group, or null. Its time narrows down which of the ids that
// begin with the same text are meant.
export function useSummary(rollout) {
  const beside = (by) => new Date(Date.parse(rollout.created_at) + by).toISOString();
  const path = rollout && `v1/summaries?${new URLSearchParams({text: rollout.rollout_id, since: beside(-1), until: beside(2), limit: 100})}`;
  const {data} = useAnswer(path);
  return data?.rows.find((row) => row.rollout_id === rollout.rollout_id) ?? null;
}

// Return the samples of a group as rows, or an empty list.
export function useGroup(summary) {
  const path = summary?.run_id && summary.group !== null
    ? `v1/summaries?run=${encodeURIComponent(summary.run_id)}&group=${summary.group}&order=oldest&limit=1000` : null;
  return useAnswer(path).data?.rows ?? [];
}

// Return what is known of tool calls by their ids: lists of the steps in their order, since ids are unique in a turn only.
export function toolSteps(steps) {
  const calls = new Map();
  for (const step of steps ?? []) {
    const call = step.kind === "tool" ? step.detail?.call : undefined;
    if (typeof call !== "string") continue;
    if (!calls.has(call)) calls.set(call, []);
    calls.get(call).push(step);
  }
  return calls;
}

// Return the engine's step of each turn of the agent's own lane, or of a sub-agent's.
export function turnSteps(steps, node, attempt) {
  const turns = new Map();
  for (const step of steps ?? []) {
    const [owner] = step.lane.split("/");
    const mine = node === null ? !/^[0-9]+$/.test(owner) : owner === String(node);
    if (step.kind === "engine" && mine && step.attempt === attempt && typeof step.detail?.turn === "number") turns.set(step.detail.turn, step);
  }
  return turns;
}
