"""The canonical graph: our own small, stable form of an ATen graph."""

from npucc.graph.graph import Arg, Graph, Node, Ref, Value, described

__all__ = ["Arg", "Graph", "Node", "Ref", "Value", "described"]
