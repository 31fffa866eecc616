"""Compiles candidates for shapes and reads their programs' figures."""
