"""Converting tf.data datasets to graphs, editing graphs, and converting back.

The ops that convert a dataset to a graph and back are public; tf_nodes.py
lists the names of the nodes in such graphs.
"""

import re
import sys
from collections.abc import Iterable, Iterator
from types import ModuleType
from typing import Any

import numpy as np

from keras_strategies._types import Array, Dataset, Tree

Graph = Any
Node = Any

_MAX_BYTES = 1 << 31
# With `strip_device_assignment`, TensorFlow (2.21) writes this for a device
# without a type, which `tf.py_function` has, and cannot read it.
_UNREADABLE_DEVICE = "/device::0"


def tensorflow() -> ModuleType:
    """Returns the TensorFlow module, which the user's code has imported."""
    return sys.modules["tensorflow"]


def write_graph(dataset: Dataset) -> Graph | None:
    """Converts a dataset to a graph.

    Returns None if that is not possible, because the graph would be too large
    (2 GiB) or TensorFlow cannot convert one of the dataset's operations.
    """
    tf = tensorflow()
    if _num_bytes(dataset) >= _MAX_BYTES:
        return None  # Trying to convert it would fail after a long time.
    try:
        written = tf.raw_ops.DatasetToGraphV2(
            input_dataset=tf.data.experimental.to_variant(dataset),
            # 1 means: ignore external state, which stays valid in this process.
            external_state_policy=1,
            strip_device_assignment=True,
        )
    except tf.errors.OpError:
        return None
    graph = tf.compat.v1.GraphDef()
    graph.ParseFromString(written.numpy())
    for body in (graph.node, *(f.node_def for f in graph.library.function)):
        for node in body:
            if node.device == _UNREADABLE_DEVICE:
                node.device = ""
    return graph if graph.node else None


def _num_bytes(dataset: Dataset) -> int:
    """Returns the size in bytes of the arrays in a dataset, if known."""
    return sum(
        array.shape.num_elements() * array.dtype.size
        for part in iterate_inputs(dataset)
        for array in getattr(part, "_tensors", ())
    )


def iterate_inputs(dataset: Dataset) -> Iterator[Any]:
    """Yields a dataset and, recursively, the datasets that it reads."""
    waiting = [dataset]
    for part in waiting:  # The list grows during the loop.
        yield part
        waiting += part._inputs()


def build_dataset(graph: Graph, structure: Tree) -> Dataset:
    """Builds the dataset that a graph describes.

    Args:
      graph: The graph.
      structure: The dataset's `element_spec`.

    Returns:
      A `tf.data.Dataset`.
    """
    tf = tensorflow()
    variant = tf.raw_ops.DatasetFromGraph(graph_def=graph.SerializeToString())
    return tf.data.experimental.from_variant(variant, structure)


def build_part(graph: Graph, node: Node) -> Dataset:
    """Builds the dataset that one node of a graph produces.

    Returns:
      A `tf.data.Dataset` whose elements are flat tuples of tensors.
    """
    tf = tensorflow()
    top = Scope(graph.node)
    part = tf.compat.v1.GraphDef(library=graph.library, versions=graph.versions)
    part.node.extend(list_upstream(top, node))
    part.node.add(name="dataset", op="_Retval", input=[node.name])
    part.node[-1].attr["T"].type = tf.variant.as_datatype_enum
    part.node[-1].attr["index"].i = 0
    prefix = "T" if "Toutput_types" in node.attr else ""
    types = node.attr[prefix + "output_types"].list.type
    shapes = node.attr["output_shapes"].list.shape
    return build_dataset(
        part,
        tuple(
            tf.TensorSpec(tf.TensorShape(shape), dtype)
            for shape, dtype in zip(shapes, types, strict=True)
        ),
    )


def get_kind(node: Node) -> str:
    """Returns a node's operation without version, such as "BatchDataset"."""
    return re.sub(r"V\d+$", "", node.op)


def read_constant(node: Node) -> np.ndarray | None:
    """Returns the value of a "Const" node; None if it contains a resource."""
    tf = tensorflow()
    tensor = node.attr["value"].tensor
    dtype = tf.as_dtype(tensor.dtype)
    if dtype == tf.resource:
        return None
    # `tf.make_ndarray` cannot read strings (TensorFlow 2.21).
    read = tf.io.parse_tensor(tensor.SerializeToString(), dtype)
    return np.asarray(read.numpy())


class Scope:
    """The nodes of a graph itself, or of one of its functions.

    Args:
      nodes: The protobuf list of nodes; new nodes are added to it.
      caller: If the nodes are those of a function: the graph's node that calls
        this function, directly or through other functions. None for the graph
        itself.
    """

    def __init__(self, nodes: Any, caller: Node | None = None) -> None:
        self.nodes = nodes
        self.caller = caller
        self._named = {node.name: node for node in nodes}

    def source(self, node: Node, index: int) -> Node | None:
        """Returns the node whose output is an input of `node`.

        Returns None if the input is an argument of the function.
        """
        name = node.input[index].removeprefix("^").split(":")[0]
        return self._named.get(name)

    def sources(self, node: Node) -> list[Node | None]:
        """Returns the nodes of all inputs; see `source`."""
        return [self.source(node, i) for i in range(len(node.input))]

    def datasets(self, node: Node) -> list[Node]:
        """Returns the nodes of the datasets that a node reads."""
        sources = filter(None, self.sources(node))
        return [s for s in sources if get_kind(s).endswith("Dataset")]

    def value(self, node: Node, index: int) -> np.ndarray | None:
        """Returns an input's value if it is a numeric or string constant.

        Returns None for other inputs.
        """
        source = self.source(node, index)
        if source is None or source.op != "Const":
            return None
        return read_constant(source)

    def feed(self, node: Node, index: int, value: Array) -> None:
        """Replaces an input of a node.

        Args:
          node: The node.
          index: Index of the input.
          value: The new input: a number, a string, or a node without inputs. A
            copy of the node is added to the scope.
        """
        name = f"{node.name}/fed_{index}"
        if isinstance(value, type(node)):
            fed = value
        else:
            tensor = tensorflow().make_tensor_proto(np.asarray(value))
            fed = type(node)(op="Const")
            fed.attr["dtype"].type = tensor.dtype
            fed.attr["value"].tensor.CopyFrom(tensor)
        self.nodes.add().CopyFrom(fed)
        self.nodes[-1].name = name
        output = "output" if fed.op == "Const" else "handle"
        node.input[index] = f"{name}:{output}:0" if self.caller else name


def list_scopes(graph: Graph) -> list[Scope]:
    """Lists the scope of the graph, then those of all called functions.

    The order does not depend on the functions' names, since these contain
    counters that depend on what the process did before.
    """
    bodies = {f.signature.name: f.node_def for f in graph.library.function}
    found = [Scope(graph.node)]
    for scope in found:  # The list grows during the loop.
        for node in scope.nodes:
            for name in list_functions(node):
                if name in bodies:
                    body = bodies.pop(name)
                    found.append(Scope(body, scope.caller or node))
    return found


def find_sink(top: Scope) -> Node:
    """Returns the last node: the dataset that the whole graph describes."""
    (result,) = (node for node in top.nodes if node.op == "_Retval")
    sink = top.source(result, 0)
    assert sink is not None
    return sink


def list_upstream(scope: Scope, node: Node) -> list[Node]:
    """Returns a node and all nodes that it depends on."""
    found, waiting = {}, [node]
    while waiting:
        node = waiting.pop()
        if node is not None and node.name not in found:
            found[node.name] = node
            waiting += scope.sources(node)
    return list(found.values())


def list_functions(node: Node) -> list[str]:
    """Returns the names of the functions that a node calls."""
    attrs = [node.attr[key] for key in sorted(node.attr)]
    found = [f.name for a in attrs for f in (a.func, *a.list.func)]
    return list(filter(None, found))


def list_called(graph: Graph, nodes: Iterable[Node]) -> list[Node]:
    """Returns the given nodes, and the nodes of all functions they call."""
    bodies = {f.signature.name: f.node_def for f in graph.library.function}
    found = list(nodes)
    for node in found:  # The list grows during the loop.
        for name in list_functions(node):
            found += bodies.pop(name, ())
    return found
