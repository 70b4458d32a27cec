"""midstream over HTTP: vLLM's OpenAI-compatible server with blocks. Its client is `serve=`."""
