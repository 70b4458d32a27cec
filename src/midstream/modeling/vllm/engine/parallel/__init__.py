"""Several ranks, each with a part of the model, and the same blocks on all of them."""
