// The list of chats on the left, and the two drawers that open and close.

import { byId, make, renew, tool } from "./dom.js";
import * as store from "./store.js";
import { sure } from "./sure.js";

const DAY_MS = 24 * 3600 * 1000;
const KEPT = "trimtab-drawers";
// Below these widths a drawer lies over the conversation.
const OVER = { chats: matchMedia("(max-width: 860px)"), panel: matchMedia("(max-width: 1180px)") };

/** chat(): what `startChat` returned. Returns what shows the list anew. */
export function startChats(chat) {
  byId("new-chat").addEventListener("click", () => go(null));
  byId("search").addEventListener("input", show);
  byId("delete-all").addEventListener("click", async () => {
    const found = await store.heads();
    if (await sure("Delete all chats?", `${found.length} chats with their images and audio will be deleted from this browser.`, "Delete all")) {
      await chat().forget(null);
      show();
    }
  });
  document.addEventListener("keydown", (event) => {
    if (event.key.toLowerCase() === "o" && event.shiftKey && (event.ctrlKey || event.metaKey)) {
      event.preventDefault();
      go(null);
    }
  });
  show();

  async function go(id) {
    await chat().open(id);
    show();
    if (OVER.chats.matches) setDrawer("chats", false);
  }

  async function remove({ id, title }) {
    if (!(await sure("Delete this chat?", `“${title}” will be deleted from this browser.`, "Delete"))) return;
    await chat().forget(id);
    show();
    byId("new-chat").focus();
  }

  async function show() {
    const wanted = byId("search").value.trim().toLowerCase(), all = await store.heads();
    const found = all.filter(({ title }) => title.toLowerCase().includes(wanted));
    const list = byId("chat-list"), current = chat().current();
    byId("delete-all").hidden = !all.length;
    byId("search-field").hidden = all.length < 8;
    byId("kept-note").textContent = store.isLasting ? "Chats stay in this browser." : "This browser has no storage: chats end with this tab.";
    renew(list, [found, current], () => {
      const groups = new Map();
      for (const head of found) {
        const day = dayOf(head.at);
        groups.set(day, [...(groups.get(day) ?? []), head]);
      }
      list.replaceChildren(...[...groups].flatMap(([day, heads]) => [
        make("h2", { class: "day" }, day),
        make("ul", {}, ...heads.map((head) => make("li", { class: head.id === current ? "is-current" : null },
          make("button", {
            type: "button", class: "open", "data-held": head.id, title: head.title,
            "aria-current": head.id === current ? "page" : null, onclick: () => go(head.id),
          }, head.title),
          tool("delete", `Delete ${head.title}`, () => remove(head))))),
      ]));
      if (!found.length) list.append(make("p", { class: "hint" }, all.length ? "No chat title matches." : "No chats yet."));
    });
  }

  return show;
}

function dayOf(at) {
  const midnight = new Date().setHours(0, 0, 0, 0);
  if (at >= midnight) return "Today";
  if (at >= midnight - DAY_MS) return "Yesterday";
  return at >= midnight - 7 * DAY_MS ? "Last seven days" : "Earlier";
}

// Drawers ----------------------------------------------------------------------------------------------------------------

export function setDrawer(name, isOpen) {
  const drawer = byId(name), button = byId(`${name}-open`), hadFocus = drawer.contains(document.activeElement);
  drawer.hidden = !isOpen;
  button.setAttribute("aria-expanded", String(isOpen));
  const isOver = ["chats", "panel"].some((one) => OVER[one].matches && !byId(one).hidden);
  for (const under of byId("middle").querySelectorAll("[data-under]")) under.inert = isOver;
  byId("app").classList.toggle("has-over", isOver);
  if (isOpen && OVER[name].matches) drawer.querySelector("button")?.focus();
  if (!isOpen && hadFocus) button.focus();
}

function drawers() {
  try {
    return { chats: true, panel: true, ...JSON.parse(localStorage.getItem(KEPT) ?? "{}") };
  } catch {
    return { chats: true, panel: true };
  }
}

export function startDrawers() {
  for (const name of ["chats", "panel"]) {
    const turn = (isOpen) => {
      setDrawer(name, isOpen);
      if (OVER[name].matches) return; // opened for a moment
      try {
        localStorage.setItem(KEPT, JSON.stringify({ ...drawers(), [name]: isOpen }));
      } catch {
        // Then it is so as long as the page is open.
      }
    };
    byId(`${name}-open`).addEventListener("click", () => turn(byId(name).hidden));
    byId(`${name}-close`).addEventListener("click", () => turn(false));
    OVER[name].addEventListener("change", () => setDrawer(name, !OVER[name].matches && drawers()[name]));
    byId(name).addEventListener("keydown", (event) => {
      if (event.key === "Escape" && OVER[name].matches) setDrawer(name, false);
    });
    setDrawer(name, !OVER[name].matches && drawers()[name]);
  }
  byId("app").addEventListener("click", ({ target }) => {
    if (target !== byId("app")) return; // the shade beside an open drawer
    for (const name of ["chats", "panel"]) if (OVER[name].matches) setDrawer(name, false);
  });
}
