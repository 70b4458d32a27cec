"""A `with` body becomes a Block: captured, compiled, serialisable. No torch model here."""
