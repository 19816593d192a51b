// Numbers and times as short texts.
const COUNT = new Intl.NumberFormat("en-US");
const COMPACT = new Intl.NumberFormat("en-US", {notation: "compact", maximumFractionDigits: 1});
const CLOCK = new Intl.DateTimeFormat("en-GB", {hour: "2-digit", minute: "2-digit", second: "2-digit"});
const DAY = new Intl.DateTimeFormat("en-GB", {day: "2-digit", month: "short", hour: "2-digit", minute: "2-digit"});
const NONE = "\u2013";

const missing = (value) => value === null || value === undefined || Number.isNaN(value);

// 0.012 -> "12 ms", 3.21 -> "3.2 s", 75 -> "1 min 15 s", 7300 -> "2 h 1 min"
export function seconds(value) {
  if (missing(value)) return NONE;
  if (value < 0.9995) return value > 0 && value < 0.0005 ? "<1 ms" : `${Math.round(value * 1000)} ms`;
  if (value < 59.95) return `${value.toFixed(value < 9.95 ? 1 : 0)} s`;
  const whole = Math.round(value);
  if (whole < 3600) return joined(Math.floor(whole / 60), "min", whole % 60, "s");
  if (whole < 86400) return joined(Math.floor(whole / 3600), "h", Math.floor((whole % 3600) / 60), "min");
  return joined(Math.floor(whole / 86400), "d", Math.floor((whole % 86400) / 3600), "h");
}

const joined = (a, unitA, b, unitB) => (b ? `${a} ${unitA} ${b} ${unitB}` : `${a} ${unitA}`);

export const count = (value) => (missing(value) ? NONE : Math.abs(value) < 1e5 ? COUNT.format(value) : COMPACT.format(value));

export const number = (value, digits = 2) => (missing(value) ? NONE : Number(value.toFixed(digits)).toString());

// 0.123 -> "12 %"
export function share(value) {
  if (missing(value)) return NONE;
  const percent = value * 100;
  return `${percent > 0 && percent < 9.95 ? Number(percent.toFixed(1)) : Math.round(percent)} %`;
}

export function bytes(value) {
  if (missing(value)) return NONE;
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  while (value >= 1024 && unit < units.length - 1) (value /= 1024), (unit += 1);
  return `${value < 10 && unit ? value.toFixed(1) : Math.round(value)} ${units[unit]}`;
}

// "12 s ago" for a time of the API.
export function ago(iso, now = Date.now()) {
  if (!iso) return NONE;
  const passed = Math.max(0, (now - Date.parse(iso)) / 1000);
  if (passed < 1) return "now";
  return `${passed < 60 ? `${Math.floor(passed)} s` : seconds(Math.floor(passed))} ago`;
}

// The clock time of a time of the API, with its day unless that is today.
export function time(iso) {
  if (!iso) return NONE;
  const at = new Date(iso);
  return at.toDateString() === new Date().toDateString() ? CLOCK.format(at) : DAY.format(at);
}
