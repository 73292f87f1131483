// Chats as a file, and back: every chat of this browser in one JSON text, its images and audio too.

import { make } from "./dom.js";
import { base64 } from "./media.js";
import * as store from "./store.js";

const FORM = "trimtab chats", VERSION = 1;
const MOST_BYTES = 500 * 2 ** 20; // of a file that is read
const FORMATS = { image: ["image/png", "image/jpeg", "image/webp"], sound: ["wav", "flac"] };

/** Give the reader text as a file. */
export function download(text, name, type) {
  const url = URL.createObjectURL(new Blob([text], { type }));
  make("a", { href: url, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(url), 1000);
}

/** Save every chat as one file. Returns how many there are. */
export async function saveAll() {
  const chats = [];
  for (const { id } of await store.heads()) {
    const chat = await store.read(id);
    const turns = await Promise.all(chat.turns.map(async (turn) => ({ ...turn, media: await Promise.all(turn.media.map(packed)) })));
    chats.push({ ...chat, turns });
  }
  const day = new Date().toISOString().slice(0, 10);
  download(JSON.stringify({ form: FORM, version: VERSION, chats }), `trimtab chats ${day}.json`, "application/json");
  return chats.length;
}

async function packed({ blob, ...item }) {
  return blob ? { ...item, data: await base64(blob) } : item;
}

/** Keep the chats of a file that `saveAll` made; those that are here already stay as they are. Returns how many are new.
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
  const chats = held.chats.map(chatOf).filter(({ id }) => !here.has(id));
  for (const chat of chats) await store.keep(chat);
  return chats.length;
}

// What is read is made anew field by field: a file from elsewhere brings nothing but what a chat has.

const text = (value) => (typeof value === "string" ? value : "");
const list = (value) => (Array.isArray(value) ? value : []);
const number = (value) => (Number.isFinite(value) ? value : 0);

function chatOf(found) {
  const turns = list(found?.turns).map(turnOf).filter(({ slots }) => slots.length);
  const id = /^[0-9a-f]{24}$/.test(found?.id) ? found.id : null;
  if (id === null || !turns.length) throw new Error("The file holds a chat that is not whole");
  return {
    id, title: text(found.title) || "Chat", at: number(found.at), isNamed: found.isNamed === true, turns,
    options: Object.fromEntries(Object.entries(found.options ?? {}).filter(([, value]) => ["string", "boolean"].includes(typeof value))),
  };
}

function turnOf(found) {
  const slots = list(found?.slots).map((slot) => ({ at: number(slot?.at), versions: list(slot?.versions).map(versionOf) }))
    .filter(({ versions }) => versions.length).map((slot) => ({ ...slot, at: Math.min(Math.max(0, Math.trunc(slot.at)), slot.versions.length - 1) }));
  return { text: text(found?.text), media: list(found?.media).map(itemOf).filter((item) => item !== null), slots };
}

function versionOf(found) {
  const tokens = list(found?.tokens).map((token) => ({
    text: text(token?.text), chance: number(token?.chance),
    others: list(token?.others).map((other) => [text(other?.[0]), number(other?.[1])]),
  }));
  return {
    voice: text(found?.voice), text: text(found?.text), thinking: text(found?.thinking), tokens, facts: text(found?.facts),
    how: found?.how ? text(found.how) : null, error: found?.error ? text(found.error) : null, isBusy: false, isJson: found?.isJson === true,
  };
}

function itemOf(found) {
  const { kind, format } = found ?? {}, name = text(found?.name) || "file";
  if (kind === "text") return { kind, name, format: "text/plain", text: text(found.text) };
  if (!FORMATS[kind]?.includes(format)) return null;
  const bytes = Uint8Array.from(atob(text(found.data)), (letter) => letter.charCodeAt(0));
  return { kind, name, format, blob: new Blob([bytes], { type: kind === "image" ? format : `audio/${format}` }) };
}
