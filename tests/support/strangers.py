"""Files in the current directory that have the names of modules."""

NAMES = ("json", "keras", "jax", "jaxlib", "selectors", "tempfile")


def write(directory):
    """Writes them; returns the file that each writes if it is imported."""
    directory.mkdir(exist_ok=True)
    imported = directory / "imported"
    for name in NAMES:
        (directory / f"{name}.py").write_text(
            f"open({str(imported)!r}, 'a').write({name!r})\n"
        )
    return imported
