// How the page talks to its server: the key, errors in words, and answers that come in pieces.

const KEPT_KEY = "trimtab-key";
// What is only read and takes longer does not come: the server's machine sleeps, or the network is gone.
const READ_MS = 15_000;
const SILENT = "The server does not answer", BROKEN = "The connection to the server ended before the answer was complete";

let key = readKept();
let askForKey = async () => {};
let asking = null;

function readKept() {
  try {
    return sessionStorage.getItem(KEPT_KEY) ?? "";
  } catch {
    return "";
  }
}

/** prompt: an async function that gets a key from the reader and hands it to `useKey`; it learns whether that is the admin's. */
export function onKeyWanted(prompt) {
  askForKey = prompt;
}

export function useKey(given) {
  key = given;
  try {
    if (given) sessionStorage.setItem(KEPT_KEY, given);
    else sessionStorage.removeItem(KEPT_KEY);
  } catch {
    // Kept in this page's memory alone then.
  }
}

export const hasKey = () => key !== "";

/** Whether a key opens this server. */
export async function opens(given) {
  const answer = await fetch("/api/status", { headers: { authorization: `Bearer ${given}` }, cache: "no-store" });
  return answer.status !== 401;
}

export class ServerError extends Error {
  constructor(error, status) {
    super(error.message);
    this.name = error.class ?? "Error";
    this.status = status;
    this.problems = error.fields?.problems ?? [];
  }
}

export class Unreachable extends Error {}

async function send(path, options, isAgain = false) {
  const headers = { ...options.headers };
  const used = key;
  if (used) headers.authorization = `Bearer ${used}`;
  const signal = options.method ? options.signal : AbortSignal.timeout(READ_MS);
  let answer;
  try {
    answer = await fetch(path, { cache: "no-store", ...options, headers, signal });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Unreachable(SILENT);
  }
  const needsAdmin = answer.status === 403 && (await errorOf(answer.clone())).code === "admin_key_needed";
  if ((answer.status === 401 || needsAdmin) && !isAgain) {
    // Requests that run into the closed door together wait for one prompt, and for none if the key has changed since.
    if (used === key) {
      asking ??= askForKey(needsAdmin).finally(() => { asking = null; });
      await asking;
    }
    return send(path, options, true);
  }
  if (!answer.ok) throw new ServerError(await errorOf(answer), answer.status);
  return answer;
}

async function errorOf(answer) {
  try {
    const body = await answer.json();
    if (body.error?.message) return body.error;
  } catch {
    // Not ours, then: a proxy's page, or nothing.
  }
  return { message: `The server answered ${answer.status} ${answer.statusText}` };
}

export async function get(path) {
  return read(await send(path, {}));
}

const read = (answer) => answer.json().catch(() => { throw new Unreachable(BROKEN); });

function posted(body, signal) {
  return { method: "POST", body: JSON.stringify(body), headers: { "content-type": "application/json" }, signal };
}

export async function post(path, body) {
  return read(await send(path, posted(body)));
}

/** Yield what a stream of server-sent events says, parsed, until [DONE] or its end. Throws what an `error` event tells. */
export async function* stream(path, body, signal) {
  const answer = await send(path, posted(body, signal));
  for await (const { event, data } of events(answer.body, signal)) {
    if (event === "error") throw new ServerError(JSON.parse(data).error, answer.status);
    if (data === "[DONE]") return;
    yield JSON.parse(data);
  }
  // The server sends [DONE] after every whole answer: without it this one is not whole.
  throw new Unreachable(BROKEN);
}

async function* events(body, signal) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { value, done } = await reader.read().catch((error) => { throw signal.aborted ? error : new Unreachable(BROKEN); });
      if (done) return;
      const blocks = (rest + value).replaceAll("\r\n", "\n").split("\n\n");
      rest = blocks.pop();
      for (const block of blocks) {
        const found = { event: "message", data: [] };
        for (const line of block.split("\n")) {
          if (line.startsWith("event:")) found.event = line.slice(6).trim();
          else if (line.startsWith("data:")) found.data.push(line.slice(5).replace(/^ /, ""));
        }
        if (found.data.length) yield { event: found.event, data: found.data.join("\n") };
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}
