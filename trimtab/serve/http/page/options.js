// What is sent beside the messages: each chat keeps its own, and a new one begins with what was set last in this browser.

import { byId } from "./dom.js";

const KEPT = "trimtab-options";
const NUMBERS = ["temperature", "top-p", "top-k", "min-p", "max-tokens", "seed"], TEXTS = ["system"], CHECKS = ["chances", "json"];
const FIRST = { temperature: "0" };
const TOP = 5; // alternatives of each token

/** Take up what was kept, and keep what changes. */
export function startOptions() {
  take(null);
  byId("options").addEventListener("input", () => {
    keep();
    summarize();
  });
  byId("options-open").addEventListener("click", () => {
    byId("options-dialog").showModal();
    byId("options-dialog").scrollTop = 0;
  });
  byId("options-reset").addEventListener("click", () => {
    set({});
    keep();
    byId("options").dispatchEvent(new Event("change"));
  });
}

function kept() {
  try {
    return JSON.parse(localStorage.getItem(KEPT) ?? "{}");
  } catch {
    return {}; // nothing is kept here, or it is not ours
  }
}

function set(found) {
  for (const id of [...NUMBERS, ...TEXTS]) byId(id).value = found[id] ?? FIRST[id] ?? "";
  for (const id of CHECKS) byId(id).checked = found[id] === true;
  summarize();
}

function keep() {
  try {
    localStorage.setItem(KEPT, JSON.stringify(values()));
  } catch {
    // Then they last as long as the page.
  }
}

/** Return the values as a chat keeps them. */
export function values() {
  return Object.fromEntries([
    ...[...NUMBERS, ...TEXTS].map((id) => [id, byId(id).value]), ...CHECKS.map((id) => [id, byId(id).checked]),
  ]);
}

/** Take up the values of a chat, those kept in this browser for one that has none of its own. */
export function take(own) {
  set(own ?? kept());
}

/** Say beside the button what is not as it is at first. */
function summarize() {
  const parts = [];
  if (byId("temperature").value !== FIRST.temperature) parts.push(`temperature ${byId("temperature").value || "1"}`);
  for (const [id, word] of [["top-p", "top p"], ["top-k", "top k"], ["min-p", "min p"], ["max-tokens", "max tokens"], ["seed", "seed"]]) {
    if (byId(id).value) parts.push(`${word} ${byId(id).value}`);
  }
  if (byId("chances").checked) parts.push("probabilities");
  if (byId("json").checked) parts.push("JSON");
  if (byId("system").value.trim()) parts.push("system message");
  byId("options-summary").textContent = parts.join(", ");
}

/** Return the fields that ask for token probabilities, or for none. */
export function chancesOf(isWanted) {
  return isWanted ? { logprobs: true, top_logprobs: TOP } : { logprobs: undefined, top_logprobs: undefined };
}

/** Return the body of a request for a chat. */
export function bodyOf(voice, messages) {
  const number = (id) => (byId(id).value === "" ? undefined : Number(byId(id).value));
  const system = byId("system").value.trim();
  return {
    model: voice,
    messages: system ? [{ role: "system", content: system }, ...messages] : messages,
    temperature: number("temperature"), top_p: number("top-p"), top_k: number("top-k"), min_p: number("min-p"), max_tokens: number("max-tokens"), seed: number("seed"),
    ...chancesOf(byId("chances").checked),
    response_format: byId("json").checked ? { type: "json_object" } : undefined,
    stream: true, stream_options: { include_usage: true },
  };
}
