// The panel on the right: adapters, which come and go.

import { get, post } from "./api.js";
import { wordsOf } from "./chat.js";
import { byId, counted, draw, make, refill, renew, seconds, tell } from "./dom.js";
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
