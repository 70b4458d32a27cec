"""Files an engine process on a CPU starts with; see `sitecustomize.py`."""
