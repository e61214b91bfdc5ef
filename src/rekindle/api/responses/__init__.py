"""OpenAI's Responses API, mapped to the neutral `Conversation` and never to chat completions."""
