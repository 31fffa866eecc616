"""A plan as it is read: its steps, table, page and advice."""
