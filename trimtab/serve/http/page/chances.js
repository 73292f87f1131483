// An answer token by token: how probable each was, and what else could have stood in its place.

import { byId, make, refill } from "./dom.js";

const STEPS = [[0.9, "sure"], [0.5, "likely"], [0.2, "open"], [0, "unsure"]];

/** Keep of a stream's logprobs what the page shows: [{text, chance, others: [[text, chance]]}]. */
export function tokensOf(logprobs) {
  return (logprobs?.content ?? []).map(({ token, logprob, top_logprobs: top }) => ({
    text: token, chance: Math.exp(logprob), others: (top ?? []).map((one) => [one.token, Math.exp(one.logprob)]),
  }));
}

/** Return an answer's tokens, each with a tip on hover and on focus. The arrows go from token to token. */
export function chanceView(tokens) {
  const list = make("p", { class: "tokens", role: "group", "aria-label": "Tokens; use the arrow keys to move" });
  tokens.forEach((token, at) => list.append(make(
    "span", { class: `token ${stepOf(token.chance)}`, tabindex: at ? -1 : 0, "data-at": at, "aria-describedby": "chance" }, token.text,
  )));
  const show = ({ target }) => {
    const token = tokens[target.dataset.at];
    if (token) showTip(target, token);
  };
  // A touch leaves at once, and what it touched has the focus: its tip stays.
  const leave = () => (list.contains(document.activeElement) ? show({ target: document.activeElement }) : hideTip());
  for (const [event, act] of [["mouseover", show], ["focusin", show], ["mouseleave", leave], ["focusout", hideTip]]) {
    list.addEventListener(event, act);
  }
  list.addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (event.key === "Escape") hideTip();
    const next = step && list.children[Number(document.activeElement.dataset.at) + step];
    if (!next) return;
    event.preventDefault();
    document.activeElement.tabIndex = -1;
    next.tabIndex = 0;
    next.focus();
  });
  return list;
}

function stepOf(chance) {
  return STEPS.find(([least]) => chance >= least)[1];
}

function showTip(target, token) {
  const tip = byId("chance");
  const row = (text, chance, isTaken) => make(
    "span", { class: isTaken ? "choice taken" : "choice" }, make("code", {}, visible(text)), ` ${percent(chance)}`,
  );
  const others = token.others.filter(([text]) => text !== token.text);
  refill(tip, row(token.text, token.chance, true), ...others.map(([text, chance]) => row(text, chance, false)));
  tip.hidden = false;
  const box = target.getBoundingClientRect(), size = tip.getBoundingClientRect();
  const below = box.bottom + 6 + size.height < innerHeight;
  tip.style.left = `${Math.max(8, Math.min(box.left, innerWidth - size.width - 8))}px`;
  tip.style.top = `${below ? box.bottom + 6 : Math.max(8, box.top - size.height - 6)}px`;
}

export function hideTip() {
  byId("chance").hidden = true;
}

/** Return a token as it can be read: spaces and line ends have a sign. */
function visible(text) {
  return text.replaceAll(" ", "␣").replaceAll("\n", "⏎").replaceAll("\t", "⇥") || "∅";
}

function percent(chance) {
  return chance >= 0.9995 ? "100 %" : chance < 0.0005 ? "< 0.1 %" : `${(100 * chance).toFixed(1)} %`;
}
