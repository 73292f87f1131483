// An offer to take back what was just removed. It stays a while, and as long as the pointer or the focus is on it.

import { byId } from "./dom.js";

const STAYS_MS = 15_000;

let undo = null, timer = null;

/** Offer to take back what `words` say. work(): does it. isFocused: the button that was pressed is gone, so Undo gets the focus. */
export function offerUndo(words, work, { isFocused = false } = {}) {
  undo = work;
  byId("undo-text").textContent = words;
  byId("undo").hidden = false;
  if (isFocused) byId("undo-yes").focus();
  wait();
}

/** Take the offer away, because what is shown has changed. */
export function endUndo() {
  undo = null;
  clearTimeout(timer);
  const hadFocus = byId("undo").contains(document.activeElement);
  byId("undo").hidden = true;
  if (hadFocus) byId("question").focus({ preventScroll: true });
}

export function startUndo() {
  byId("undo-yes").addEventListener("click", async () => {
    const work = undo;
    endUndo();
    await work?.();
  });
  byId("undo-close").addEventListener("click", endUndo);
  for (const event of ["mouseleave", "focusout"]) byId("undo").addEventListener(event, wait);
}

function wait() {
  clearTimeout(timer);
  timer = setTimeout(() => (byId("undo").matches(":hover, :focus-within") ? wait() : endUndo()), STAYS_MS);
}
