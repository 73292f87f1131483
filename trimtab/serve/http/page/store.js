// Chats, kept in this browser alone (IndexedDB): a list of heads {id, title, at}, and each chat whole, its images and sounds too.

import { allTurns } from "./branches.js";

const NAME = "trimtab", HEADS = "heads", CHATS = "chats";

let opening = null;
const inMemory = { heads: new Map(), chats: new Map() }; // where a browser keeps nothing

export let isLasting = true;

function database() {
  opening ??= new Promise((done) => {
    let request;
    const fail = () => {
      isLasting = false;
      done(null);
    };
    try {
      request = indexedDB.open(NAME, 1);
    } catch {
      fail();
      return;
    }
    request.onupgradeneeded = () => {
      for (const store of [HEADS, CHATS]) request.result.createObjectStore(store, { keyPath: "id" });
    };
    request.onsuccess = () => done(request.result);
    request.onerror = request.onblocked = fail;
  });
  return opening;
}

async function within(mode, work, fallback) {
  const held = await database();
  if (held === null) return fallback(inMemory);
  const transaction = held.transaction([HEADS, CHATS], mode);
  const request = work((store) => transaction.objectStore(store));
  return new Promise((done, failed) => {
    transaction.oncomplete = () => done(request?.result);
    transaction.onerror = transaction.onabort = () => failed(transaction.error ?? new Error("not kept"));
  });
}

/** Return every chat's head, the newest first. */
export async function heads() {
  const found = await within("readonly", (store) => store(HEADS).getAll(), ({ heads: all }) => [...all.values()]);
  return found.sort((a, b) => b.at - a.at);
}

/** Return the ids of the chats that say a word, in a message or an answer. */
export async function saying(word) {
  const wanted = word.toLowerCase(), chats = await within("readonly", (store) => store(CHATS).getAll(), ({ chats: all }) => [...all.values()]);
  const has = (text) => text.toLowerCase().includes(wanted);
  return new Set(chats.filter(({ turns }) => allTurns(turns).some(({ text, slots }) => (
    has(text) || slots.some(({ versions }) => versions.some((version) => has(version.text)))))).map(({ id }) => id));
}

export function read(id) {
  return within("readonly", (store) => store(CHATS).get(id), ({ chats }) => chats.get(id));
}

/** Another tab has changed the chat, or deleted it. */
export class ChangedError extends Error {}

const TAB = performance.timeOrigin + Math.random(); // who wrote a chat last

/** Keep a chat. Errors: ChangedError, and what the browser says when its room is used up. */
export async function keep(chat) {
  const head = { id: chat.id, title: chat.title, at: chat.at };
  let revision = null;
  await within("readwrite", (store) => {
    const reading = store(CHATS).get(chat.id);
    reading.onsuccess = () => {
      const held = reading.result, before = held?.revision ?? 0;
      if (before !== (chat.revision ?? 0) && held?.tab !== TAB) return;
      revision = before + 1;
      store(HEADS).put(head);
      store(CHATS).put({ ...chat, revision, tab: TAB });
    };
    return reading;
  }, ({ heads: all, chats }) => {
    revision = 0;
    all.set(chat.id, head);
    chats.set(chat.id, structuredClone(chat));
  });
  if (revision === null) throw new ChangedError("changed in another tab");
  chat.revision = revision;
}

export function forget(id) {
  return within("readwrite", (store) => {
    store(HEADS).delete(id);
    return store(CHATS).delete(id);
  }, ({ heads: all, chats }) => {
    all.delete(id);
    chats.delete(id);
  });
}

export function forgetAll() {
  return within("readwrite", (store) => {
    store(HEADS).clear();
    return store(CHATS).clear();
  }, ({ heads: all, chats }) => {
    all.clear();
    chats.clear();
  });
}
