"""Names in code: their chains, modules and targets."""

import libcst as cst

_V2 = "tensorflow.compat.v2"


def dotted_name(node: cst.CSTNode | None) -> str | None:
    """Returns the text of a chain of names, or None for another node."""
    words = []
    while isinstance(node, cst.Attribute):
        words.append(node.attr.value)
        node = node.value
    if not isinstance(node, cst.Name):
        return None
    return ".".join([node.value, *reversed(words)])


def list_ancestors(
    node: cst.CSTNode, parents: dict[cst.CSTNode, cst.CSTNode]
) -> list[cst.CSTNode]:
    """Returns the nodes around a node, from the innermost."""
    found = []
    while (parent := parents.get(node)) is not None:
        found.append(parent)
        node = parent
    return found


def normalize(name: str) -> str:
    """Returns the full name without the parts that several names share."""
    if name == _V2 or name.startswith(f"{_V2}."):
        name = "tensorflow" + name[len(_V2) :]
    for prefix in ("tensorflow.keras", "tensorflow.compat.v1.keras"):
        if name == prefix or name.startswith(f"{prefix}."):
            return "keras" + name[len(prefix) :]
    if name.startswith("tensorflow.compat.v1.distribute"):
        return "tensorflow." + name.removeprefix("tensorflow.compat.v1.")
    if name.startswith("tensorflow_estimator.estimator"):
        return "tensorflow." + name.removeprefix("tensorflow_estimator.")
    if name.startswith("tensorflow.compat.v1.estimator"):
        return "tensorflow." + name.removeprefix("tensorflow.compat.v1.")
    return name


def module_of(node: cst.ImportFrom) -> str:
    """Returns the module that a statement imports from, with its dots."""
    return "." * len(node.relative) + (dotted_name(node.module) or "")


def target_names(node: cst.CSTNode) -> list[str]:
    """Returns the names that a target of an assignment binds."""
    if isinstance(node, cst.Name):
        return [node.value]
    if isinstance(node, cst.Tuple | cst.List):
        return [n for e in node.elements for n in target_names(e.value)]
    return []
