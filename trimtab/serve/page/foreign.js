// Chats of other programs: the conversations.json of a ChatGPT export, and the chats that Open WebUI exports. Both are a list of
// conversations, each a tree of messages with the one that is shown last; what leads to that one becomes a chat of this page.

const MOST_CHATS = 20_000, MOST_MESSAGES = 20_000; // of a file, and from the first to the last message of a chat
const MOST_NAMED = 3; // chats that a sentence lists

const isTree = (value) => typeof value === "object" && value !== null && !Array.isArray(value);
const words = (value) => (typeof value === "string" ? value : "");

/** Return the chats of a parsed file in the form of this page, and what was left out:
 *  {chats, empty: titles of chats without a message, parts: images and files that are not in the file}. null: another kind of file.
 *  Errors: Error that names the chat that cannot be read. */
export function foreignChats(held) {
  if (!Array.isArray(held) || !held.length || !held.every(isForeign)) return null;
  if (held.length > MOST_CHATS) throw new Error(`The file holds ${held.length} chats; ${MOST_CHATS} are read at most`);
  const found = { chats: [], empty: [], parts: 0 };
  for (const one of held) {
    const chat = isTree(one.mapping) ? ofChatGpt(one, found) : ofOpenWebUi(one, found);
    if (chat.turns.length) found.chats.push(chat);
    else found.empty.push(chat.title);
  }
  return found;
}

const isForeign = (one) => isTree(one) && (isTree(one.mapping) || isTree(one.chat?.history?.messages));

/** Return what was left out, as a sentence; "" for nothing. */
export function leftOut({ empty, parts }) {
  const said = [];
  if (empty.length) {
    const more = empty.length > MOST_NAMED ? ` and ${empty.length - MOST_NAMED} more` : "";
    said.push(`without a message: ${empty.slice(0, MOST_NAMED).map((title) => `“${title}”`).join(", ")}${more}`);
  }
  if (parts) said.push(`not in the file: ${parts} ${parts === 1 ? "image or file" : "images or files"}`);
  return said.join("; ");
}

function ofChatGpt(one, found) {
  const title = words(one.title) || "Chat";
  const messages = pathTo(one.mapping, one.current_node, ({ parent }) => parent, title).flatMap(({ message }) => {
    const role = message?.author?.role, content = message?.content;
    if (!["user", "assistant"].includes(role) || !["text", "multimodal_text", "code"].includes(content?.content_type)) return [];
    // What a model says to a tool, and what the program says in the user's name, is not shown there either.
    if (message.metadata?.is_visually_hidden_from_conversation || (message.recipient ?? "all") !== "all") return [];
    const parts = Array.isArray(content.parts) ? content.parts : [words(content.text)];
    found.parts += parts.filter(isTree).length;
    return [{ role, text: parts.map((part) => words(part) || words(part?.text)).filter(Boolean).join("\n\n"), model: words(message.metadata?.model_slug) }];
  });
  return chatOf({ id: one.conversation_id ?? one.id, title, seconds: one.update_time ?? one.create_time, messages });
}

function ofOpenWebUi(one, found) {
  const { history, params, system } = one.chat, title = words(one.title) || words(one.chat.title) || "Chat";
  const messages = pathTo(history.messages, history.currentId, ({ parentId }) => parentId, title).flatMap((message) => {
    if (!["user", "assistant"].includes(message.role)) return [];
    found.parts += Array.isArray(message.files) ? message.files.length : 0;
    return [{ role: message.role, text: words(message.content), model: words(message.model) }];
  });
  return chatOf({ id: one.id, title, seconds: one.updated_at ?? one.created_at, messages, system: words(params?.system) || words(system) });
}

/** Return the nodes of a tree from the first to the one with a name, or to the last one of the file. */
function pathTo(nodes, last, parentOf, title) {
  const path = [], seen = new Set();
  let name = Object.hasOwn(nodes, last ?? "") ? last : Object.keys(nodes).at(-1);
  while (name !== null && name !== undefined && Object.hasOwn(nodes, name)) {
    const node = nodes[name];
    if (!isTree(node) || seen.has(name)) throw new Error(`The chat “${title}” cannot be read: its messages do not follow each other`);
    if (path.length === MOST_MESSAGES) throw new Error(`The chat “${title}” has more than ${MOST_MESSAGES} messages`);
    seen.add(name);
    path.push(node);
    name = parentOf(node);
  }
  return path.reverse();
}

function chatOf({ id, title, seconds, messages, system = "" }) {
  const turns = [];
  const answer = (text, voice, how) => ({ at: 0, versions: [{ voice, text, thinking: "", tokens: [], facts: "imported", how }] });
  for (const { role, text, model } of messages) {
    if (!text.trim()) continue;
    const last = turns.at(-1), version = last?.slots[0]?.versions[0];
    if (role === "user") turns.push({ text, media: [], slots: [], later: {} });
    else if (version) version.text += `\n\n${text}`; // one answer in several messages
    else {
      if (!last) turns.push({ text: "(no message)", media: [], slots: [], later: {} });
      turns.at(-1).slots.push(answer(text, `imported:${model || "another model"}`, null));
    }
  }
  for (const turn of turns) if (!turn.slots.length) turn.slots.push(answer("", "imported:no answer", "interrupted"));
  return { id: idOf(id), title, at: Number.isFinite(seconds) ? seconds * 1000 : Date.now(), isNamed: true, turns, options: system ? { system } : {} };
}

/** Return an id of this page: the same for the same chat, so that a file that is read twice adds nothing. */
function idOf(id) {
  const letters = words(id).toLowerCase().replaceAll(/[^0-9a-f]/g, "");
  if (letters.length >= 24) return letters.slice(0, 24);
  return [...crypto.getRandomValues(new Uint8Array(12))].map((value) => value.toString(16).padStart(2, "0")).join("");
}
