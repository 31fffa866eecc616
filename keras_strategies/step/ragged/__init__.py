"""Calls on replicas that have different numbers of rows."""
