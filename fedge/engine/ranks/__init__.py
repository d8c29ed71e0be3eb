"""Several processes that simulate one federation together."""
