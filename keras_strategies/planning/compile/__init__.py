"""Compiles candidates and reads the memory and time that they need."""
