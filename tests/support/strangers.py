"""Files in the current folder that have the names of modules."""

NAMES = ("json", "keras", "jax", "jaxlib", "selectors", "tempfile")


def write(folder):
    """Writes them; returns the file that each writes if it is imported."""
    folder.mkdir(exist_ok=True)
    imported = folder / "imported"
    for name in NAMES:
        (folder / f"{name}.py").write_text(
            f"open({str(imported)!r}, 'a').write({name!r})\n"
        )
    return imported
