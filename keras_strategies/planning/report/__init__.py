"""The results of a plan: planned steps, a table, an HTML page and advice."""
