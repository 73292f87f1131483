// How elements are made and figures written. Data only ever becomes text: nothing here, or elsewhere, parses HTML.

const SVG = "http://www.w3.org/2000/svg";

export const byId = (id) => document.getElementById(id);

export function make(tag, attributes = {}, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

export function draw(tag, attributes = {}, ...children) {
  return fill(document.createElementNS(SVG, tag), attributes, children);
}

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else element.setAttribute(name, value === true ? "" : String(value));
  }
  element.append(...present(children));
  return element;
}

/** Put children in the place of those that an element has; one that is null is left out. */
export function refill(element, ...children) {
  element.replaceChildren(...present(children));
}

// A browser writes "null" for one that is not there.
const present = (children) => children.filter((child) => child !== null && child !== undefined);

/** Return one of the drawings that the page keeps under `i-NAME`. */
export function icon(name) {
  return draw("svg", { class: "icon", "aria-hidden": "true", focusable: "false" }, draw("use", { href: `#i-${name}` }));
}

/** Return a small button of a drawing and a name that is read out. */
export function tool(name, label, onclick, more = {}) {
  return make("button", { type: "button", class: "quiet-button", "aria-label": label, title: label, onclick, ...more }, icon(name));
}

export function tell(element, text) {
  element.textContent = text;
  element.hidden = !text;
}

/** Run `remake` only when what it shows has changed, and put the focus back on the control that had it. */
export function renew(element, shown, remake) {
  const mark = JSON.stringify(shown);
  if (element.shown === mark) return;
  element.shown = mark;
  const held = element.contains(document.activeElement) ? document.activeElement.dataset.held : null;
  remake();
  if (!held) return;
  const again = [...element.querySelectorAll("[data-held]")].find((other) => other.dataset.held === held);
  (again ?? element.querySelector("[data-held]"))?.focus();
}

/** Put options into a select, keeping the choice if it is still there. groups: [label or null, [[value, text], ...]]. */
export function offer(select, groups) {
  renew(select, groups, () => {
    const chosen = select.value;
    const options = (pairs) => pairs.map(([value, text]) => make("option", { value }, text));
    refill(
      select,
      ...groups.flatMap(([label, pairs]) => (label === null ? options(pairs) : [make("optgroup", { label }, ...options(pairs))])),
    );
    if (groups.some(([, pairs]) => pairs.some(([value]) => value === chosen))) select.value = chosen;
  });
}

export function bytes(count) {
  for (const [unit, size, digits] of [["GiB", 2 ** 30, 2], ["MiB", 2 ** 20, 1], ["KiB", 2 ** 10, 1]]) {
    if (Math.abs(count) >= size) return `${(count / size).toFixed(digits)} ${unit}`;
  }
  return `${count} B`;
}

export function seconds(value) {
  if (value === null || value === undefined) return "-";
  return value < 1 ? `${Math.round(value * 1000)} ms` : `${value.toFixed(value < 10 ? 2 : 1)} s`;
}

export const rate = (value) => (value === null || value === undefined ? "-" : value.toFixed(value < 10 ? 2 : 1));

export const counted = (count, one, many = `${one}s`) => `${count} ${count === 1 ? one : many}`;
