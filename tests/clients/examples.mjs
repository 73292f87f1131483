// Tools and streams with OpenAI's and Anthropic's JavaScript clients, as their documentation shows; prints one line of JSON.
import Anthropic from "@anthropic-ai/sdk";
import OpenAI from "openai";

const openai = new OpenAI();
const messages = [{ role: "user", content: "What is the weather like in Paris today?" }];
const parameters = { type: "object", properties: { city: { type: "string", maxLength: 20 } }, required: ["city"] };
const tools = [{ type: "function", function: { name: "get_weather", description: "The weather of a town.", parameters } }];
const said = {};

const stream = openai.chat.completions.stream({ model: "demo", messages, tools, tool_choice: "required", temperature: 0, max_tokens: 80 });
const completion = await stream.finalChatCompletion();
const call = completion.choices[0].message.tool_calls[0];
said.tool = [completion.choices[0].finish_reason, call.function.name, Object.keys(JSON.parse(call.function.arguments))];
messages.push(completion.choices[0].message, { role: "tool", tool_call_id: call.id, content: "12 degrees" });
const after = await openai.chat.completions.create({ model: "demo", messages, tools, temperature: 0, max_tokens: 20 });
said.after = typeof after.choices[0].message.content;

const response = await openai.responses.create({
  model: "demo", input: "Weather?", tools: [{ type: "function", name: "get_weather", parameters, strict: true }],
  tool_choice: "required", temperature: 0, max_output_tokens: 80,
});
said.response = response.output.map((item) => item.type);
const embedding = await openai.embeddings.create({ model: "demo", input: "The food was delicious." });
said.embedding = embedding.data[0].embedding.length;

const anthropic = new Anthropic();
const message = anthropic.messages.stream({ model: "demo", max_tokens: 60, messages: [{ role: "user", content: "Hello, Claude" }] });
let text = "";
message.on("text", (piece) => { text += piece; });
const whole = await message.finalMessage();
said.anthropic = [whole.stop_reason !== null, text === whole.content[0].text];
const asked = { model: "demo", messages: [{ role: "user", content: "Weather in Rome?" }],
  tools: [{ name: "get_weather", input_schema: parameters }], tool_choice: { type: "any" } };
const used = await anthropic.messages.stream({ ...asked, max_tokens: 80, temperature: 0 }).finalMessage();
said.used = [used.stop_reason, used.content[0].type, Object.keys(used.content[0].input)];
said.counted = (await anthropic.messages.countTokens(asked)).input_tokens > 10;
try {
  await anthropic.messages.create({ model: "nobody", max_tokens: 5, messages: asked.messages });
} catch (error) {
  said.error = [error.constructor.name, error.status, error.error.error.type];
}
console.log(JSON.stringify(said));
