// A question before something that cannot be taken back.

import { byId } from "./dom.js";

/** Return whether the reader wants it. */
export function sure(title, text, yes) {
  const dialog = byId("sure");
  byId("sure-title").textContent = title;
  byId("sure-text").textContent = text;
  byId("sure-yes").textContent = yes;
  dialog.returnValue = "no";
  dialog.showModal();
  byId("sure-no").focus();
  return new Promise((done) => {
    dialog.addEventListener("close", () => done(dialog.returnValue === "yes"), { once: true });
  });
}
