"""What the documentation of LangChain's two packages shows, on one server; prints one line of JSON."""

import json

from langchain_anthropic import ChatAnthropic
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAIEmbeddings
from pydantic import BaseModel, Field

messages = [("system", "You are a helpful translator. Translate the user sentence to French."), ("human", "I love programming.")]


class GetWeather(BaseModel):
    """Get the current weather in a given location"""

    location: str = Field(..., description="The city and state, e.g. San Francisco, CA", max_length=20)


@tool
def multiply(a: int, b: int) -> int:
    """Multiply two numbers."""
    return a * b


model = ChatOpenAI(model="demo", temperature=0, max_tokens=None, timeout=None, max_retries=2)
said = {"invoke": model.invoke(messages).text, "stream": "".join(chunk.text for chunk in model.stream(messages))}
said["tokens"] = model.invoke(messages).usage_metadata["total_tokens"]
call = model.bind_tools([GetWeather], tool_choice="any").invoke("Which city is hotter today: LA or NY?").tool_calls[0]
said["tool"] = [call["name"], sorted(call["args"])]
question = HumanMessage("What is 3 * 12?")
first = model.bind_tools([multiply], tool_choice="multiply").invoke([question])
result = multiply.invoke(first.tool_calls[0])
assert isinstance(result, ToolMessage)
said["after"] = isinstance(model.bind_tools([multiply]).invoke([question, first, result]).content, str)
said["structured"] = type(model.with_structured_output(GetWeather).invoke("Weather in Rome?")).__name__
said["responses"] = ChatOpenAI(model="demo", use_responses_api=True, temperature=0).invoke(messages).text
embeddings = OpenAIEmbeddings(model="demo", check_embedding_ctx_length=False)
said["embedding"] = len(embeddings.embed_query("What was the total?"))
anthropic = ChatAnthropic(model="demo", temperature=0, max_tokens=60)
said["anthropic"] = anthropic.invoke(messages).text
said["anthropic stream"] = "".join(chunk.text for chunk in anthropic.stream(messages))
call = anthropic.bind_tools([GetWeather], tool_choice="any").invoke("Weather in Rome?").tool_calls[0]
said["anthropic tool"] = [call["name"], sorted(call["args"])]
print(json.dumps(said))
