"""Programs that tests run as processes of their own; each prints what it saw as lines of JSON."""
