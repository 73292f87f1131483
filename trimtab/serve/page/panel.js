// The panel on the right: adapters, which come and go, and the parity check.

import { get, post, stream } from "./api.js";
import { wordsOf } from "./chat.js";
import { byId, counted, draw, make, offer, refill, renew, seconds, tell } from "./dom.js";
import { sure } from "./sure.js";

let shownModel = () => null, poll = async () => {};

/** model(): the status of the model that is shown. again(): reads the server's status anew. */
export async function startPanel(model, again) {
  shownModel = model;
  poll = again;
  const about = await get("/page/about.json");
  byId("version").textContent = about.version;
  byId("load-adapter").hidden = !about.loads_adapters;
  byId("adapters-closed").hidden = about.loads_adapters;
}

// Adapters -------------------------------------------------------------------------------------------------------------

export function showAdapters(model) {
  const { resident = [], kept = [], swaps = 0, swap_p50_s: swap } = model.numbers ?? {};
  const isLoaded = model.state === "ready";
  const named = model.named ?? [];
  const shown = model.adapters.map((name) => [name, resident.includes(name), kept.includes(name), isLoaded, named.includes(name)]);
  const list = byId("adapters");
  byId("adapters-note").textContent = swaps ? `${counted(swaps, "swap")}, ${seconds(swap)} each` : "";
  offer(byId("verify-adapter"), [[null, [["", "the base only"], ...model.adapters.map((one) => [one, one])]]]);
  renew(list, [model.name, shown], () => {
    const rows = shown.map(([name, isResident, isKept, , isNamed]) => make(
      "li", {}, make("span", { class: "who" }, name), whereOf(isResident, isKept, isLoaded),
      isNamed ? null : make("button", {
        type: "button", class: "plain", "data-held": name, "aria-label": `Unload ${name}`, onclick: () => unload(model.name, name),
      }, "Unload"),
    ));
    refill(list, ...(rows.length ? rows : [make("li", { class: "quiet" }, "None. The base answers.")]));
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

async function unload(model, name) {
  if (!(await sure(`Unload ${name}?`, "Requests for it will fail until it is loaded again.", "Unload"))) return false;
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
        refill(byId("verdict"), ...verdictOf(line.report));
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
  const words = report.ok ? `As expected: ${report.verdict}` : `Not as expected: ${report.verdict}`;
  const head = make("tr", {}, ...report.head.map((name) => make("th", { scope: "col" }, name)));
  const rows = report.rows.map((cells) => make("tr", {}, ...cells.map((cell) => make("td", {}, cell))));
  return [
    make("p", { class: "verdict", role: "status" }, `${report.ok ? "✓" : "✗"} ${words}`),
    make("p", { class: "quiet" }, `${report.subject} compared with ${report.reference}, ${counted(rows.length, "prompt")}`),
    ...(report.findings.length ? [make("ul", { class: "findings" }, ...report.findings.map((text) => make("li", {}, text)))] : []),
    make("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "Parity, prompt by prompt" },
      make("table", {}, make("thead", {}, head), make("tbody", {}, ...rows))),
    ...report.floor.map((text) => make("p", { class: "hint" }, text)),
  ];
}
