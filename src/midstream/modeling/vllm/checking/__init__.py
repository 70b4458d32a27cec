"""`model.check()`: an engine's reads and writes beside HuggingFace's forward of its checkpoint."""
