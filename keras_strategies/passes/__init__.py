"""Analysis and transformation of traced functions (jaxprs)."""
