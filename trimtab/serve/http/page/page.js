// The page: asks the server every second how it is, and shows it.

import { Unreachable, get, hasKey, onKeyWanted, opens, useKey } from "./api.js";
import { startChat } from "./chat.js";
import { startChats, startDrawers } from "./chats.js";
import { byId, counted, make, offer, rate, refill, renew, seconds, tell } from "./dom.js";
import { mixesOf, showMixes, startMixes } from "./mixes.js";
import { startOptions } from "./options.js";
import { showAdapters, startPanel } from "./panel.js";
import { drawPicture, drawSlim } from "./picture.js";
import { nameOf } from "./turns.js";
import { startUndo } from "./undo.js";

const EVERY_MS = 1000;
const STATES = {
  stopped: "unloaded, loads with the next message", loading: "loading", ready: "ready", restarting: "restarting",
  failed: "failed", unresponsive: "not responding", gone: "the server does not answer",
};
const ENDED = { done: "done", cancelled: "client left" };

let status = null, showChats = () => {};
startOptions();
startUndo();
const chat = startChat(shownModel, () => showChats());
showChats = startChats(() => chat);
startDrawers();
startMixes(shownModel, (voice) => {
  byId("voice-a").value = voice;
  show();
}, () => show());

function shownModel() {
  if (!status) return null;
  return status.models.find((model) => model.name === byId("model").value) ?? status.models[0] ?? null;
}

// What the server says ------------------------------------------------------------------------------------------------

async function poll() {
  try {
    status = await get("/api/status");
    show();
  } catch (error) {
    showState("gone", error.message);
    if (error instanceof Unreachable) showGone();
  }
}

async function keepPolling() {
  for (;;) {
    if (!document.hidden) await poll();
    await new Promise((done) => { setTimeout(done, EVERY_MS); });
  }
}

function show() {
  if (!status) return;
  const models = status.models;
  byId("model-many").hidden = models.length < 2;
  byId("model-one").textContent = models.length === 1 ? models[0].name : "";
  offer(byId("model"), [[null, models.map(({ name }) => [name, name])]]);
  byId("key-change").hidden = !hasKey();
  const model = shownModel();
  if (!model) return;
  showState(model.state, STATES[model.state] ?? model.state, loadWords(model));
  showTrouble(model);
  showLoading(model);
  showNote(model);
  drawPicture(model);
  drawSlim(model);
  showVoices(models, model);
  showAdapters(model);
  showMixes(model);
  showRequests(status.requests ?? []);
  chat.follow(model);
}

function loadWords(model) {
  const words = [""];
  const numbers = model.numbers ?? {};
  if (model.state === "ready" && numbers.rows) {
    words.push(`${numbers.running ?? 0} of ${counted(numbers.rows, "row")} busy`);
    if (numbers.waiting) words.push(`${numbers.waiting} waiting`);
  }
  if (model.restarts) words.push(`restarted ${counted(model.restarts, "time")}`);
  return words.join(", ");
}

function showState(state, words, load = "") {
  byId("state-mark").dataset.state = state;
  // Only the state is read out when it changes; how busy the rows are changes all the time.
  for (const [id, text] of [["state-text", words], ["state-load", load]]) {
    if (byId(id).textContent !== text) byId(id).textContent = text;
  }
}

function showTrouble(model) {
  const isWorth = model.error && model.state !== "ready" && model.state !== "loading";
  sayTrouble(isWorth ? `${model.name}: ${model.error}` : "");
}

/** Above the conversation, until the server answers again (`showTrouble`). */
function showGone() {
  sayTrouble("The server does not answer: it has ended, or this browser cannot reach it. The page asks again every second. Your chats stay here.");
  byId("loading").hidden = true;
}

function sayTrouble(text) {
  if (byId("trouble").textContent !== text) tell(byId("trouble"), text);
}

function showLoading(model) {
  const isLoading = model.state === "loading" || model.state === "restarting";
  byId("loading").hidden = !isLoading;
  if (!isLoading) return;
  const [done, of] = model.loading ?? [0, 0], bar = byId("loading-bar");
  if (of > 0) bar.value = done / of;
  else bar.removeAttribute("value");
  byId("loading-text").textContent = of > 0 ? `Reading weights: ${Math.floor((100 * done) / of)} %` : "Planning and reading weights";
}

function showNote(model) {
  const plan = model.plan;
  let words = "";
  if (plan) {
    const { quant, context_tokens: context, batch } = plan.request;
    words = `${plan.model_class}, ${quant}, context ${context}, ${counted(batch, "row")}`;
    if (model.state === "stopped") words += "; nothing of it is in memory now";
  }
  if (byId("load-note").textContent !== words) byId("load-note").textContent = words;
}

// Voices ---------------------------------------------------------------------------------------------------------------

function showVoices(models, model) {
  const voices = (one) => [
    [one.name, `${one.name} (base)`], ...[...one.adapters, ...mixesOf(one)].map((adapter) => [`${one.name}:${adapter}`, adapter]),
  ];
  const groups = models.length > 1 ? models.map((one) => [one.name, voices(one)]) : [[null, voices(model)]];
  offer(byId("voice-a"), groups);
  const second = byId("voice-b"), isNew = !second.options.length;
  offer(second, groups);
  if (isNew && second.options.length > 1) second.selectedIndex = 1;
  showWelcome(model, voices(model));
}

/** What stands in an empty conversation: who answers here, one press away. */
function showWelcome(model, voices) {
  const kinds = { image: "images", audio: "audio" };
  const taken = model.takes.filter((kind) => kinds[kind]).map((kind) => kinds[kind]);
  const words = `${model.name} reads text${taken.length ? `, ${taken.join(" and ")}` : ""}. ${
    model.adapters.length ? `${counted(model.adapters.length, "adapter")} can answer instead, or side by side.` : ""}`;
  if (byId("welcome-text").textContent !== words) byId("welcome-text").textContent = words;
  const chosen = byId("voice-a").value;
  renew(byId("welcome-voices"), [voices, chosen], () => refill(byId("welcome-voices"), ...voices.map(([value]) => make("li", {}, make("button", {
    type: "button", class: "voice-chip", "data-held": value, "aria-pressed": String(value === chosen), onclick: () => {
      byId("voice-a").value = value;
      showWelcome(model, voices);
      byId("question").focus();
    },
  }, nameOf(value))))));
}

byId("voice-a").addEventListener("change", show);

// Last requests --------------------------------------------------------------------------------------------------------

function showRequests(requests) {
  const body = byId("requests").tBodies[0];
  const whole = requests.filter((one) => one.ended === "done");
  const middle = (values) => values.sort((a, b) => a - b)[Math.floor(values.length / 2)] ?? null;
  byId("recent-note").textContent = whole.length
    ? `median of ${whole.length}: first token ${seconds(middle(whole.map((one) => one.ttft_s).filter((value) => value !== null)))}, `
      + `${rate(middle(whole.map((one) => one.tok_s).filter((value) => value !== null)))} tok/s`
    : "";
  renew(body, requests, () => {
    const cell = (text, isNumber = false) => make("td", { class: isNumber ? "number" : null }, text);
    refill(body, ...requests.map((one) => make(
      "tr", {}, cell(new Date(one.at * 1000).toLocaleTimeString()), cell(one.adapter || `${one.model} (base)`),
      cell(seconds(one.ttft_s), true), cell(rate(one.tok_s), true), cell(one.prompt_tokens ?? "-", true),
      cell(one.completion_tokens ?? "-", true), cell(seconds(one.seconds), true), cell(ENDED[one.ended] ?? one.ended),
    )));
    if (!requests.length) body.append(make("tr", {}, make("td", { colspan: 8, class: "quiet" }, "None yet.")));
  });
}

// Key and theme --------------------------------------------------------------------------------------------------------

function openKeyDialog(isNeeded, wrong) {
  tell(byId("key-error"), wrong);
  byId("key-cancel").hidden = isNeeded; // without a key there is nothing behind the dialog
  const dialog = byId("key-dialog");
  if (!dialog.open) dialog.showModal();
  return new Promise((done) => { dialog.addEventListener("close", done, { once: true }); });
}

byId("key-form").addEventListener("submit", async (event) => {
  event.preventDefault();
  const given = byId("key").value.trim();
  try {
    if (!given || !(await opens(given))) throw new Error("This key is not accepted");
    useKey(given);
    byId("key-dialog").close();
  } catch (error) {
    tell(byId("key-error"), error instanceof TypeError ? "The server does not answer" : error.message);
    byId("key").select();
  }
});
byId("key-dialog").addEventListener("cancel", (event) => { if (byId("key-cancel").hidden) event.preventDefault(); });
byId("key-dialog").addEventListener("close", () => { byId("key").value = ""; });
byId("key-cancel").addEventListener("click", () => byId("key-dialog").close());
byId("key-change").addEventListener("click", () => openKeyDialog(false, ""));
onKeyWanted((isAdmin) => (isAdmin
  ? openKeyDialog(false, "This requires the server's admin key")
  : openKeyDialog(true, hasKey() ? "The key of this tab is not accepted" : "")));

const THEMES = ["system", "light", "dark"];
const themeOf = () => document.documentElement.dataset.theme ?? "system";
byId("theme").addEventListener("click", () => {
  const next = THEMES[(THEMES.indexOf(themeOf()) + 1) % THEMES.length];
  if (next === "system") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = next;
  try {
    localStorage.setItem("trimtab-theme", next);
  } catch {
    // Then it lasts as long as the page.
  }
  byId("theme-text").textContent = `Theme: ${next}`;
});
byId("theme-text").textContent = `Theme: ${themeOf()}`;

// Start ----------------------------------------------------------------------------------------------------------------

byId("base-url").textContent = `${location.origin}/v1`;
byId("model").addEventListener("change", show);
document.addEventListener("visibilitychange", () => { if (!document.hidden) poll(); });
byId("memory").addEventListener("click", () => {
  byId("load-dialog").showModal();
  byId("load-dialog").scrollTop = 0;
  show();
});
byId("load-close").addEventListener("click", () => byId("load-dialog").close());
byId("image-close").addEventListener("click", () => byId("image-dialog").close());
// A dialog that can be left is also left by a press beside it.
for (const name of ["load-dialog", "options-dialog", "image-dialog", "sure"]) {
  byId(name).addEventListener("click", ({ target }) => { if (target === byId(name)) byId(name).close(); });
}
new ResizeObserver(() => { const model = shownModel(); if (model) drawPicture(model); }).observe(byId("bars"));
startPanel(shownModel, poll).catch(() => {});
keepPolling();
