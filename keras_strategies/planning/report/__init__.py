"""The results of a plan: its steps, table, HTML page and advice."""
