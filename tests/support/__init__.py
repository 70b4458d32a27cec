"""What the tests stand on: tiny checkpoints and the right answers for them."""
