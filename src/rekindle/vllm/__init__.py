"""vLLM as the engine: `generation.Engine` over the HTTP API of one or more vLLM servers."""
