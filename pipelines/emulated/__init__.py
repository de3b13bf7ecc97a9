"""The emulated cluster: the engine model of `learn` in real time behind vLLM's HTTP API."""
