"""What schemathesis cannot know of our description: texts that are Python, and names of edits."""

from __future__ import annotations

import schemathesis
from hypothesis import strategies

NAME = "described"
"""The edit that is installed while it runs."""

_CODE = ["", "x = [1].save()", "1 / 0", "for _ in tracer.all():\n    y = model.logits.save()"]

schemathesis.openapi.format("python", strategies.sampled_from(_CODE))
schemathesis.openapi.format("edit", strategies.just(NAME))
