// The list of chats on the left, and the two drawers that open and close.

import { byId, counted, make, refill, renew, tell, tool } from "./dom.js";
import { saveAll, saveOne } from "./save.js";
import * as store from "./store.js";
import { sure } from "./sure.js";
import { offerUndo } from "./undo.js";

const DAY_MS = 24 * 3600 * 1000;
const KEPT = "trimtab-drawers";
// Below these widths a drawer lies over the conversation.
const OVER = { chats: matchMedia("(max-width: 860px)"), panel: matchMedia("(max-width: 1180px)") };

/** chat(): what `startChat` returned. Returns what shows the list anew. */
export function startChats(chat) {
  let isNaming = false; // a title is being written
  byId("new-chat").addEventListener("click", () => go(null));
  byId("search").addEventListener("input", show);
  byId("save-all").addEventListener("click", () => said(async () => `${counted(await saveAll(), "chat")} saved to a file`));
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
      return;
    }
    if (!(event.ctrlKey || event.metaKey) || event.shiftKey || event.altKey || document.querySelector("dialog[open]")) return;
    if (event.key === "k") {
      event.preventDefault();
      setDrawer("chats", true);
      byId("search-field").hidden = false;
      byId("search").select();
    } else if (event.key === "b") {
      event.preventDefault();
      byId(byId("chats").hidden ? "chats-open" : "chats-close").click();
    }
  });
  show();

  async function said(work) {
    tell(byId("save-error"), "");
    byId("save-said").textContent = "";
    try {
      byId("save-said").textContent = await work();
    } catch (error) {
      tell(byId("save-error"), error.message);
    }
  }

  /** Put a box in the place of a chat's title. */
  function rename(row, { id, title }) {
    const box = make("input", { class: "title-box", "aria-label": `New title of ${title}`, maxlength: 200 });
    isNaming = true;
    const end = async (isKept) => {
      if (!isNaming) return;
      isNaming = false;
      if (isKept && box.value.trim() && box.value.trim() !== title) await chat().rename(id, box.value.trim());
      byId("chat-list").shown = null;
      await show();
      byId("chat-list").querySelector(`[data-held="${id}"]`)?.focus();
    };
    box.value = title;
    box.addEventListener("keydown", (event) => {
      if (event.key === "Enter" && !event.isComposing) end(true);
      if (event.key === "Escape") {
        event.stopPropagation();
        end(false);
      }
    });
    box.addEventListener("blur", () => end(true));
    refill(row, box);
    box.select();
  }

  async function go(id) {
    await chat().open(id);
    show();
    if (OVER.chats.matches) setDrawer("chats", false);
  }

  async function remove({ id, title }) {
    const removed = await store.read(id), wasCurrent = id === chat().current();
    await chat().forget(id);
    await show();
    offerUndo(`“${title}” deleted`, async () => {
      await store.keep({ ...removed, revision: 0 });
      if (wasCurrent) await chat().open(id);
      show();
    }, { isFocused: true });
  }

  async function show() {
    const wanted = byId("search").value.trim(), all = await store.heads();
    const saying = wanted ? await store.saying(wanted) : new Set();
    if (wanted !== byId("search").value.trim() || isNaming) return; // another look is under way
    const found = all.filter(({ id, title }) => title.toLowerCase().includes(wanted.toLowerCase()) || saying.has(id));
    const list = byId("chat-list"), current = chat().current();
    byId("delete-all").hidden = !all.length;
    byId("save-all").hidden = !all.length;
    byId("search-field").hidden = all.length < 2 && !wanted && document.activeElement !== byId("search");
    byId("kept-note").textContent = store.isLasting ? "Chats stay in this browser." : "This browser has no storage: chats end with this tab.";
    renew(list, [found, current], () => {
      const groups = new Map();
      for (const head of found) {
        const day = dayOf(head.at);
        groups.set(day, [...(groups.get(day) ?? []), head]);
      }
      refill(list, ...[...groups].flatMap(([day, heads]) => [
        make("h2", { class: "day" }, day),
        make("ul", {}, ...heads.map((head) => {
          const row = make("li", { class: head.id === current ? "is-current" : null },
            make("button", {
              type: "button", class: "open", "data-held": head.id, title: head.title,
              "aria-current": head.id === current ? "page" : null, onclick: () => go(head.id),
            }, make("span", {}, head.title)));
          row.append(make("span", { class: "row-tools" },
            tool("save", `Export ${head.title}`, () => said(async () => {
              await saveOne(head);
              return `“${head.title}” saved to a file`;
            })),
            tool("edit", `Rename ${head.title}`, () => rename(row, head)),
            tool("delete", `Delete ${head.title}`, () => remove(head))));
          return row;
        })),
      ]));
      if (!found.length) list.append(make("p", { class: "hint" }, all.length ? "No chat says this." : "No chats yet."));
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
