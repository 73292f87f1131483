// Weighted sums of adapters that a reader has made: voices like any other, kept in this browser.

import { byId, make, refill, renew, tell } from "./dom.js";

const KEPT = "trimtab-mixes";
const MOST = 20; // of one model

let kept = read();

function read() {
  try {
    return JSON.parse(localStorage.getItem(KEPT) ?? "{}");
  } catch {
    return {}; // nothing is kept here, or it is not ours
  }
}

function keep(model, mixes) {
  kept = { ...kept, [model]: mixes.slice(0, MOST) };
  try {
    localStorage.setItem(KEPT, JSON.stringify(kept));
  } catch {
    // Then they last as long as the page.
  }
}

const namesOf = (mix) => mix.split("+").map((part) => part.split(":")[0]);

/** Return the mixes of a model whose adapters are all there, such as "medical:0.7+style:0.3". */
export function mixesOf({ name, adapters }) {
  const all = Array.isArray(kept[name]) ? kept[name] : [];
  return all.filter((mix) => typeof mix === "string" && namesOf(mix).every((one) => adapters.includes(one)));
}

/** Show a box for the weight of each adapter, and the mixes that there are. */
export function showMixes(model) {
  byId("mix").hidden = !model.adapters.length;
  renew(byId("mix-weights"), [model.name, model.adapters], () => refill(byId("mix-weights"), ...model.adapters.map((name, at) => make(
    "div", { class: "field weight" }, make("label", { for: `mix-${at}` }, name), make("input", {
      id: `mix-${at}`, type: "number", step: "any", min: -1000, max: 1000, placeholder: "0", "data-name": name, "data-held": name,
    }),
  ))));
  const mixes = mixesOf(model);
  renew(byId("mixes"), [model.name, mixes], () => refill(byId("mixes"), ...mixes.map((mix) => make(
    "li", {}, make("span", { class: "who" }, mix), make("button", {
      type: "button", class: "plain", "data-held": mix, "aria-label": `Remove the mix ${mix}`,
      onclick: () => {
        keep(model.name, mixes.filter((one) => one !== mix));
        byId("mixes").dispatchEvent(new Event("change", { bubbles: true }));
      },
    }, "Remove"),
  ))));
}

/** model(): the status of the model that is shown. use(voice): answers with a mix from now on. changed(): shows the voices anew. */
export function startMixes(model, use, changed) {
  byId("mixes").addEventListener("change", changed);
  byId("mix").addEventListener("submit", (event) => {
    event.preventDefault();
    const shown = model();
    const parts = [...byId("mix-weights").querySelectorAll("input")].filter((box) => box.value !== "" && Number(box.value) !== 0)
      .map((box) => [box.dataset.name, Number(box.value)]);
    tell(byId("mix-error"), parts.length ? "" : "Set a weight other than 0 for at least one adapter.");
    if (!shown || !parts.length) return;
    const mix = parts.map(([name, weight]) => `${name}:${weight}`).join("+");
    keep(shown.name, [mix, ...mixesOf(shown).filter((one) => one !== mix)]);
    changed();
    use(`${shown.name}:${mix}`);
    byId("mix-said").textContent = `${mix} answers from now on`;
  });
}
