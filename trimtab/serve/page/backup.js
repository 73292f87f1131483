// Chats as a file, and back: every chat of this browser in one JSON text, its images and audio too.

import { counted, make } from "./dom.js";
import { base64 } from "./media.js";
import * as store from "./store.js";

const FORM = "trimtab chats", VERSION = 1;
const MOST_BYTES = 500 * 2 ** 20; // of a file that is read
const MOST_DEPTH = 200; // branches within branches
const FORMATS = { image: ["image/png", "image/jpeg", "image/webp"], sound: ["wav", "flac"] };

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

/** Save one chat as a file that can be imported. */
export async function saveOne({ id, title }) {
  await save([id], fileName({ title }, "json"));
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

/** Keep the chats of a file that `saveAll` made; those that are here already stay as they are. Returns a sentence: how many are new.
 *  Errors: Error in words that a reader understands. */
export async function readAll(file) {
  if (file.size > MOST_BYTES) throw new Error(`${file.name} is too large to be read here`);
  let held;
  try {
    held = JSON.parse(await file.text());
  } catch {
    throw new Error(`${file.name} is no JSON file`);
  }
  if (held?.form !== FORM || !Array.isArray(held.chats)) throw new Error(`${file.name} does not hold chats of this page`);
  if (held.version !== VERSION) throw new Error(`${file.name} has version ${held.version} of the form; this page reads ${VERSION}`);
  const here = new Set((await store.heads()).map(({ id }) => id));
  const chats = new Map(held.chats.map(chatOf).filter(({ id }) => !here.has(id)).map((chat) => [chat.id, chat]));
  let added = 0;
  for (const chat of chats.values()) {
    try {
      await store.keep(chat);
    } catch {
      throw new Error(`The browser's storage is full: ${added} of ${counted(chats.size, "chat")} added`);
    }
    added += 1;
  }
  return `${counted(added, "chat")} added`;
}

// What is read is made anew field by field: a file from elsewhere brings nothing but what a chat has.

const text = (value) => (typeof value === "string" ? value : "");
const list = (value) => (Array.isArray(value) ? value : []);
const number = (value) => (Number.isFinite(value) ? value : 0);

function chatOf(found) {
  const turns = turnsOf(found?.turns, 0);
  const id = /^[0-9a-f]{24}$/.test(text(found?.id)) ? found.id : null;
  if (id === null || !turns.length) throw new Error("The file holds a chat that is not whole");
  return {
    id, title: text(found.title) || "Chat", at: number(found.at), isNamed: found.isNamed === true, turns,
    options: Object.fromEntries(Object.entries(found.options ?? {}).filter(([, value]) => ["string", "boolean"].includes(typeof value))),
  };
}

function turnsOf(found, depth) {
  if (depth > MOST_DEPTH) throw new Error(`The file holds a chat with more than ${MOST_DEPTH} branches within branches`);
  return list(found).map((turn) => turnOf(turn, depth)).filter(({ slots }) => slots.length);
}

function turnOf(found, depth) {
  const slots = list(found?.slots).map((slot) => ({ at: number(slot?.at), versions: list(slot?.versions).map(versionOf) }))
    .filter(({ versions }) => versions.length).map((slot) => ({ ...slot, at: Math.min(Math.max(0, Math.trunc(slot.at)), slot.versions.length - 1) }));
  const later = Object.entries(found?.later ?? {}).filter(([name]) => /^\d{1,6}(,\d{1,6})*$/.test(name));
  return {
    text: text(found?.text), media: list(found?.media).map(itemOf).filter((item) => item !== null), slots,
    later: Object.fromEntries(later.map(([name, turns]) => [name, turnsOf(turns, depth + 1)])),
  };
}

function versionOf(found) {
  const tokens = list(found?.tokens).map((token) => ({
    text: text(token?.text), chance: number(token?.chance),
    others: list(token?.others).map((other) => [text(other?.[0]), number(other?.[1])]),
  }));
  return {
    voice: text(found?.voice), text: text(found?.text), thinking: text(found?.thinking), tokens, facts: text(found?.facts),
    how: found?.how ? text(found.how) : null, error: found?.error ? text(found.error) : null, isBusy: false, isJson: found?.isJson === true,
    used: number(found?.used),
  };
}

function itemOf(found) {
  const { kind, format } = found ?? {}, name = text(found?.name) || "file";
  if (kind === "text") return { kind, name, format: "text/plain", text: text(found.text) };
  if (!FORMATS[kind]?.includes(format)) return null;
  let letters;
  try {
    letters = atob(text(found.data));
  } catch {
    throw new Error(`The file holds ${kind === "image" ? "an image" : "audio"} that is not base64: ${name}`);
  }
  const bytes = Uint8Array.from(letters, (letter) => letter.charCodeAt(0));
  return { kind, name, format, blob: new Blob([bytes], { type: kind === "image" ? format : `audio/${format}` }) };
}
