"""Documents, tokens, prepared data sets and the rows that a model reads."""
