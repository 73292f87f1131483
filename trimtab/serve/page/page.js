// The page: asks the server every second how it is, and shows it.

import { get, hasKey, onKeyWanted, opens, post, stream, useKey } from "./api.js";
import { byId, counted, draw, make, offer, rate, renew, seconds, tell } from "./dom.js";
import { drawPicture } from "./picture.js";
import { startPlayground, wordsOf } from "./play.js";

const EVERY_MS = 1000;
const STATES = {
  stopped: "asleep, starts with the next question", loading: "loading", ready: "ready", restarting: "restarting",
  failed: "failed", gone: "the server does not answer",
};
const ENDED = { done: "done", cancelled: "client left" };

let status = null;
const follow = startPlayground(shownModel);

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
  }
}

async function keepPolling() {
  for (;;) {
    if (!document.hidden) await poll();
    await new Promise((done) => { setTimeout(done, EVERY_MS); });
  }
}

function show() {
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
  showVoices(models, model);
  showAdapters(model);
  showRequests(status.requests ?? []);
  follow(model);
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
  const text = isWorth ? `${model.name}: ${model.error}` : "";
  if (byId("trouble").textContent !== text) tell(byId("trouble"), text);
}

function showLoading(model) {
  const isLoading = model.state === "loading" || model.state === "restarting";
  byId("loading").hidden = !isLoading;
  if (!isLoading) return;
  const [done, of] = model.loading ?? [0, 0], bar = byId("loading-bar");
  if (of > 0) bar.value = done / of;
  else bar.removeAttribute("value");
  byId("loading-text").textContent = of > 0 ? `Reading weights: ${Math.floor((100 * done) / of)} %` : "Planning, then reading weights";
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

// Adapters -------------------------------------------------------------------------------------------------------------

function showVoices(models, model) {
  const voices = ({ name, adapters }) => [[name, `${name} (base)`], ...adapters.map((one) => [`${name}:${one}`, one])];
  const groups = models.length > 1 ? models.map((one) => [one.name, voices(one)]) : [[null, voices(model)]];
  offer(byId("voice-a"), groups);
  const second = byId("voice-b"), isNew = !second.options.length;
  offer(second, groups);
  if (isNew && second.options.length > 1) second.selectedIndex = 1;
  offer(byId("verify-adapter"), [[null, [["", "the base alone"], ...model.adapters.map((one) => [one, one])]]]);
}

function showAdapters(model) {
  const { resident = [], kept = [], swaps = 0, swap_p50_s: swap } = model.numbers ?? {};
  const isLoaded = model.state === "ready";
  const named = model.named ?? [];
  const shown = model.adapters.map((name) => [name, resident.includes(name), kept.includes(name), isLoaded, named.includes(name)]);
  const list = byId("adapters");
  byId("adapters-note").textContent = swaps ? `${counted(swaps, "swap")}, ${seconds(swap)} each` : "";
  renew(list, [model.name, shown], () => {
    const rows = shown.map(([name, isResident, isKept, , isNamed]) => make(
      "li", {}, make("span", { class: "who" }, name), whereOf(isResident, isKept, isLoaded),
      isNamed ? null : make("button", {
        type: "button", class: "plain", "data-held": name, "aria-label": `Unload ${name}`, onclick: () => unload(model.name, name),
      }, "Unload"),
    ));
    list.replaceChildren(...(rows.length ? rows : [make("li", { class: "quiet" }, "None; the base answers alone.")]));
  });
}

function whereOf(isResident, isKept, isLoaded) {
  const place = isResident ? "on the model" : isLoaded ? "in host memory" : "not loaded";
  const words = place + (isKept ? ", kept there" : "");
  return make(
    "span", { class: "where", "data-where": isResident ? "model" : "host" },
    draw("svg", { viewBox: "0 0 12 12", "aria-hidden": "true", focusable: "false" }, draw("circle", { cx: 6, cy: 6, r: 4.5 })),
    words,
  );
}

async function changeAdapters(work, said) {
  tell(byId("adapters-error"), "");
  byId("adapters-said").textContent = "";
  try {
    await work();
    byId("adapters-said").textContent = said;
    await poll();
    return true;
  } catch (error) {
    tell(byId("adapters-error"), wordsOf(error));
    return false;
  }
}

function unload(model, name) {
  if (!confirm(`Unload ${name}? Requests that name it fail until it is loaded again.`)) return false;
  return changeAdapters(() => post("/v1/unload_lora_adapter", { model, lora_name: name }), `${name} is unloaded`);
}

byId("load-adapter").addEventListener("submit", async (event) => {
  event.preventDefault();
  const name = byId("adapter-name"), path = byId("adapter-path"), send = byId("load-adapter-send");
  send.disabled = true;
  const body = { model: shownModel()?.name, lora_name: name.value, lora_path: path.value };
  if (await changeAdapters(() => post("/v1/load_lora_adapter", body), `${body.lora_name} is loaded`)) {
    name.value = path.value = "";
  }
  send.disabled = false;
  if (document.activeElement === document.body) name.focus({ preventScroll: true });
});

// Parity ---------------------------------------------------------------------------------------------------------------

let verifying = null;

byId("verify-stop").addEventListener("click", () => verifying?.abort());
byId("verify").addEventListener("submit", async (event) => {
  event.preventDefault();
  const send = byId("verify-send"), stop = byId("verify-stop"), said = byId("verify-said");
  verifying = new AbortController();
  send.disabled = true;
  stop.disabled = false;
  stop.focus();
  tell(byId("verify-error"), "");
  byId("verdict").replaceChildren();
  said.textContent = "starting";
  const body = { model: shownModel()?.name, adapter: byId("verify-adapter").value || null, against: byId("verify-against").value };
  try {
    for await (const line of stream("/api/verify", body, verifying.signal)) {
      if (line.report) {
        said.textContent = "";
        byId("verdict").replaceChildren(...verdictOf(line.report));
      } else {
        said.textContent = line.say;
      }
    }
  } catch (error) {
    said.textContent = error.name === "AbortError" ? "stopped" : "";
    if (error.name !== "AbortError") tell(byId("verify-error"), wordsOf(error));
  }
  verifying = null;
  const hadFocus = document.activeElement === stop;
  send.disabled = false;
  stop.disabled = true;
  if (hadFocus) send.focus({ preventScroll: true });
});

function verdictOf(report) {
  const words = report.ok ? `As it should be: ${report.verdict}` : `Wrong: ${report.verdict}`;
  const head = make("tr", {}, ...report.head.map((name) => make("th", { scope: "col" }, name)));
  const rows = report.rows.map((cells) => make("tr", {}, ...cells.map((cell) => make("td", {}, cell))));
  return [
    make("p", { class: "verdict", role: "status" }, `${report.ok ? "✓" : "✗"} ${words}`),
    make("p", { class: "quiet" }, `${report.subject} held against ${report.reference}, ${counted(rows.length, "prompt")}`),
    ...(report.findings.length ? [make("ul", { class: "findings" }, ...report.findings.map((text) => make("li", {}, text)))] : []),
    make("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "Parity, prompt by prompt" },
      make("table", {}, make("thead", {}, head), make("tbody", {}, ...rows))),
    ...report.floor.map((text) => make("p", { class: "hint" }, text)),
  ];
}

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
    body.replaceChildren(...requests.map((one) => make(
      "tr", {}, cell(new Date(one.at * 1000).toLocaleTimeString()), cell(one.adapter || `${one.model} (base)`),
      cell(seconds(one.ttft_s), true), cell(rate(one.tok_s), true), cell(String(one.prompt_tokens), true),
      cell(String(one.completion_tokens), true), cell(seconds(one.seconds), true), cell(ENDED[one.ended] ?? one.ended),
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
  ? openKeyDialog(false, "This needs the admin key of the server")
  : openKeyDialog(true, hasKey() ? "The key that this tab holds is not accepted" : "")));

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
  byId("theme").textContent = `Theme: ${next}`;
});
byId("theme").textContent = `Theme: ${themeOf()}`;

// Start ----------------------------------------------------------------------------------------------------------------

async function readServer() {
  const about = await get("/page/about.json");
  byId("version").textContent = about.version;
  byId("load-adapter").hidden = !about.loads_adapters;
  byId("adapters-closed").hidden = about.loads_adapters;
}

byId("base-url").textContent = `${location.origin}/v1`;
byId("model").addEventListener("change", show);
document.addEventListener("visibilitychange", () => { if (!document.hidden) poll(); });
new ResizeObserver(() => { const model = shownModel(); if (model) drawPicture(model); }).observe(byId("bars"));
readServer().catch(() => {});
keepPolling();
