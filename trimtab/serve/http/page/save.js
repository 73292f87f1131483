// Chats as a file: one chat or all of this browser as JSON, with their branches, images and audio.

import { make } from "./dom.js";
import { base64 } from "./media.js";
import * as store from "./store.js";

const FORM = "trimtab chats", VERSION = 1;

/** Give the reader text as a file. */
export function download(text, name, type) {
  const url = URL.createObjectURL(new Blob([text], { type }));
  make("a", { href: url, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(url), 1000);
}

/** Return the name of a file with a chat. */
export function fileName({ title }, ending) {
  return `${title.replaceAll(/[^\p{L}\p{N} _-]/gu, "").trim() || "chat"}.${ending}`;
}

/** Save every chat as one file. Returns how many there are. */
export async function saveAll() {
  const ids = (await store.heads()).map(({ id }) => id);
  await save(ids, `trimtab chats ${new Date().toISOString().slice(0, 10)}.json`);
  return ids.length;
}

/** Save one chat as a file. */
export function saveOne({ id, title }) {
  return save([id], fileName({ title }, "json"));
}

async function save(ids, name) {
  const chats = [];
  for (const id of ids) {
    const chat = await store.read(id);
    chats.push({ ...chat, turns: await packedTurns(chat.turns) });
  }
  download(JSON.stringify({ form: FORM, version: VERSION, chats }), name, "application/json");
}

function packedTurns(turns) {
  return Promise.all(turns.map(async (turn) => ({
    ...turn, media: await Promise.all(turn.media.map(packed)),
    later: Object.fromEntries(await Promise.all(Object.entries(turn.later ?? {}).map(async ([name, later]) => [name, await packedTurns(later)]))),
  })));
}

async function packed({ blob, ...item }) {
  return blob ? { ...item, data: await base64(blob) } : item;
}
