"""Models: a tree of modules users navigate, and the engines that run blocks on it."""
