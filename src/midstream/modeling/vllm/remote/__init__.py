"""A midstream server as a client uses it: `serve=`. Nothing here needs vLLM."""
