"""What schemathesis cannot know of our description: texts with tokens, Python, names of edits."""

from __future__ import annotations

import schemathesis
from hypothesis import strategies

NAME = "described"
"""The edit that is installed while it runs."""

_CODE = ["", "x = [1].save()", "1 / 0", "for _ in tracer.all():\n    y = model.logits.save()"]

schemathesis.openapi.format("python", strategies.sampled_from(_CODE))
_PROMPTS = ["t3", "t3 t4 t5", "\u4e2d\u6587 \U0001f600", "{% x %}", "a\x00b"]

schemathesis.openapi.format("prompt", strategies.sampled_from(_PROMPTS))
schemathesis.openapi.format("edit", strategies.just(NAME))
