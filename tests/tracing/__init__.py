"""Tests of capture, compilation, binding, saves and shipping; no torch model and no engine."""
